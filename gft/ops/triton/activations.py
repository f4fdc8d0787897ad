"""Stochastic rounding of x and grad_output to small integers, laid out for the votes' product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.ops import checks
from gft.ops.activations import LARGEST_SQUARED, Quantized
from gft.ops.triton.grids import spread, spread_block
from gft.ops.triton.noise import KEY, key_arguments, load_eights, noise16, noise16_by_eights
from gft.philox import NoiseKey

# A program rounds LANES · RUN tokens × FEATURES. A thread rounds eight features of RUN = 8 tokens, one after the other, so
# WARPS = LANES · FEATURES / 256. Larger programs leave more of the GPU idle in their last round.
LANES, RUN, FEATURES, WARPS = 8, 8, 64, 2
MOST_REGISTERS = 96  # a thread
CAREFUL = tl.constexpr(16)  # tokens at once where care is needed


@triton.jit
def _rounded(value, factor, noise, SIGN: tl.constexpr, TOP: tl.constexpr):
    """q of finite values, above 16 bits of fraction."""
    if SIGN:
        return ((value > 0).to(tl.int32) - (value < 0).to(tl.int32)) << 16
    return tl.clamp(value * factor, -TOP, TOP).to(tl.int32) + noise


@triton.jit
def _four_tokens(source, factor, counter, total, features, seed, step, noise_stream, call,
                 SIGN: tl.constexpr, TOP: tl.constexpr):
    """The q of four tokens, in the bytes of one word, and the sum of squares so far. `source`: (n,) pointers to the first
    of eight features."""
    word = tl.zeros((source.shape[0], 8), tl.uint32)
    for token in tl.static_range(4):
        value = load_eights(source + token * features).to(tl.float32)
        noise = 0
        if not SIGN:
            noise = noise16_by_eights(counter + token * (features // 8), seed, step, noise_stream, call)
            noise = tl.reshape(noise, value.shape)
        q = _rounded(value, factor, noise, SIGN, TOP).to(tl.uint32)
        word |= (q >> 16 & 0xFF) << (8 * token)
        total += value * value
    return word, total


@triton.jit
def _whole_tile(values, factors, out, first, block, tokens, features, seed, step, noise_stream, call,
                SIGN: tl.constexpr, TOP: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, FEATURES: tl.constexpr):
    """Without masks and without care. A thread has eight features of eight tokens: it loads 16 bytes at a time, the
    noise of a counter stays where it was drawn, and only q goes through shared memory."""
    EIGHTHS: tl.constexpr = FEATURES // 8
    place = tl.arange(0, LANES * EIGHTHS)
    token, eighth = place // EIGHTHS * RUN, block * EIGHTHS + place % EIGHTHS
    source = values + first * features + token * features + eighth * 8
    counter = (first * (features // 8)).to(tl.uint32) + (token * (features // 8) + eighth).to(tl.uint32)
    factor = 0.0 if SIGN else load_eights(factors + eighth * 8)
    total = tl.zeros((LANES * EIGHTHS, 8), tl.float32)
    a, total = _four_tokens(source, factor, counter, total, features, seed, step, noise_stream, call, SIGN, TOP)
    b, total = _four_tokens(source + 4 * features, factor, counter + features // 2, total, features,
                            seed, step, noise_stream, call, SIGN, TOP)
    words = tl.permute(tl.reshape(tl.join(a, b), (LANES, FEATURES, RUN // 4)), (1, 0, 2))
    words = tl.reshape(words, (FEATURES, LANES * RUN // 4)).to(tl.int32, bitcast=True)
    column = (block * FEATURES + tl.arange(0, FEATURES)).to(tl.int64)
    target = out.to(tl.pointer_type(tl.int32), bitcast=True) + first // 4 + column[:, None] * (tokens // 4)
    tl.store(target + tl.arange(0, LANES * RUN // 4)[None, :], words)
    return tl.sum(tl.reshape(total, (LANES, FEATURES)), 0)


@triton.jit
def _with_care(values, factors, out, first, block, tokens, features, largest_square, seed, step, noise_stream, call,
               SIGN: tl.constexpr, BY_EIGHTS: tl.constexpr, TOP: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr):
    """At the edges, too. What is NaN or inf becomes 0 and is counted; large squares are bounded."""
    column = block * FEATURES + tl.arange(0, FEATURES)
    inside = column < features
    factor = 0.0 if SIGN else tl.load(factors + column, mask=inside, other=0.0)[None, :]
    source, target = values + first * features, out + column.to(tl.int64)[:, None] * tokens + first
    total = tl.zeros((CAREFUL, FEATURES), tl.float32)
    bad = tl.zeros((CAREFUL, FEATURES), tl.int32)
    for tile in range(TOKENS // CAREFUL):
        row = tile * CAREFUL + tl.arange(0, CAREFUL)
        live = (row < tokens - first)[:, None] & inside[None, :]
        value = tl.load(source + row[:, None] * features + column[None, :], mask=live, other=0.0).to(tl.float32)
        finite = tl.abs(value) < float("inf")  # not so for NaN
        bad += (finite == 0).to(tl.int32)
        value = tl.where(finite, value, 0.0)
        noise = 0
        if BY_EIGHTS and not SIGN:
            eighth = block * (FEATURES // 8) + tl.arange(0, FEATURES // 8)
            counter = (first + row)[:, None] * (features // 8) + eighth[None, :]
            noise = tl.reshape(noise16_by_eights(counter, seed, step, noise_stream, call), (CAREFUL, FEATURES))
        elif not SIGN:
            noise = noise16((first + row)[:, None] * features + column[None, :], seed, step, noise_stream, call)
        q = (_rounded(value, factor, noise, SIGN, TOP) >> 16).to(tl.int8)
        tl.store(target + row[None, :], tl.trans(q), mask=tl.trans(live))
        total += tl.minimum(value * value, largest_square)
    return tl.sum(total, 0), tl.sum(bad)


@triton.jit(do_not_specialize=KEY)
def _quantize_kernel(values, factors, out, squares, not_finite, tokens, features, largest_square,
                     seed, step, noise_stream, call,
                     SIGN: tl.constexpr, ALIGNED: tl.constexpr, BY_EIGHTS: tl.constexpr, TOP: tl.constexpr,
                     LANES: tl.constexpr, RUN: tl.constexpr, FEATURES: tl.constexpr):
    """Tokens last: the votes are a product over tokens, and int8 tensor cores want those side by side."""
    block, chunk = tl.program_id(0), spread_block()  # programs that start one after the other read the same tokens
    first = chunk.to(tl.int64) * (LANES * RUN)
    sums, bad = tl.full((FEATURES,), float("inf"), tl.float32), 0
    if ALIGNED:  # noqa: SIM102  (known when the kernel is compiled; the other only when it runs)
        if (first + LANES * RUN <= tokens) & ((block + 1) * FEATURES <= features):
            sums = _whole_tile(values, factors, out, first, block, tokens, features, seed, step, noise_stream, call,
                               SIGN, TOP, LANES, RUN, FEATURES)
    # A sum beyond the bound, or none at all, tells of a value that is NaN, inf or too large to be squared: once more, with
    # care. Elsewhere, which is next to always, the care would take a third of the time.
    if tl.sum((sums <= largest_square).to(tl.int32)) < FEATURES:
        sums, bad = _with_care(values, factors, out, first, block, tokens, features, largest_square,
                               seed, step, noise_stream, call, SIGN, BY_EIGHTS, TOP, LANES * RUN, FEATURES)
    column = block * FEATURES + tl.arange(0, FEATURES)
    tl.store(squares + chunk * features + column, sums, mask=column < features)
    tl.store(not_finite + chunk * tl.num_programs(0) + block, bad)


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


def quantize(values: Tensor, factors: Tensor | None, largest: int, key: NoiseKey,
             not_finite: Tensor | None = None) -> Quantized:
    """Round x or grad_output to int8 (activations.quantize). q lies in memory feature by feature; squares are summed in a
    fixed order."""
    checks.check_values(values, factors, not_finite)
    if values.dtype not in checks.FLOATS or not 0 < values.numel() <= checks.MOST_ELEMENTS or key.first:
        return NotImplemented
    values, (tokens, features) = values.contiguous(), values.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=values.device)

    q, mean = empty(features, tokens, dtype=torch.int8), empty(features)
    grid = triton.cdiv(features, FEATURES), *spread(triton.cdiv(tokens, LANES * RUN))
    blocks, chunks = grid[0], grid[1] * grid[2]
    squares, bad = empty(chunks, features), empty(chunks, blocks, dtype=torch.int32)
    aligned = tokens % 16 == 0 and features % 8 == 0 and values.data_ptr() % 16 == 0
    with torch.cuda.device_of(values):  # Triton launches on the current device, not on the tensor's
        _quantize_kernel[grid](
            values, mean if factors is None else factors.contiguous(), q, squares, bad, tokens, features, LARGEST_SQUARED**2,
            **key_arguments(key, values), SIGN=factors is None, ALIGNED=aligned, BY_EIGHTS=features % 8 == 0,
            TOP=float(largest * 65536), LANES=LANES, RUN=RUN, FEATURES=FEATURES, num_warps=WARPS, maxnreg=MOST_REGISTERS)
        if factors is not None or not_finite is not None:
            _mean_kernel[(triton.cdiv(features, 16),)](
                squares, bad, mean, mean if not_finite is None else not_finite, chunks, tokens, bad.numel(), features,
                COUNT=not_finite is not None, CHUNKS=128, FEATURES=16)
    return Quantized(q.t(), None if factors is None else mean)
