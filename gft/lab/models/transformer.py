"""The pre-norm transformer block that GPT and ViT share.

    x = x + attention(norm(x))        qkv: width -> 3·width,  out: width -> width          4 · width² weights
    x = x + mlp(norm(x))              up:  width -> 4·width,  down: 4·width -> width       8 · width² weights

Quantizing is not its business: `gft.quantize_` with a filter on the names "….mlp.…" makes the paper's Hybrid-1 of it, one
on "blocks.…" its Hybrid-2.

A text is generated a token at a time, and the keys and values of those before do not change: `attention.cached` writes what
is new into memory that is always of the same shape, at places that are known to the device alone, so that one CUDA graph
serves every token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gft.errors import UsageError


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"width={width} is not divisible by heads={heads}; choose heads that divide it")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.out = nn.Linear(width, width, bias)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        q, k, v = self._heads(x)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0,
                                               is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def cached(self, x: Tensor,  # (batch, tokens, width)
               places: Tensor,  # (tokens,) int64: the tokens' positions in the text
               kept: Tensor) -> Tensor:  # (2, batch, heads, context, width of a head): keys and values, added to in place
        """What `forward` gives the last tokens of a text, from them and what is kept of those before; without dropout."""
        q, k, v = self._heads(x)
        kept.index_copy_(3, places, torch.stack([k, v]).to(kept.dtype))
        seen = torch.arange(kept.shape[3], device=x.device) <= places[:, None]
        mixed = F.scaled_dot_product_attention(q, kept[0], kept[1], attn_mask=seen)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # each (batch, heads, tokens, width of a head)
        batch, tokens, width = x.shape
        # Three thirds, not an axis of three: going backward they are simply put side by side.
        q, k, v = (third.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
                   for third in self.qkv(x).chunk(3, -1))
        return q, k, v


class MLP(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias)
        self.down = nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, bias, causal, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def cached(self, x: Tensor, places: Tensor, kept: Tensor) -> Tensor:
        """`forward` without dropout, of the last tokens of a text (Attention.cached)."""
        x = x + self.attention.cached(self.attention_norm(x), places, kept)
        return x + self.mlp(self.mlp_norm(x))


def start_as_gpt2_(model: nn.Module, depth: int) -> None:
    """Draw all linear layers and embeddings: what is added to the residual stream starts smaller, the more layers add to
    it."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            adds_to_stream = name.endswith((".out", ".down"))
            nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if adds_to_stream else 0.02)
