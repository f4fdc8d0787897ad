"""A GPT as Llama has it: RMSNorm, rotary positions, SwiGLU, no biases; if asked, fewer heads of keys than of queries.

    x = x + out(attention(q(n), k(n), v(n)))      n = norm(x)     q, out: width -> width;  k, v: width -> kv_heads · head
    x = x + down(silu(gate(n)) · up(n))           n = norm(x)     8/3 of the width inside, in whole tiles of 64

Names and maths are those of Hugging Face's LlamaForCausalLM under shorter names (`names_in_transformers`): the same weights
give the same logits, as a test holds. So what is found here is found for its users.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gft.errors import UsageError
from gft.lab.models.transformer import start_as_gpt2_

BASE = 10_000.0  # of the rotary positions
EPS = 1e-6
TILE = 64


def inner_width(width: int) -> int:
    """8/3 of the width, as Llama has it, in whole tiles."""
    return -(-8 * width // (3 * TILE)) * TILE


def rotations(context: int, head: int) -> tuple[Tensor, Tensor]:  # each (context, head)
    """cos and sin of each position's angles: feature i and i + head/2 are turned together by position · BASE^(-2i/head)."""
    # In float64 and on the CPU, then rounded once: the angles are large.
    rates = BASE ** (-torch.arange(0, head, 2, dtype=torch.float64, device="cpu") / head)
    angles = torch.outer(torch.arange(context, dtype=torch.float64, device="cpu"), rates).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def rotated(x: Tensor,  # (batch, heads, tokens, head)
            cos: Tensor, sin: Tensor) -> Tensor:  # (tokens, head) float32
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        if width % heads or heads % kv_heads or width // heads % 2:
            raise UsageError(f"width={width}, heads={heads}, kv_heads={kv_heads}: heads must divide the width into even "
                             "parts, and kv_heads must divide heads")
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (batch, tokens, width)
        q, k, v = (product.unflatten(-1, (-1, self.head)).transpose(1, 2) for product in (self.q(x), self.k(x), self.v(x)))
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True,
                                               enable_gqa=self.kv_heads != self.heads)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, EPS)
        self.attention = Attention(width, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(width, EPS)
        self.mlp = MLP(width, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """(batch, tokens) int64 -> (batch, tokens, vocabulary). Embedding and head are not tied."""

    cos: Tensor
    sin: Tensor

    def __init__(self, vocabulary: int, context: int = 1024, width: int = 768, depth: int = 12, heads: int = 12,
                 kv_heads: int | None = None, inner: int | None = None) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads or heads, inner or inner_width(width))
                                    for _ in range(depth))
        self.norm = nn.RMSNorm(width, EPS)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, values in zip(("cos", "sin"), rotations(context, width // heads), strict=True):
            self.register_buffer(name, values.to(self.head.weight.device), persistent=False)
        start_as_gpt2_(self, depth)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise UsageError(f"{length} tokens are more than this model's context of {self.context}; crop them")
        x, cos, sin = self.tokens(tokens), self.cos[:length], self.sin[:length]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


NAMES = {"tokens": "model.embed_tokens", "blocks": "model.layers", "norm": "model.norm", "head": "lm_head",
         "attention_norm": "input_layernorm", "attention": "self_attn", "mlp_norm": "post_attention_layernorm", "mlp": "mlp",
         "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj", "gate": "gate_proj", "up": "up_proj",
         "down": "down_proj"}


def names_in_transformers(model: Llama) -> dict[str, str]:
    """Each parameter's name -> its name in LlamaForCausalLM."""
    return {name: ".".join(NAMES.get(part, part) for part in name.split(".")) for name, _ in model.named_parameters()}
