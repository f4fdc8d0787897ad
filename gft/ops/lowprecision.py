"""Products of 8-bit numbers: x or grad_output rounded token by token, times levels, which 8 bits hold exactly.

    q[t, i]  = round(x[t, i] · largest / amax[t])                largest: 127 of int8, 448 of float8_e4m3
    y[t, o]  = amax[t] / largest · scale[o] · sum_i q[t, i] · level[o, i]

One scale a token, so that a large value of one token costs the others nothing, and none for groups of features: a scale can
be taken out of a sum only where it is the same for all of it. Of the three numbers that are multiplied x alone is rounded.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gft.ops.levels import PLAIN, Scaling
from gft.ops.operation import operation

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FP8: 448.0}  # the largest number of a type that is used
SMALLEST = 1e-30  # a token whose largest value is less counts as one with this: 448 over it is still a number


class Tokens(NamedTuple):
    """x or grad_output, rounded."""

    q: Tensor  # (n, features) int8 or float8_e4m3fn
    scale: Tensor  # (n,) float32: what 1 of a token's q stands for; NaN of one that had a NaN or an infinity, whose q is 0


@operation
def round_tokens(values: Tensor,  # (n, features) float
                 dtype: torch.dtype,  # INT8 or FP8
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
        q = (values * _over(largest, most)[:, None]).clamp(-largest, largest).to(dtype)
    scale = most / largest * Scaling(None, *scaling[1:]).factors()
    return Tokens(q, torch.where(finite, scale, float("nan")))


def _over(number: float, values: Tensor) -> Tensor:
    """number / values, exactly rounded. torch divides a number by a tensor by taking the tensor's reciprocal, whose rounding
    tips what lies half-way between two numbers of 8 bits: in bfloat16 many values do."""
    return torch.full_like(values, number) / values


@operation
def multiply_tokens(tokens: Tokens,  # (n, k)
                    levels: Tensor,  # (m, k), of the type of q
                    dtype: torch.dtype,
                    by_output: Tensor | None = None) -> Tensor:  # (m,) float32: another scale for each output -> (n, m)
    """q · levels^T on the tokens' scales, in `dtype`; the sum is float32's. What 8 bits hold, and products of two of them,
    float32 holds exactly."""
    with torch.autocast(levels.device.type, enabled=False):
        y = torch.matmul(tokens.q.float(), levels.float().t()) * tokens.scale[:, None]
    return (y if by_output is None else y * by_output).to(dtype)
