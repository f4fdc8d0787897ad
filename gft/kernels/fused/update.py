"""The step: votes and stored weights in, stored weights out.

No autotuning: `_move_kernel` writes its input, and a tuner would apply the step once per candidate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.kernels.fused.noise import STREAM, load_eights, noise16, noise16_by_eights, on_device
from gft.kernels.fused.votes import PROGRAMS

# Votes a program squares at once: each of its warps ROWS rows of WIDTH · 128 columns; and how often, at most.
SQUARES_WARPS, SQUARES_ROWS, SQUARES_WIDTH, MOST_TIMES = 4, 4, 2, 16
MOVE_ROWS, MOVE_EIGHTHS, MOVE_WARPS = 4, 128, 4  # a program moves ROWS rows of EIGHTHS · 8 weights


@triton.jit
def _votes(votes, row, column, rows, columns):
    live = (row < rows)[:, :, None, None] & (column < columns)[None, None, :, :]
    return tl.load(votes + row[:, :, None, None] * columns + column[None, None, :, :], mask=live, other=0)


@triton.jit(do_not_specialize=["shift"])
def _squares_kernel(votes, sums, rows, columns, shift, SHIFTED: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr,
                    WIDTH: tl.constexpr, TIMES: tl.constexpr):
    """sums: the total's high and low half, then rows, then columns. Integers are the same in whatever order atomics add.

    Shaped so that a warp has rows of its own: a column is added up inside a thread until the end, and a row inside a warp.
    """
    column = tl.program_id(1) * (WIDTH * 128) + tl.arange(0, WIDTH)[:, None] * 128 + tl.arange(0, 128)[None, :]
    row = tl.program_id(0).to(tl.int64) * (WARPS * ROWS * TIMES)
    row += tl.arange(0, WARPS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    by_column = tl.zeros((WARPS, WIDTH, 128), tl.int64)
    coming = _votes(votes, row, column, rows, columns)
    for time in range(TIMES):
        vote = coming
        below = row + WARPS * ROWS
        # The next votes are on their way while these are squared.
        coming = _votes(votes, below, column, tl.where(time + 1 < TIMES, rows, 0), columns)
        small = (vote >> shift).to(tl.int32) if SHIFTED else vote
        square = small.to(tl.int64) * small
        by_column += tl.sum(square, 1)
        tl.atomic_add(sums + 2 + row, tl.sum(tl.sum(square, 2), 2), mask=row < rows, sem="relaxed")
        row = below
    total = tl.sum(by_column, 0)
    tl.atomic_add(sums + 2 + rows + column, total, mask=column < columns, sem="relaxed")
    tl.atomic_add(sums, tl.sum(total >> 32), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(total & 0xFFFFFFFF), sem="relaxed")


@triton.jit(do_not_specialize=["rows", "columns", "lr", "shift"])
def _factors_kernel(sums, running, step, squares, factors, rows, columns, lr, worth, clip, shift, LR_ON_DEVICE: tl.constexpr,
                    RUNNING: tl.constexpr, MOST_HALVINGS: tl.constexpr, BLOCK: tl.constexpr):
    """squares: the running ones as renewed, of rows, of columns, then of all. factors: of rows, of columns, then the cap."""
    if LR_ON_DEVICE:
        lr = tl.load(lr)
    gain = tl.full((BLOCK,), lr, tl.float32) * worth
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_all = place < rows, place == rows + columns
    high, low = tl.load(sums), tl.load(sums + 1)
    total = (high + (low >> 32)).to(tl.float64) * 4294967296.0 + (low & 0xFFFFFFFF).to(tl.float64)
    total /= (rows.to(tl.int64) * columns).to(tl.float64)
    mean = tl.load(sums + 2 + place, mask=place < rows + columns, other=0).to(tl.float64)
    mean = tl.where(is_all, total, mean / tl.where(is_row, columns, rows).to(tl.float64))
    unit = (shift.to(tl.int64) * 0 + 1 << shift).to(tl.float64)
    mean, total = mean * unit * unit, total * unit * unit
    if RUNNING:
        share = tl.full((1,), 1.0, tl.float64)
        count = tl.load(step) + 1
        for halvings in tl.static_range(1, MOST_HALVINGS + 1):
            share = tl.where(count >= 1 << halvings, 0.5**halvings, share)
        old = tl.load(running + place, mask=place <= rows + columns, other=0.0).to(tl.float64)
        mean = tl.where(old > 0, old + (mean - old) * share, mean)
        of_all = tl.load(running + rows + columns).to(tl.float64)
        total = tl.where(of_all > 0, of_all + (total - of_all) * share, total)
    square = mean.to(tl.float32)
    tl.store(squares + place, square, mask=place <= rows + columns)
    overall = tl.sqrt((tl.zeros((BLOCK,), tl.float64) + total).to(tl.float32).to(tl.float64))
    inverse = tl.where(square > 0, 1.0 / tl.sqrt(tl.where(square > 0, square, 1.0).to(tl.float64)), 0.0)
    factor = tl.where(is_row, inverse * overall * gain.to(tl.float64), inverse).to(tl.float32)
    tl.store(factors + place, tl.where(is_all, gain * clip, factor), mask=place <= rows + columns)


def rounding_factors(votes: Tensor, lr: float | Tensor, worth: float, shift: int, *, clip: float, most_halvings: int,
                     running: Tensor | None, step: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """step.rounding_factors: (out, 1) and (1, in) float32, the cap, and the squares. `worth` must be a float32."""
    votes = votes.contiguous()
    rows, columns = votes.shape
    sums = torch.zeros(2 + rows + columns, dtype=torch.int64, device=votes.device)
    factors, squares = torch.empty(2, rows + columns + 1, dtype=torch.float32, device=votes.device).unbind()
    # A program that goes on to the rows below saves atomics; but all of the GPU should have work.
    at_once = SQUARES_WARPS * SQUARES_ROWS, SQUARES_WIDTH * 128
    times = votes.numel() // (PROGRAMS * at_once[0] * at_once[1])
    times = 1 << min(max(times, 1), MOST_TIMES).bit_length() - 1
    grid = triton.cdiv(rows, at_once[0] * times), triton.cdiv(columns, at_once[1])
    with torch.cuda.device_of(votes):
        _squares_kernel[grid](votes, sums, rows, columns, shift, SHIFTED=shift > 0 or votes.dtype is torch.int64,
                              WARPS=SQUARES_WARPS, ROWS=SQUARES_ROWS, WIDTH=SQUARES_WIDTH, TIMES=times,
                              num_warps=SQUARES_WARPS)
        _factors_kernel[(triton.cdiv(rows + columns + 1, 512),)](
            sums, factors if running is None else running, on_device(step, votes), squares, factors, rows, columns,
            on_device(lr, votes) if isinstance(lr, Tensor) else lr, worth, clip, shift,
            LR_ON_DEVICE=isinstance(lr, Tensor), RUNNING=running is not None, MOST_HALVINGS=most_halvings, BLOCK=512)
    return factors[:rows, None], factors[None, rows:-1], factors[-1], squares


@triton.jit
def _moved(old, vote, noise, row_factor, column_factor, cap, unheard, follow, least, largest, p_min,
           TOPK: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, MEMORY_BITS: tl.constexpr):
    """step.topk or step.rounding. Values come and go half a level higher: then the bits above MEMORY_BITS are the level."""
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
        move = tl.clamp(share, 0.0 - cap, cap).to(tl.int32)
        if MEMORY_BITS == 0:
            move -= tl.minimum(tl.maximum(move, -unheard), unheard)
        move = (move + noise) >> 16
    if TOPK or MEMORY_BITS == 0:
        return tl.minimum(tl.maximum(old - move, LOWEST), HIGHEST)
    centre = (old & -UNIT) >> 1
    z = centre + tl.minimum(tl.maximum((old & UNIT - 1) - move, 0), UNIT - 1)
    z = tl.minimum(tl.maximum(z, (LOWEST + HALF) // 2), (HIGHEST + HALF) // 2)
    nearest = z - HALF + HALF // 2
    nearest = (nearest - (nearest >> (MEMORY_BITS - 1) & 1)) & -HALF
    return tl.where((noise & 255) < follow, nearest, centre) + z


@triton.jit
def _fields_set(word, WIDTH: tl.constexpr):
    """How many of eight fields of WIDTH bits are not 0."""
    if WIDTH == 8:
        word = ((word & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F | word) >> 7 & 0x0101010101010101
        return (word * 0x0101010101010101 >> 56).to(tl.int32)  # a product's highest field is the sum of all
    word |= word >> 1
    word = (word | word >> 2) & 0x11111111 if WIDTH == 4 else (word & 0x1111) + (word >> 2 & 0x1111)
    return (word * 0x11111111 >> 28).to(tl.int32)


@triton.jit(do_not_specialize=[*STREAM, "quiet", "p_min", "follow"])
def _move_kernel(stored, votes, row_factor, column_factor, least, largest, flips, rows, columns, bytes_a_row, cap, quiet,
                 p_min, follow, seed, step, stream, call,
                 TOPK: tl.constexpr, BY_EIGHTS: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
                 TOP_LEVEL: tl.constexpr, MEMORY_BITS: tl.constexpr, ROWS: tl.constexpr, EIGHTHS: tl.constexpr):
    """A thread has eight weights side by side: one counter of noise, and one word of WIDTH bytes.

    BY_EIGHTS: no row ends inside a word. EVEN: and none inside a program.
    """
    N: tl.constexpr = ROWS * EIGHTHS
    place = tl.arange(0, N)
    # From the end, where the votes that were squared last may still be in the cache.
    row_block, eighth_block = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    row = row_block.to(tl.int64) * ROWS + place // EIGHTHS
    eighth = eighth_block * EIGHTHS + place % EIGHTHS
    column = eighth[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = None if EVEN else (row < rows) & (eighth * 8 < columns)
    live = None if BY_EIGHTS else inside[:, None] & (column < columns)
    element = row * columns + eighth * 8
    WORD: tl.constexpr = tl.uint64 if WIDTH == 8 else tl.uint32
    # What has memory counts from -128, as packed levels count from the lowest, so that no field of a word has a sign; and
    # half a level higher.
    ONES: tl.constexpr = 0 if PACKED else 0x0101010101010101
    HALF: tl.constexpr = (1 << MEMORY_BITS) // 2
    LOWEST: tl.constexpr = 0 if PACKED else 128 + HALF - (TOP_LEVEL << MEMORY_BITS)
    HIGHEST: tl.constexpr = 2 * TOP_LEVEL if PACKED else 128 + HALF + (TOP_LEVEL << MEMORY_BITS)
    byte = tl.arange(0, WIDTH)[None, :]
    here = stored + row * bytes_a_row + eighth * WIDTH
    if BY_EIGHTS:
        here = here.to(tl.pointer_type(tl.uint16 if WIDTH == 2 else WORD), bitcast=True)
        word = tl.load(here, mask=inside).to(WORD)
        vote = load_eights(votes + element, inside)
        counter = row.to(tl.uint32) * (columns // 8).to(tl.uint32) + eighth.to(tl.uint32)
        noise = tl.reshape(noise16_by_eights(counter, seed, step, stream, call), (N, 8))
    else:
        here = here.to(tl.pointer_type(tl.uint8), bitcast=True)[:, None] + byte
        there = inside[:, None] & (eighth[:, None] * WIDTH + byte < bytes_a_row)
        word = tl.sum(tl.load(here, mask=there, other=0).to(WORD) << (8 * byte), 1)
        element = element[:, None] + tl.arange(0, 8)[None, :]
        vote = tl.load(votes + element, mask=live, other=0)
        noise = noise16(element, seed, step, stream, call)
    word = (word ^ 128 * ONES) + HALF * ONES
    shift = WIDTH * tl.arange(0, 8)[None, :]
    old = (word[:, None] >> shift & ((1 << WIDTH) - 1)).to(tl.int32)
    if TOPK:
        new = _moved(old, vote, noise, 0.0, 0.0, 0.0, 0, follow, tl.load(least), tl.load(largest), p_min,
                     TOPK, LOWEST, HIGHEST, MEMORY_BITS)
    else:
        most = tl.load(cap)
        follow = tl.where(most > 0, follow, 0)  # at a lr of 0, which may have been on the device, nothing follows
        unheard = (tl.full((1, 1), most, tl.float32) * quiet).to(tl.int32)
        # In two halves: what Triton knows to be one number it negates before it spreads it, but only where it sees a tensor
        # and its negative does it clamp in one instruction.
        half = tl.full((N, 4), most, tl.float32)
        most = tl.reshape(tl.join(half, half), (N, 8))
        by_row = tl.load(row_factor + row, mask=None if EVEN else row < rows)[:, None]
        if BY_EIGHTS:
            eighth = eighth_block * EIGHTHS + tl.arange(0, EIGHTHS)
            by_column = load_eights(column_factor + eighth * 8, None if EVEN else eighth * 8 < columns)
            by_column = tl.reshape(tl.broadcast_to(by_column[None, :, :], (ROWS, EIGHTHS, 8)), (N, 8))
        else:
            by_column = tl.load(column_factor + column, mask=column < columns, other=0.0)
        new = _moved(old, vote, noise, by_row, by_column, most, unheard, follow, 0, 0, p_min,
                     TOPK, LOWEST, HIGHEST, MEMORY_BITS)
    if not BY_EIGHTS:
        new = tl.where(live, new, old)
    if WIDTH == 8:
        fours = tl.reshape(new.to(tl.uint32), (N, 2, 4)) << (8 * tl.arange(0, 4)[None, None, :])
        low, high = tl.split(tl.sum(fours, 2))
        fresh = high.to(tl.uint64) << 32 | low.to(tl.uint64)
    else:
        fresh = tl.sum(new.to(tl.uint32) << shift, 1)
    LEVELS: tl.constexpr = (255 >> MEMORY_BITS << MEMORY_BITS) * 0x0101010101010101
    flipped = _fields_set((word ^ fresh) & LEVELS if MEMORY_BITS else word ^ fresh, WIDTH)
    fresh = (fresh - HALF * ONES) ^ 128 * ONES
    if BY_EIGHTS:
        tl.store(here, fresh, mask=inside)
    else:
        tl.store(here, (fresh[:, None] >> (8 * byte)).to(tl.uint8), mask=there)
    tl.atomic_add(flips, tl.sum(flipped if EVEN else tl.where(inside, flipped, 0)).to(tl.int64), sem="relaxed")


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
        by_eights = columns % 8 == 0 and stored.data_ptr() % 8 == 0
        eighths = min(MOVE_EIGHTHS, triton.next_power_of_2(triton.cdiv(columns, 8)))
        # Where every weight draws a counter of its own, a thread has no registers for more than eight.
        rows_at_once = (MOVE_ROWS if by_eights else 1) * MOVE_EIGHTHS // eighths
        even = by_eights and rows % rows_at_once == 0 and columns % (eighths * 8) == 0
        with torch.cuda.device_of(stored):
            _move_kernel[(triton.cdiv(rows, rows_at_once), triton.cdiv(columns, eighths * 8))](
                stored, votes, *(unused if one is None else one.contiguous() for one in (row, column, least, largest)),
                flips, rows, columns, bytes_a_row, unused if cap is None else on_device(cap, stored), quiet, p_min, follow,
                seed, on_device(step, stored), stream, call,
                TOPK=least is not None, BY_EIGHTS=by_eights, EVEN=even,
                PACKED=packed_width > 0, WIDTH=packed_width or 8, TOP_LEVEL=top_level, MEMORY_BITS=memory_bits,
                ROWS=rows_at_once, EIGHTHS=eighths, num_warps=MOVE_WARPS)
        torch.autograd.graph.increment_version(stored)  # autograd does not see what a kernel writes
