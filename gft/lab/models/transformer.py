"""The pre-norm transformer block that GPT and ViT share.

    x = x + attention(norm(x))        qkv: width -> 3·width,  out: width -> width          4 · width² weights
    x = x + mlp(norm(x))              up:  width -> 4·width,  down: 4·width -> width       8 · width² weights

Quantizing is not its business: `gft.quantize_` with a filter on the names "….mlp.…" makes the paper's Hybrid-1 of it, one
on "blocks.…" its Hybrid-2.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} is not divisible by heads={heads}; choose heads that divide it")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.out = nn.Linear(width, width, bias)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0,
                                               is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


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
