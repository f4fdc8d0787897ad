"""Stochastic rounding of x and grad_output to small integers, laid out for the votes' product."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft import philox
from gft.ops import checks
from gft.ops.activations import LARGEST_SQUARED, Quantized
from gft.ops.triton.grids import spread, spread_block
from gft.ops.triton.launch import ALIGNED, Launcher
from gft.ops.triton.noise import KEY, load_eights, noise16, noise16_by_eights, on_device, width
from gft.philox import NoiseKey

# A program rounds LANES · RUN tokens × FEATURES. A thread rounds eight features of RUN = 8 tokens, one after the other, so
# WARPS = LANES · FEATURES / 256. Larger programs leave more of the GPU idle in their last round.
LANES, RUN, FEATURES, WARPS = 8, 8, 64, 2
MOST_REGISTERS = 96  # a thread
CAREFUL = tl.constexpr(16)  # tokens at once where care is needed
VOTE_ROUNDS = tl.constexpr(philox.VOTE_ROUNDS)


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
    of eight features; `counter`: of the first two tokens' noise there."""
    word = tl.zeros((source.shape[0], 8), tl.uint32)
    for pair in tl.static_range(2):
        noise = 0
        if not SIGN:
            noise = noise16_by_eights(counter + pair * (features // 8), seed, step, noise_stream, call, VOTE_ROUNDS)
            noise = tl.reshape(noise, (source.shape[0], 8))
        for one in tl.static_range(2):
            token = 2 * pair + one
            value = load_eights(source + token * features).to(tl.float32)
            its_noise = 0
            if not SIGN:
                its_noise = noise & 0xFF00 | 128 if one else (noise & 0xFF) << 8 | 128
            q = _rounded(value, factor, its_noise, SIGN, TOP).to(tl.uint32)
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
    counter = (first // 2 * (features // 8)).to(tl.uint32) + (token // 2 * (features // 8) + eighth).to(tl.uint32)
    factor = 0.0 if SIGN else load_eights(factors + eighth * 8)
    total = tl.zeros((LANES * EIGHTHS, 8), tl.float32)
    a, total = _four_tokens(source, factor, counter, total, features, seed, step, noise_stream, call, SIGN, TOP)
    b, total = _four_tokens(source + 4 * features, factor, counter + features // 4, total, features,
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
        noise = tl.zeros((CAREFUL, FEATURES), tl.int32)
        pair = (first + row) // 2
        if BY_EIGHTS and not SIGN:
            eighth = block * (FEATURES // 8) + tl.arange(0, FEATURES // 8)
            counter = pair[:, None] * (features // 8) + eighth[None, :]
            noise = tl.reshape(noise16_by_eights(counter, seed, step, noise_stream, call, VOTE_ROUNDS), (CAREFUL, FEATURES))
        elif not SIGN:
            noise = noise16(pair[:, None] * features + column[None, :], seed, step, noise_stream, call, VOTE_ROUNDS)
        noise = (noise >> (8 * (row % 2))[:, None] & 0xFF) << 8 | 128
        q = (_rounded(value, factor, noise, SIGN, TOP) >> 16).to(tl.int8)
        tl.store(target + row[None, :], tl.trans(q), mask=tl.trans(live))
        total += tl.minimum(value * value, largest_square)
    return tl.sum(total, 0), tl.sum(bad)


@triton.jit
def quantize_block(block, chunk, values, factors, out, squares, not_finite, tokens, features, largest_square,
                   seed, step, noise_stream, call,
                   SIGN: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr, BY_EIGHTS: tl.constexpr,
                   TOP: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, FEATURES: tl.constexpr):
    """Some tokens of some features. Tokens last: the votes are a product over tokens, and int8 tensor cores want those side
    by side."""
    first = chunk.to(tl.int64) * (LANES * RUN)
    sums, bad = tl.full((FEATURES,), float("inf"), tl.float32), tl.full((), 0, tl.int32)
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
    if COUNT:  # noqa: SIM102
        if bad > 0:
            tl.atomic_add(not_finite, bad.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=KEY)
def _quantize_kernel(values, factors, out, squares, not_finite, tokens, features, largest_square,
                     seed, step, noise_stream, call,
                     SIGN: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr, BY_EIGHTS: tl.constexpr,
                     TOP: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, FEATURES: tl.constexpr):
    # Programs that start one after the other read the same tokens.
    quantize_block(tl.program_id(0), spread_block(), values, factors, out, squares, not_finite, tokens, features,
                   largest_square, seed, step, noise_stream, call, SIGN, COUNT, ALIGNED, BY_EIGHTS, TOP, LANES, RUN,
                   FEATURES)


@triton.jit
def mean_of_runs(squares, mean, runs, tokens, add, features, block, RUNS: tl.constexpr, FEATURES: tl.constexpr):
    """The mean of some features from the sums over runs of tokens, added in a fixed order (activations.take_mean)."""
    column = block * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros((RUNS, FEATURES), tl.float32)
    for first in range(0, runs, RUNS):
        run = first + tl.arange(0, RUNS)
        live = (run < runs)[:, None] & (column < features)[None, :]
        total += tl.load(squares + run[:, None] * features + column[None, :], mask=live, other=0.0)
    new = tl.sum(total, 0) / tokens
    old = tl.load(mean + column, mask=column < features, other=0.0)
    tl.store(mean + column, tl.where(add != 0, old + new, new), mask=column < features)


@triton.jit(do_not_specialize=["runs", "tokens", "add"])
def _mean_kernel(squares, mean, runs, tokens, add, features, RUNS: tl.constexpr, FEATURES: tl.constexpr):
    mean_of_runs(squares, mean, runs, tokens, add, features, tl.program_id(0), RUNS, FEATURES)


_launch_quantize, _launch_mean = Launcher(_quantize_kernel), Launcher(_mean_kernel)


class Rounding(NamedTuple):
    """How values of one kind are rounded."""

    grid: tuple[int, int, int]
    runs: int  # of tokens, each summed by one program
    constants: dict[str, Any]


_roundings: dict[Hashable, Rounding] = {}


def quantize(values: Tensor, factors: Tensor | None, largest: int, key: NoiseKey,
             not_finite: Tensor | None = None) -> Quantized:
    """Round x or grad_output to int8 (activations.quantize). q lies in memory feature by feature."""
    kind = kind_of(values, factors, largest, not_finite)
    rounding = rounding_of(kind, values, factors, largest, not_finite)
    if rounding is None or key.first:
        return NotImplemented
    values = values.contiguous()
    quantized, arguments = room_for(values, factors, rounding.runs, key, not_finite)
    aligned = not values.data_ptr() & ALIGNED
    constants = rounding.constants if aligned else {**rounding.constants, "ALIGNED": False}
    _launch_quantize((kind, aligned, width(key)), rounding.grid, arguments, constants, num_warps=WARPS,
                     maxnreg=MOST_REGISTERS)
    return quantized


def kind_of(values: Tensor, factors: Tensor | None, largest: int, not_finite: Tensor | None) -> Hashable:
    """What a rounding, and the launch of it, depend on, besides where values begin and which random numbers are drawn."""
    return (values.shape, values.dtype, values.device, largest, None if factors is None else (factors.shape, factors.dtype),
            None if not_finite is None else not_finite.dtype)


def rounding_of(kind: Hashable, values: Tensor, factors: Tensor | None, largest: int,
                not_finite: Tensor | None) -> Rounding | None:
    """How such values are rounded, once they have been checked; None for what is left to the definition."""
    rounding = _roundings.get(kind)
    if rounding is not None:
        return rounding
    checks.check_values(values, factors, not_finite)
    if values.dtype not in checks.FLOATS or not 0 < values.numel() <= checks.MOST_ELEMENTS:
        return None
    tokens, features = values.shape
    grid = triton.cdiv(features, FEATURES), *spread(triton.cdiv(tokens, LANES * RUN))
    rounding = _roundings[kind] = Rounding(grid, runs_of(tokens), {
        "SIGN": factors is None, "COUNT": not_finite is not None, "ALIGNED": tokens % 16 == 0 and features % 8 == 0,
        "BY_EIGHTS": features % 8 == 0, "TOP": float(largest * 65536), "LANES": LANES, "RUN": RUN, "FEATURES": FEATURES})
    return rounding


def room_for(values: Tensor, factors: Tensor | None, runs: int, key: NoiseKey,
             not_finite: Tensor | None) -> tuple[Quantized, tuple[Any, ...]]:
    """Where the result goes, and what the kernel is given."""
    (tokens, features), device = values.shape, values.device
    q = torch.empty_strided((tokens, features), (1, tokens), dtype=torch.int8, device=device)
    squares = torch.empty((runs, features), dtype=torch.float32, device=device)
    return Quantized(q, None if factors is None else squares), (
        values, squares if factors is None else factors.contiguous(), q, squares,
        squares if not_finite is None else not_finite, tokens, features, LARGEST_SQUARED**2, key.seed,
        on_device(key.step, values), key.stream, key.call)


def runs_of(tokens: int) -> int:
    """How many programs share out the tokens of a feature, each summing its squares."""
    some, more = spread(-(-tokens // (LANES * RUN)))
    return some * more


def take_mean(squares: Tensor, tokens: int, mean: Tensor, add: bool) -> None:
    """The mean square of each feature (activations.take_mean), its runs added in a fixed order."""
    runs, features = squares.shape
    checks.check_tensor("the sums of squares", squares, (runs, features), torch.float32, mean.device)
    checks.check_tensor("the mean squares", mean, (features,), torch.float32, squares.device)
    if not squares.numel():
        return NotImplemented
    _launch_mean(features, (triton.cdiv(features, 16), 1, 1), (squares, mean, runs, max(tokens, 1), int(add), features),
                 {"RUNS": 128, "FEATURES": 16})
    return None
