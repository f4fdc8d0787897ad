"""The step: votes and stored weights in, stored weights out.

No autotuning: `_move_kernel` writes its input, and a tuner would apply the step once per candidate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.kernels.fused.noise import STREAM, noise16, noise16_by_eights, on_device
from gft.kernels.fused.votes import PROGRAMS

SQUARES_ROWS, SQUARES_COLUMNS, MOST_TILES = 32, 128, 8  # votes squared at once, and how often one after the other
MOVE_AT_ONCE, MOST_COLUMNS = 4096, 1024  # weights a program moves at once, and how many of a row at most


@triton.jit(do_not_specialize=["shift"])
def _squares_kernel(votes, sums, rows, columns, shift, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """sums: the total's high and low half, then rows, then columns. Integers are the same in whatever order atomics add."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    by_row = tl.zeros((ROWS,), tl.int64)
    for tile in range(TILES):
        column = (tl.program_id(1) * TILES + tile) * COLUMNS + tl.arange(0, COLUMNS)
        live = (row < rows)[:, None] & (column < columns)[None, :]
        vote = tl.load(votes + row[:, None] * columns + column[None, :], mask=live, other=0)
        small = (vote >> shift).to(tl.int32).to(tl.int64)
        square = small * small
        by_row += tl.sum(square, 1)
        tl.atomic_add(sums + 2 + rows + column, tl.sum(square, 0), mask=column < columns, sem="relaxed")
    tl.atomic_add(sums + 2 + row, by_row, mask=row < rows, sem="relaxed")
    tl.atomic_add(sums, tl.sum(by_row >> 32, 0), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(by_row & 0xFFFFFFFF, 0), sem="relaxed")


@triton.jit(do_not_specialize=["rows", "columns", "lr", "shift"])
def _factors_kernel(sums, factors, rows, columns, lr, worth, clip, shift, LR_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr):
    """factors: of rows, of columns, then the cap."""
    if LR_ON_DEVICE:
        lr = tl.load(lr)
    gain = tl.full((BLOCK,), lr, tl.float32) * worth
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < rows + columns
    is_row = place < rows
    high, low = tl.load(sums), tl.load(sums + 1)
    total = (high + (low >> 32)).to(tl.float64) * 4294967296.0 + (low & 0xFFFFFFFF).to(tl.float64)
    count = rows.to(tl.int64) * columns
    overall = tl.sqrt(total / count.to(tl.float64)) / (shift.to(tl.int64) * 0 + 1 << shift).to(tl.float64)
    mean = tl.load(sums + 2 + place, mask=live, other=0).to(tl.float64) / tl.where(is_row, columns, rows).to(tl.float64)
    inverse = tl.where(mean > 0, 1.0 / tl.sqrt(tl.where(mean > 0, mean, 1.0)), 0.0)
    factor = tl.where(is_row, inverse * overall * gain.to(tl.float64), inverse).to(tl.float32)
    tl.store(factors + place, tl.where(live, factor, gain * clip), mask=place <= rows + columns)


def rounding_factors(votes: Tensor, lr: float | Tensor, worth: float, shift: int, *,
                     clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """step.rounding_factors: (out, 1) and (1, in) float32, and the cap. `worth` must be a float32."""
    votes = votes.contiguous()
    rows, columns = votes.shape
    sums = torch.zeros(2 + rows + columns, dtype=torch.int64, device=votes.device)
    factors = torch.empty(rows + columns + 1, dtype=torch.float32, device=votes.device)
    # A program that goes on to the next tile saves atomics; but all of the GPU should have work.
    tiles = max(1, min(MOST_TILES, votes.numel() // (PROGRAMS * SQUARES_ROWS * SQUARES_COLUMNS)))
    grid = triton.cdiv(rows, SQUARES_ROWS), triton.cdiv(columns, SQUARES_COLUMNS * tiles)
    with torch.cuda.device_of(votes):
        _squares_kernel[grid](votes, sums, rows, columns, shift, ROWS=SQUARES_ROWS, COLUMNS=SQUARES_COLUMNS, TILES=tiles)
        _factors_kernel[(triton.cdiv(rows + columns + 1, 512),)](
            sums, factors, rows, columns, on_device(lr, votes) if isinstance(lr, Tensor) else lr, worth, clip, shift,
            LR_ON_DEVICE=isinstance(lr, Tensor), BLOCK=512)
    return factors[:rows, None], factors[None, rows:-1], factors[-1]


@triton.jit
def _moved(old, vote, noise, row_factor, column_factor, cap, quiet, follow, least, largest, p_min,
           TOPK: tl.constexpr, TOP_LEVEL: tl.constexpr, MEMORY_BITS: tl.constexpr):
    """The new values: step.topk or step.rounding."""
    UNIT: tl.constexpr = 1 << MEMORY_BITS
    HALF: tl.constexpr = UNIT // 2
    if TOPK:
        span, size = largest - least, tl.abs(vote.to(tl.int64))
        chance = tl.where(span > 0, (size - least) * 65536 // tl.maximum(span, 1), 65536)
        chance = tl.minimum(tl.maximum(chance, p_min), 65536)
        moves = (size >= least) & (size > 0) & (noise < chance)
        move = tl.where(moves, tl.where(vote > 0, UNIT, -UNIT), 0)
    else:
        share = vote.to(tl.float32) * row_factor * column_factor
        move = tl.minimum(tl.maximum(share, -cap), cap).to(tl.int32)
        if MEMORY_BITS == 0:
            unheard = (tl.full((1, 1), cap, tl.float32) * tl.full((1, 1), quiet, tl.float32)).to(tl.int32)
            move -= tl.minimum(tl.maximum(move, -unheard), unheard)
        move = (move + noise) >> 16
    if TOPK or MEMORY_BITS == 0:
        return tl.minimum(tl.maximum(old - move, -TOP_LEVEL * UNIT), TOP_LEVEL * UNIT)
    level = (old + HALF) >> MEMORY_BITS
    z = old - level * HALF - move  # old - level · UNIT + level · HALF
    z = tl.minimum(tl.maximum(z, -TOP_LEVEL * HALF), TOP_LEVEL * HALF)
    z = tl.minimum(tl.maximum(z, (level - 1) * HALF), (level + 1) * HALF - 1)
    nearest = (z + HALF // 2 - ((noise >> 8) & 1)) >> (MEMORY_BITS - 1)
    return tl.where((noise & 255) < follow, nearest, level) * HALF + z


@triton.jit(do_not_specialize=[*STREAM, "quiet", "p_min", "follow"])
def _move_kernel(stored, votes, row_factor, column_factor, least, largest, flips, rows, columns, bytes_a_row, cap, quiet,
                 p_min, follow, seed, step, stream, call,
                 TOPK: tl.constexpr, BY_EIGHTS: tl.constexpr, PACKED: tl.constexpr,
                 WIDTH: tl.constexpr, TOP_LEVEL: tl.constexpr, MEMORY_BITS: tl.constexpr, ROWS: tl.constexpr,
                 BYTES: tl.constexpr):
    PER_BYTE: tl.constexpr = 8 // WIDTH
    COLUMNS: tl.constexpr = BYTES * PER_BYTE
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = stored + row[:, None] * bytes_a_row + byte[None, :]
    inside = (row < rows)[:, None] & (byte < bytes_a_row)[None, :]
    live = (row < rows)[:, None] & (column < columns)[None, :]
    raw = tl.load(here, mask=inside, other=0).to(tl.int32)
    if PACKED:
        shift = WIDTH * tl.arange(0, PER_BYTE)[None, None, :]
        old = tl.reshape((raw[:, :, None] >> shift) & ((1 << WIDTH) - 1), (ROWS, COLUMNS)) - TOP_LEVEL
    else:
        old = raw
    element = row[:, None] * columns + column[None, :]
    vote = tl.load(votes + element, mask=live, other=0)
    if BY_EIGHTS:
        eighth = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
        noise = noise16_by_eights(row[:, None] * (columns // 8) + eighth[None, :], seed, step, stream, call)
    else:
        noise = noise16(element, seed, step, stream, call)
    if TOPK:
        new = _moved(old, vote, noise, 0.0, 0.0, 0.0, quiet, follow, tl.load(least), tl.load(largest), p_min,
                     TOPK, TOP_LEVEL, MEMORY_BITS)
    else:
        most = tl.load(cap)
        follow = tl.where(most > 0, follow, 0)  # at a lr of 0, which may have been on the device, nothing follows
        by_row = tl.load(row_factor + row, mask=row < rows, other=0.0)[:, None]
        by_column = tl.load(column_factor + column, mask=column < columns, other=0.0)[None, :]
        new = _moved(old, vote, noise, by_row, by_column, most, quiet, follow, 0, 0, p_min, TOPK, TOP_LEVEL, MEMORY_BITS)
    HALF: tl.constexpr = (1 << MEMORY_BITS) // 2
    changed = live & (((new + HALF) >> MEMORY_BITS) != ((old + HALF) >> MEMORY_BITS))
    if PACKED:
        code = tl.reshape(tl.where(live, new + TOP_LEVEL, 0), (ROWS, BYTES, PER_BYTE)) << shift
        tl.store(here, tl.sum(code, 2).to(tl.uint8), mask=inside)
    else:
        tl.store(here, new.to(tl.int8), mask=inside)
    tl.atomic_add(flips, tl.sum(changed.to(tl.int32)).to(tl.int64))


def move(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8, changed in place
         votes: Tensor,  # (rows, columns) int32 or int64
         columns: int,
         flips: Tensor,  # int64 scalar, to which is added how many levels change
         *,
         packed_width: int,  # bits of a packed level, 0 if stored with memory
         top_level: int,
         memory_bits: int,
         follow: int,
         seed: int, step: int | Tensor, stream: int, call: int,
         row: Tensor | None = None, column: Tensor | None = None, cap: float | Tensor | None = None,
         quiet: float = 0.0,  # step.Rounding
         least: Tensor | None = None, largest: Tensor | None = None, p_min: int = 0) -> None:  # step.TopK
    """step.rounding or step.topk on a whole stored matrix, in place."""
    votes = votes.contiguous()
    unused = flips
    rows, bytes_a_row = stored.shape
    if stored.numel():
        columns_at_once = max(8, min(MOST_COLUMNS, triton.next_power_of_2(columns)))
        rows_at_once, bytes_at_once = MOVE_AT_ONCE // columns_at_once, columns_at_once * (packed_width or 8) // 8
        with torch.cuda.device_of(stored):
            _move_kernel[(triton.cdiv(rows, rows_at_once), triton.cdiv(bytes_a_row, bytes_at_once))](
                stored, votes, *(unused if one is None else one.contiguous() for one in (row, column, least, largest)),
                flips, rows, columns, bytes_a_row, unused if cap is None else on_device(cap, stored), quiet, p_min, follow,
                seed, on_device(step, stored), stream, call,
                TOPK=least is not None, BY_EIGHTS=columns % 8 == 0,
                PACKED=packed_width > 0, WIDTH=packed_width or 8, TOP_LEVEL=top_level, MEMORY_BITS=memory_bits,
                ROWS=rows_at_once, BYTES=bytes_at_once)
        torch.autograd.graph.increment_version(stored)  # autograd does not see what a kernel writes
