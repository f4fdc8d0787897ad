"""QuantMultiheadAttention: nn.MultiheadAttention whose projections have integer weights.

    q, k, v = q_proj(query), k_proj(key), v_proj(value)        three QuantLinear
    y       = out_proj(softmax(q · k^T / sqrt(d) + mask) · v)  and one

torch's own keeps q, k and v in one parameter and never calls a layer. Here they are three: each has a scale of its own, and
cross-attention multiplies nothing twice.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from gft.errors import UsageError
from gft.layers.layer import require_grad
from gft.layers.linear import QuantLinear, linear_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class QuantMultiheadAttention(nn.Module):
    """nn.MultiheadAttention with integer weights: the same calls, the same results.

    bits and the settings memory and gain are QuantLinear's; all else is nn.MultiheadAttention's, by name. Nested tensors
    are not taken: torch has them for the fused kernel of its float weights only.
    """

    q_proj: QuantLinear
    k_proj: QuantLinear
    v_proj: QuantLinear
    # What torch's transformer layers look at to decide whether a kernel for float weights may run.
    in_proj_weight = in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, embed_dim: int, num_heads: int, bits: int = 4, *, memory: bool | str = True, gain: bool = False,
                 **attention: Any) -> None:
        float_attention = nn.MultiheadAttention(embed_dim, num_heads, **attention)
        self._take_over(float_attention, lambda linear: QuantLinear.from_float(linear, bits, memory=memory, gain=gain))

    @classmethod
    def from_float(cls, attention: nn.MultiheadAttention, bits: int = 4, **settings: Any) -> "QuantMultiheadAttention":
        """The layer on the grids nearest to `attention`; the settings are those of QuantLinear.from_float."""
        layer = cls.__new__(cls)
        layer._take_over(attention, lambda linear: QuantLinear.from_float(linear, bits, **settings))
        return layer

    @classmethod
    def opened(cls, attention: nn.MultiheadAttention) -> nn.Module:
        """A float module that computes what `attention` does, with its weights, by layers whose inputs hooks can see."""
        layer = cls.__new__(cls)
        layer._take_over(attention, lambda linear: linear)
        return layer

    def _take_over(self, attention: nn.MultiheadAttention, layer_of: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = attention.embed_dim, attention.num_heads, attention.head_dim
        self.kdim, self.vdim, self.batch_first = attention.kdim, attention.vdim, attention.batch_first
        self.dropout, self.add_zero_attn = attention.dropout, attention.add_zero_attn
        self.bias_k, self.bias_v = attention.bias_k, attention.bias_v
        biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
        for name, weight, bias in zip(PROJECTIONS, _in_weights(attention), biases, strict=True):
            linear = linear_of(weight, None if bias is None else nn.Parameter(bias.detach().clone()))
            self.add_module(name, layer_of(linear))
        self.out_proj: Any = layer_of(linear_of(attention.out_proj.weight, attention.out_proj.bias))
        self.train(attention.training)

    def requires_grad_(self, requires_grad: bool = True) -> "QuantMultiheadAttention":
        """False freezes all of it, True lets it train again."""
        return require_grad(self, requires_grad)

    def to_float(self) -> nn.MultiheadAttention:
        """An nn.MultiheadAttention with the float values used in forward."""
        projections = [layer.to_float() for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj)]
        attention: Any = skip_init(nn.MultiheadAttention, self.embed_dim, self.num_heads, self.dropout,
                              bias=any(linear.bias is not None for linear in projections),
                              add_bias_kv=self.bias_k is not None, add_zero_attn=self.add_zero_attn, kdim=self.kdim,
                              vdim=self.vdim, batch_first=self.batch_first, device=projections[0].weight.device,
                              dtype=projections[0].weight.dtype)
        *into, out = projections
        with torch.no_grad():
            for target, linear in zip(_in_weights(attention), into, strict=True):
                target.copy_(linear.weight)
            attention.out_proj.weight.copy_(out.weight)
            if attention.in_proj_bias is not None:
                for target, linear in zip((*attention.in_proj_bias.chunk(3), attention.out_proj.bias), projections,
                                          strict=True):
                    target.zero_() if linear.bias is None else target.copy_(linear.bias)
        attention.bias_k, attention.bias_v = self.bias_k, self.bias_v
        return attention.train(self.training)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
                need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> tuple[Tensor, Tensor | None]:
        """nn.MultiheadAttention's: (output, attention weights or None)."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise UsageError("QuantMultiheadAttention takes no nested tensors; give padded ones and a key_padding_mask")
        if is_causal and attn_mask is None:
            raise UsageError("is_causal=True says that attn_mask is causal, but there is none; give the mask, too, as "
                             "nn.Transformer.generate_square_subsequent_mask makes it")
        batched = query.dim() == 3
        # (batch, tokens, features) from here on, so that a layer knows which tokens make one sample.
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._heads(self.q_proj(query)), self._heads(self.k_proj(key)), self._heads(self.v_proj(value))
        k, v = self._with_extra_tokens(k, v)
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None
        else:
            mask, is_causal = self._mask(attn_mask, key_padding_mask, q, k), False
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q * self.head_dim**-0.5 @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if not batched:
            return y[0], None if weights is None else weights[0]
        return y if self.batch_first else y.transpose(0, 1), weights

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, tokens, features) -> (batch, heads, tokens, features of a head)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _with_extra_tokens(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that are learnt (bias_k, bias_v) or zero (add_zero_attn), behind those of the input."""
        batch = len(k)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([tokens, self._heads(bias.to(tokens.dtype).expand(batch, 1, -1))], 2)
                    for tokens, bias in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return k, v

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """What is added to the scores (batch, heads, queries, keys). True in a boolean mask: not to be looked at."""
        masks = []
        if attn_mask is not None:
            shaped = attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (len(q), self.num_heads))
            masks.append(shaped)
        if key_padding_mask is not None:
            masks.append(key_padding_mask[:, None, None])
        total = None
        for mask in masks:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
            mask = F.pad(mask.to(q.dtype), (0, k.shape[2] - mask.shape[-1]))  # extra tokens are never masked
            total = mask if total is None else total + mask
        return total

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _in_weights(attention: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """The weights of q, k and v, as views of the parameters."""
    if attention.in_proj_weight is not None:
        return attention.in_proj_weight.chunk(3)
    return attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
