"""Products of 8-bit numbers on tensor cores (ops/lowprecision.py): tokens rounded in one launch, multiplied in another.

float8 results in bfloat16 are left to torch._scaled_mm, cuBLAS's and CUTLASS's kernels, where sizes suit it. All else, int8
above all, is the kernel below: torch._int_mm would write int32 to memory, only to be read, scaled and written again.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.ops import checks
from gft.ops.levels import PLAIN, Scaling
from gft.ops.lowprecision import FP8, INT8, LARGEST, SMALLEST, Tokens
from gft.ops.triton.launch import Launcher
from gft.ops.triton.levels import writes
from gft.ops.triton.votes import tile_of

MOST_FEATURES = 2**31 // 127**2  # of int8, whose sum of products int32 holds


@triton.jit
def _loaded(values, by_feature, column, features, BY_FEATURE: tl.constexpr):
    live = column < features
    value = tl.load(values + column, mask=live, other=0.0).to(tl.float32)
    if BY_FEATURE:
        value = value * tl.load(by_feature + column, mask=live, other=0.0)
    return value


@triton.jit
def _nearest(value, factor, TOP: tl.constexpr, FP8: tl.constexpr, GPU: tl.constexpr):
    """q of values, the largest of which factor makes TOP."""
    value = tl.clamp(value * factor, -TOP, TOP)
    if FP8:
        if not GPU:  # the interpreter truncates where the device rounds: hand it a number that needs no rounding
            bits = value.to(tl.int32, bitcast=True)
            normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
            small = (value + 24576.0) - 24576.0  # multiples of 2^-9, to even
            value = tl.where(tl.abs(value) < 0.015625, small, normal)
        rounded = value.to(tl.float8e4nv)
    else:
        rounded = ((value.to(tl.int32) + 32768) >> 16).to(tl.int8)
    return rounded


@triton.jit
def _round_kernel(values, q, scale, by_feature, log_gain, number, root, features,
                  BY_FEATURE: tl.constexpr, GAIN: tl.constexpr, FP8: tl.constexpr, GPU: tl.constexpr, LARGEST: tl.constexpr,
                  TOP: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """One token. TOP: what the largest value is multiplied to, 16 fraction bits included if q is int8. ONE: a block holds
    it."""
    token = tl.program_id(0).to(tl.int64)
    values, q, column = values + token * features, q + token * features, tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    value = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, features, BLOCK):
        value = _loaded(values, by_feature, first + column, features, BY_FEATURE)
        size = tl.abs(value)
        most = tl.maximum(most, tl.where(size < float("inf"), size, float("inf")))  # of NaN, too
    largest = tl.max(most, 0)
    is_whole = largest < float("inf")
    largest = tl.maximum(tl.where(is_whole, largest, 0.0), SMALLEST)
    # Exactly rounded, as torch divides: Triton's own / is not.
    factor = tl.div_rn(tl.full((), TOP, tl.float32), largest)
    one = tl.div_rn(largest, tl.full((), LARGEST, tl.float32))
    if ONE:
        value = tl.where(is_whole, value, 0.0)
        tl.store(q + column, _nearest(value, factor, TOP, FP8, GPU), mask=column < features)
    else:
        for first in range(0, features, BLOCK):
            value = _loaded(values, by_feature, first + column, features, BY_FEATURE)
            value = tl.where(is_whole, value, 0.0)
            tl.store(q + first + column, _nearest(value, factor, TOP, FP8, GPU), mask=first + column < features)
    if GAIN:
        number = number * tl.exp(tl.load(log_gain).to(tl.float32) * root)
    tl.store(scale + token, tl.where(is_whole, one * number, float("nan")))


_launch_round = Launcher(_round_kernel)


class _Rounding(NamedTuple):
    """How tokens of one kind are rounded."""

    constants: dict[str, Any]
    warps: int


_roundings: dict[Hashable, _Rounding] = {}


def round_tokens(values: Tensor, dtype: torch.dtype, scaling: Scaling = PLAIN, by_feature: Tensor | None = None) -> Tokens:
    """Round each token on a scale of its own (lowprecision.round_tokens)."""
    _, log_gain, number, root = scaling
    kind = (values.shape, values.dtype, values.device, dtype, None if log_gain is None else (log_gain.dtype, log_gain.shape),
            None if by_feature is None else (by_feature.dtype, by_feature.shape))
    rounding = _roundings.get(kind)
    if rounding is None:
        rounding = _rounding_of(values, dtype, scaling, by_feature)
        if rounding is None:
            return NotImplemented
        _roundings[kind] = rounding
    values, (tokens, features) = values.contiguous(), values.shape
    q = torch.empty((tokens, features), dtype=dtype, device=values.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=values.device)
    _launch_round((kind, number == 1.0), (tokens, 1, 1),
                  (values, q, scale, scale if by_feature is None else by_feature.contiguous(),
                   scale if log_gain is None else log_gain, number, root, features), rounding.constants,
                  num_warps=rounding.warps)
    return Tokens(q, scale)


def _rounding_of(values: Tensor, dtype: torch.dtype, scaling: Scaling, by_feature: Tensor | None) -> _Rounding | None:
    """How such tokens are rounded, once they have been checked; None for what is left to the definition."""
    checks.check_values(values, by_feature, None)
    checks.check_gain(scaling.log_gain, values.device)
    log_gain = scaling.log_gain
    if values.dtype not in checks.FLOATS or not values.numel() or not writes(dtype, values.device):
        return None
    block, warps = block_of(values.shape[1])
    constants = {"BY_FEATURE": by_feature is not None, "GAIN": log_gain is not None, "FP8": dtype is FP8,
                 "GPU": values.is_cuda, "LARGEST": LARGEST[dtype], "TOP": LARGEST[dtype] * (65536 if dtype is INT8 else 1),
                 "SMALLEST": SMALLEST, "BLOCK": block, "ONE": values.shape[1] <= block}
    return _Rounding(constants, warps)


def block_of(features: int) -> tuple[int, int]:
    """How many features of a token a program takes at once, and with how many warps. A program that reads its token twice,
    the second time from the cache, is faster than one that holds all of it."""
    if features <= 2048:
        return min(triton.next_power_of_2(features), 1024), 1
    return (2048, 4) if features <= 8192 else (4096, 8)


# ---------------------------------------------------------------------------------------------------- the product


class Cut(NamedTuple):
    """How a product is cut into programs, each of which makes a tile of y."""

    tokens: int = 128
    outputs: int = 128
    features: int = 128  # a step of a program's loop
    warps: int = 4
    stages: int = 3  # steps of the loop under way at once
    group: int = 8  # tiles one below the other that run side by side, and so read the same levels from the cache


CUT = Cut()


@triton.jit
def _product_kernel(q, levels, y, scale, by_output, tokens, outputs, features,
                    FP8: tl.constexpr, BY_OUTPUT: tl.constexpr, EVEN: tl.constexpr, TOKENS: tl.constexpr,
                    OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr):
    first_token, first_output = tile_of(tl.program_id(0), tokens, outputs, TOKENS, OUTPUTS, GROUP)
    token, output, feature = first_token + tl.arange(0, TOKENS), first_output + tl.arange(0, OUTPUTS), tl.arange(0, FEATURES)
    # Rows beyond the edge read row 0 and are not written.
    token_live, output_live = token < tokens, output < outputs
    from_q = q + tl.where(token_live, token, 0).to(tl.int64)[:, None] * features + feature[None, :]
    from_levels = levels + tl.where(output_live, output, 0).to(tl.int64)[:, None] * features + feature[None, :]
    total = tl.zeros((TOKENS, OUTPUTS), tl.float32 if FP8 else tl.int32)
    for step in range(tl.cdiv(features, FEATURES)):
        if EVEN:
            a, b = tl.load(from_q), tl.load(from_levels)
        else:
            live = (step * FEATURES + feature < features)[None, :]
            a, b = tl.load(from_q, mask=live, other=0.0), tl.load(from_levels, mask=live, other=0.0)
        total = tl.dot(a, tl.trans(b), total, out_dtype=tl.float32 if FP8 else tl.int32)
        from_q += FEATURES
        from_levels += FEATURES
    value = total.to(tl.float32) * tl.load(scale + token, mask=token_live, other=0.0)[:, None]
    if BY_OUTPUT:
        value = value * tl.load(by_output + output, mask=output_live, other=0.0)[None, :]
    place = y + token.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(place, value.to(y.dtype.element_ty), mask=token_live[:, None] & output_live[None, :])


_launch_product = Launcher(_product_kernel)


def multiply_tokens(tokens: Tokens, levels: Tensor, dtype: torch.dtype, by_output: Tensor | None = None) -> Tensor:
    """q · levels^T on the tokens' scales (lowprecision.multiply_tokens)."""
    checks.check_tokens(tokens, levels, by_output)
    q, scale = tokens
    (count, features), outputs, device = q.shape, len(levels), q.device
    if (dtype not in checks.FLOATS or not writes(q.dtype, device) or not (q.numel() and levels.numel())
            or features > MOST_FEATURES):
        return NotImplemented
    q, levels = q.contiguous(), levels.contiguous()
    if q.is_cuda and q.dtype is FP8 and dtype is torch.bfloat16 and not (features % 16 or outputs % 16) and count > 16:
        by = _ones(outputs, device) if by_output is None else by_output
        return torch._scaled_mm(q, levels.t(), scale[:, None], by[None, :], out_dtype=dtype, use_fast_accum=True)
    y = torch.empty((count, outputs), dtype=dtype, device=device)
    cut = CUT
    constants = {"FP8": q.dtype is FP8, "BY_OUTPUT": by_output is not None, "EVEN": features % cut.features == 0,
                 "TOKENS": cut.tokens, "OUTPUTS": cut.outputs, "FEATURES": cut.features, "GROUP": cut.group}
    tiles = triton.cdiv(count, cut.tokens) * triton.cdiv(outputs, cut.outputs)
    _launch_product((q.shape, q.dtype, outputs, dtype, by_output is None, cut), (tiles, 1, 1),
                    (q, levels, y, scale, scale if by_output is None else by_output.contiguous(), count, outputs, features),
                    constants, num_warps=cut.warps, num_stages=cut.stages)
    return y


@cache
def _ones(outputs: int, device: torch.device) -> Tensor:
    """torch._scaled_mm wants a scale for each output, too."""
    return torch.ones(outputs, device=device)
