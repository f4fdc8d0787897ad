"""The vote's stochastic rounding of x and delta, laid out for the votes' product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.kernels.fused.noise import STREAM, noise16, noise16_by_eights, on_device

# Tokens × features a program rounds at once, and how often it does so: it writes one partial sum of squares in all.
TILE_TOKENS, TILE_FEATURES, TILES = 64, 64, 2


@triton.jit
def _rounded(value, factor, top, first, row, column, feature_block, features, seed, step, stream, call,
             SIGN: tl.constexpr, BY_EIGHTS: tl.constexpr, FEATURES: tl.constexpr):
    """vote.quantize of a tile of finite values."""
    if SIGN:
        return (value > 0).to(tl.int8) - (value < 0).to(tl.int8)
    if BY_EIGHTS:
        eighth = feature_block * (FEATURES // 8) + tl.arange(0, FEATURES // 8)
        counter = (first * (features // 8)).to(tl.uint32) + (row[:, None] * (features // 8) + eighth[None, :]).to(tl.uint32)
        noise = noise16_by_eights(counter, seed, step, stream, call)
    else:
        noise = noise16((first + row)[:, None] * features + column[None, :], seed, step, stream, call)
    fixed = tl.minimum(tl.maximum(value * factor, -top), top).to(tl.int32)
    return ((fixed + noise) >> 16).to(tl.int8)


@triton.jit
def _with_care(source, target, factor, first, column, feature_block, tokens, features, top, largest_square,
               seed, step, stream, call, SIGN: tl.constexpr, BY_EIGHTS: tl.constexpr, TOKENS: tl.constexpr,
               FEATURES: tl.constexpr, TILES: tl.constexpr):
    """What is NaN or inf becomes 0 and is counted; large squares are bounded."""
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    bad = tl.zeros((TOKENS, FEATURES), tl.int32)
    for tile in range(TILES):
        row = tile * TOKENS + tl.arange(0, TOKENS)
        live = (row < tokens - first)[:, None] & (column < features)[None, :]
        value = tl.load(source + row[:, None] * features + column[None, :], mask=live, other=0.0).to(tl.float32)
        finite = tl.abs(value) < float("inf")  # not so for NaN
        bad += (finite == 0).to(tl.int32)
        value = tl.where(finite, value, 0.0)
        q = _rounded(value, factor, top, first, row, column, feature_block, features, seed, step, stream, call,
                     SIGN, BY_EIGHTS, FEATURES)
        tl.store(target + row[None, :], tl.trans(q), mask=tl.trans(live))
        total += tl.minimum(value * value, largest_square)
    return tl.sum(total, 0), tl.sum(bad)


@triton.jit(do_not_specialize=STREAM)
def _quantize_kernel(values, factors, out, squares, not_finite, tokens, features, top, largest_square,
                     seed, step, stream, call,
                     SIGN: tl.constexpr, EVEN: tl.constexpr, BY_EIGHTS: tl.constexpr, TOKENS: tl.constexpr,
                     FEATURES: tl.constexpr, TILES: tl.constexpr):
    chunk, feature_block = tl.program_id(0), tl.program_id(1)
    column = feature_block * FEATURES + tl.arange(0, FEATURES)
    inside = column < features
    factor = 0.0 if SIGN else tl.load(factors + column, mask=inside, other=0.0)[None, :]
    first = chunk.to(tl.int64) * (TILES * TOKENS)
    # Tokens last: the votes are a product over tokens, and int8 tensor cores want those side by side.
    source, target = values + first * features, out + column.to(tl.int64)[:, None] * tokens + first
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    for tile in tl.static_range(TILES):
        row = tile * TOKENS + tl.arange(0, TOKENS)
        live = None if EVEN else (row < tokens - first)[:, None] & inside[None, :]
        value = tl.load(source + row[:, None] * features + column[None, :], mask=live).to(tl.float32)
        if not EVEN:
            value = tl.where(live, value, 0.0)
        q = _rounded(value, factor, top, first, row, column, feature_block, features, seed, step, stream, call,
                     SIGN, BY_EIGHTS, FEATURES)
        tl.store(target + row[None, :], tl.trans(q), mask=None if EVEN else tl.trans(live))
        total += value * value
    sums = tl.sum(total, 0)
    bad = tl.sum((sums < 0).to(tl.int32))  # none
    # A sum beyond the bound, or none at all, tells of a value that is NaN, inf or too large to be squared: once more, with
    # care. Elsewhere, which is next to always, the care would take a third of the time.
    if tl.sum((sums <= largest_square).to(tl.int32)) < FEATURES:
        sums, bad = _with_care(source, target, factor, first, column, feature_block, tokens, features, top, largest_square,
                               seed, step, stream, call, SIGN, BY_EIGHTS, TOKENS, FEATURES, TILES)
    tl.store(squares + chunk * features + column, sums, mask=inside)
    tl.store(not_finite + chunk * tl.num_programs(1) + feature_block, bad)


@triton.jit(do_not_specialize=["chunks", "tokens", "programs"])
def _mean_kernel(squares, not_finite, mean, counted, chunks, tokens, programs, features,
                 COUNT: tl.constexpr, CHUNKS: tl.constexpr, FEATURES: tl.constexpr):
    """The chunks' sums of squares, added in a fixed order; how many values were not finite is added to what was counted."""
    column = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros((CHUNKS, FEATURES), tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        live = (chunk < chunks)[:, None] & (column < features)[None, :]
        total += tl.load(squares + chunk[:, None] * features + column[None, :], mask=live, other=0.0)
    tl.store(mean + column, tl.sum(total, 0) / tokens, mask=column < features)
    if COUNT and tl.program_id(0) == 0:
        count = tl.zeros((1024,), tl.int64)
        for first in range(0, programs, 1024):
            program = first + tl.arange(0, 1024)
            count += tl.load(not_finite + program, mask=program < programs, other=0)
        tl.store(counted, tl.load(counted) + tl.sum(count))


def quantize(values: Tensor,  # (n, features) float
             factors: Tensor | None,  # (features,) float32: what one is worth, in 1/65536 of q; None: q is the sign
             counted: Tensor | None = None,  # int64 scalar, to which is added how many values are NaN or inf
             *,
             largest: int, largest_squared: float,
             seed: int, step: int | Tensor, stream: int, call: int) -> tuple[Tensor, Tensor]:
    """vote.quantize with the noise of philox.noise16, and vote.mean_square.

    q is (n, features) int8 and lies in memory feature by feature. Squares are summed in a fixed order.
    """
    values = values.contiguous()
    tokens, features = values.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=values.device)

    out, mean = empty(features, tokens, dtype=torch.int8), empty(features)
    if not values.numel():
        return out.t(), mean.zero_()
    grid = triton.cdiv(tokens, TILE_TOKENS * TILES), triton.cdiv(features, TILE_FEATURES)
    squares, not_finite = empty(grid[0], features), empty(*grid, dtype=torch.int32)
    even = tokens % (TILE_TOKENS * TILES) == 0 and features % TILE_FEATURES == 0
    with torch.cuda.device_of(values):  # Triton launches on the current device, not on the tensor's
        _quantize_kernel[grid](
            values, mean if factors is None else factors, out, squares, not_finite, tokens, features,
            float(largest * 65536), largest_squared**2, seed, on_device(step, values), stream, call,
            SIGN=factors is None, EVEN=even, BY_EIGHTS=features % 8 == 0, TOKENS=TILE_TOKENS, FEATURES=TILE_FEATURES,
            TILES=TILES, num_warps=4)
        _mean_kernel[(triton.cdiv(features, 16),)](
            squares, not_finite, mean, mean if counted is None else counted, grid[0], tokens, not_finite.numel(), features,
            COUNT=counted is not None, CHUNKS=128, FEATURES=16)
    return out.t(), mean
