"""nanoGPT as the paper trains it: characters in, the next character's logits out."""

import torch
from torch import Tensor, nn

from gft.lab.models.transformer import Block


class GPT(nn.Module):
    """(batch, tokens) int64 -> (batch, tokens, vocabulary).

    6 layers, 6 heads, width 384, context 256, no bias in linear layers, a head of its own: 10,775,040 parameters, of
    which 158,208 lie outside the blocks' matrices (paper, Table 2).
    """

    def __init__(self, vocabulary: int, context: int = 256, width: int = 384, depth: int = 6, heads: int = 6,
                 dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, False, True, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                # As GPT-2: what is added to the residual stream starts smaller, the more layers add to it.
                adds_to_stream = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if adds_to_stream else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens are more than this model's context of {self.context}; crop them")
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
