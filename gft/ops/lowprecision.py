"""Products of whole numbers: x or grad_output rounded token by token, times levels, which 8 bits hold exactly.

    q[t, i]  = round(x[t, i] · largest / amax[t])                largest: 127 of int8, 448 of float8_e4m3
    y[t, o]  = amax[t] / largest · scale[o] · sum_i q[t, i] · level[o, i]

One scale a token, so that a large value of one token costs the others nothing, and none for groups of features: a scale can
be taken out of a sum only where it is the same for all of it. Of the three numbers that are multiplied x alone is rounded.

FIXED rounds to fixed point of 24 bits, as fine as float32 is for a token's largest value. With a processor's instruction for
products of bytes that is faster than floats (native/tokens.h), and exact: the sum is rounded once, however it is shared out.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gft.ops.levels import PLAIN, Scaling
from gft.ops.operation import operation

INT8, FP8, FIXED = torch.int8, torch.float8_e4m3fn, torch.int32
LARGEST = {INT8: 127.0, FP8: 448.0, FIXED: 127.0 * 65536}  # the largest number of a type that is used
REPAYS_FIXED = 1 << 16  # weights of a layer, from which on it is worth packing them for FIXED
MOST_FEATURES = 1 << 17  # whose digits times levels of 8 bits int32 is sure to hold
SMALLEST = 1e-30  # a token whose largest value is less counts as one with this: 448 over it is still a number


class Tokens(NamedTuple):
    """x or grad_output, rounded."""

    q: Tensor  # (n, features) INT8, FP8 or FIXED
    scale: Tensor  # (n,) float32: what 1 of a token's q stands for; NaN of one that had a NaN or an infinity, whose q is 0


def prefers_fixed(like: Tensor, weights: int) -> bool:
    """Are floats like these multiplied with so many levels in fixed point by default? In float32 on a CPU with AMX: its
    products of bytes take a third of the time (docs/benchmarks.md). The processor decides, not the kernels, so that a
    training ends in the same bits with C and without."""
    return weights >= REPAYS_FIXED and like.dtype is torch.float32 and like.device.type == "cpu" and _has_tiles()


@cache
def _has_tiles() -> bool:
    from gft.ops.native.build import has_tiles  # looks at the processor: never at import

    return has_tiles()


@operation
def round_tokens(values: Tensor,  # (n, features) float
                 dtype: torch.dtype,  # INT8, FP8 or FIXED
                 scaling: Scaling = PLAIN,  # its number and gain go into the tokens' scales,
                 by_feature: Tensor | None = None) -> Tokens:  # (features,): values are multiplied by these first
    """Round each token on a scale of its own, to nearest."""
    values = values.float() if by_feature is None else values.float() * by_feature.float()
    most = values.abs().amax(1) if values.shape[1] else values.new_zeros(len(values))
    finite = most < float("inf")  # not so for NaN
    most = torch.where(finite, most, 0.0).clamp_min(SMALLEST)
    values = torch.where(finite[:, None], values, 0.0)
    largest = LARGEST[dtype]
    if dtype is INT8:
        # Fixed point with 16 fraction bits, as for votes (activations.quantize): one rounding of one product, then integers.
        top = largest * 65536
        fixed = (values * _over(top, most)[:, None]).clamp(-top, top).to(torch.int32)
        q = ((fixed + 32768) >> 16).to(torch.int8)
    else:
        q = (values * _over(largest, most)[:, None]).clamp(-largest, largest)
        q = (q.round() if dtype is FIXED else q).to(dtype)
    scale = most / largest * Scaling(None, *scaling[1:]).factors()
    return Tokens(q, torch.where(finite, scale, float("nan")))


def _over(number: float, values: Tensor) -> Tensor:
    """number / values, exactly rounded. torch divides a number by a tensor by taking the tensor's reciprocal, whose rounding
    tips what lies half-way between two numbers of 8 bits: in bfloat16 many values do."""
    return torch.full_like(values, number) / values


@operation
def multiply_tokens(tokens: Tokens,  # (n, k)
                    levels: Tensor,  # (m, k), of the type of q, or int8 if that is FIXED
                    dtype: torch.dtype,
                    by_output: Tensor | None = None) -> Tensor:  # (m,) float32: another scale for each output -> (n, m)
    """q · levels^T on the tokens' scales, in `dtype`; the sum is float32's. What 8 bits hold, and products of two of them,
    float32 holds exactly; sums of FIXED float64 holds, and rounds once."""
    sums = torch.float64 if tokens.q.dtype is FIXED else torch.float32
    with torch.autocast(levels.device.type, enabled=False):
        y = torch.matmul(tokens.q.to(sums), levels.to(sums).t()).float() * tokens.scale[:, None]
    return (y if by_output is None else y * by_output).to(dtype)
