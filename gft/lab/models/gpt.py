"""nanoGPT as the paper trains it: characters in, the next character's logits out."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gft.errors import UsageError
from gft.lab.models.transformer import Block, start_as_gpt2_


@dataclass(frozen=True)
class Cache:
    """What generating a text keeps of the tokens read so far. Both tensors are changed in place."""

    kept: Tensor  # (depth, 2, batch, heads, context, width of a head): keys and values
    length: Tensor  # () int64, on the device: how many tokens


class GPT(nn.Module):
    """(batch, tokens) int64 -> (batch, tokens, vocabulary).

    6 layers, 6 heads, width 384, context 256, no bias in linear layers, a head of its own: 10,775,040 parameters, of
    which 158,208 lie outside the blocks' matrices (paper, Table 2).
    """

    def __init__(self, vocabulary: int, context: int = 256, width: int = 384, depth: int = 6, heads: int = 6,
                 dropout: float = 0.0) -> None:
        super().__init__()
        self.context, self.heads = context, heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, False, True, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        start_as_gpt2_(self, depth)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise UsageError(f"{length} tokens are more than this model's context of {self.context}; crop them")
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def cache(self, batch: int) -> Cache:
        """An empty one, for texts of up to `context` tokens; those of a batch grow at the same pace."""
        weight = self.positions.weight
        kept = weight.new_zeros(len(self.blocks), 2, batch, self.heads, self.context, weight.shape[1] // self.heads)
        return Cache(kept, torch.zeros((), dtype=torch.int64, device=weight.device))

    @torch.no_grad()
    def cached(self, tokens: Tensor, cache: Cache) -> Tensor:
        """The logits of tokens that follow those in the cache, which they are added to: what `forward` gives the last
        tokens of the whole text, in eval mode. That it does not outgrow `context` is for the caller to see to."""
        places = cache.length + torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block, kept in zip(self.blocks, cache.kept, strict=True):
            assert isinstance(block, Block)
            x = block.cached(x, places, kept)
        cache.length.add_(tokens.shape[1])
        return self.head(self.norm(x))
