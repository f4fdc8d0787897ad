"""The step: votes and stored weights in, stored weights out.

No autotuning: `_move_kernel` writes its input, and a tuner would apply the step once per candidate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.kernels.fused.alike import Layer, by_eights, padded, pick, shared_launches
from gft.kernels.fused.factors import factors_of, stride_of
from gft.kernels.fused.noise import STREAM, load_eights, noise16, noise16_by_eights, on_device
from gft.kernels.fused.overlap import launched_early, overlaps, wait_for_previous

# A thread moves RUN times eight weights. Its program takes 128 eighths of a row where that leaves no more threads idle at a
# row's end than 16 eighths do, and as many rows as it then has threads for; both keep factors and words in their threads.
MOVE_RUN, MOVE_WARPS, MOVE_EIGHTHS = 4, 4, (128, 16)
FOLLOW_ALL = 256  # as in step.py


@triton.jit
def _moved(old, vote, noise, row_factor, column_factor, cap, unheard, follow, least, largest, p_min,
           TOPK: tl.constexpr, WAITS: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, MEMORY_BITS: tl.constexpr,
           SPARE_BITS: tl.constexpr):
    """step.topk or step.rounding. Values come and go half a level higher: then the bits above the lowest are the level."""
    UNIT: tl.constexpr = 1 << MEMORY_BITS + SPARE_BITS
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
    if TOPK or not WAITS:
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
def _move_kernel(stored, votes, stream, row_factor, column_factor, cap, least, largest, flips, stride, rows, columns,
                 bytes_a_row, quiet, p_min, follow, seed, step, call,
                 TOPK: tl.constexpr, WAITS: tl.constexpr, BY_EIGHTS: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
                 WIDTH: tl.constexpr, TOP_LEVEL: tl.constexpr, MEMORY_BITS: tl.constexpr, SPARE_BITS: tl.constexpr,
                 ROWS: tl.constexpr, EIGHTHS: tl.constexpr, OVERLAPS: tl.constexpr):
    """A thread has eight weights side by side: one counter of noise, and one word of WIDTH bytes.

    WAITS: levels wait before they follow. BY_EIGHTS: no row ends inside a word. EVEN: and none inside a program.
    """
    # From the end, where the votes that were squared last may still be in the cache.
    row_block, eighth_block = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    layer = tl.num_programs(2) - 1 - tl.program_id(2)
    stored, votes, stream = pick(stored, layer), pick(votes, layer), (pick(stream, layer) - 3) >> 1
    row_factor, column_factor, cap = row_factor + layer * stride, column_factor + layer * stride, cap + layer * stride
    N: tl.constexpr = ROWS * EIGHTHS
    place = tl.arange(0, N)
    row = row_block.to(tl.int64) * ROWS + place // EIGHTHS
    eighth = eighth_block * EIGHTHS + place % EIGHTHS
    column = eighth[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = None if EVEN else (row < rows) & (eighth * 8 < columns)
    live = None if BY_EIGHTS else inside[:, None] & (column < columns)
    element = row * columns + eighth * 8
    WORD: tl.constexpr = tl.uint64 if WIDTH == 8 else tl.uint32
    # What has memory counts from -128, as packed values count from the lowest, so that no field of a word has a sign; and
    # half a level higher, as packed values with spare bits do by themselves.
    ONES: tl.constexpr = 0 if PACKED else 0x0101010101010101
    HALF: tl.constexpr = (1 << MEMORY_BITS) // 2
    LOWEST: tl.constexpr = 0 if PACKED else 128 + HALF - (TOP_LEVEL << MEMORY_BITS)
    HIGHEST: tl.constexpr = (2 * TOP_LEVEL + 1 << SPARE_BITS) - 1 if PACKED else 128 + HALF + (TOP_LEVEL << MEMORY_BITS)
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
    wait_for_previous(OVERLAPS)  # until the factors are there; votes and weights have been all along
    if TOPK:
        new = _moved(old, vote, noise, 0.0, 0.0, 0.0, 0, follow, tl.load(least), tl.load(largest), p_min,
                     TOPK, WAITS, LOWEST, HIGHEST, MEMORY_BITS, SPARE_BITS)
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
                     TOPK, WAITS, LOWEST, HIGHEST, MEMORY_BITS, SPARE_BITS)
    if not BY_EIGHTS:
        new = tl.where(live, new, old)
    if WIDTH == 8:
        fours = tl.reshape(new.to(tl.uint32), (N, 2, 4)) << (8 * tl.arange(0, 4)[None, None, :])
        low, high = tl.split(tl.sum(fours, 2))
        fresh = high.to(tl.uint64) << 32 | low.to(tl.uint64)
    else:
        fresh = tl.sum(new.to(tl.uint32) << shift, 1)
    LOW_BITS: tl.constexpr = MEMORY_BITS + SPARE_BITS
    LEVELS: tl.constexpr = ((1 << WIDTH) - (1 << LOW_BITS)) * (0x11111111 if WIDTH == 4 else 0x0101010101010101)
    flipped = _fields_set((word ^ fresh) & LEVELS if LOW_BITS else word ^ fresh, WIDTH)
    fresh = (fresh - HALF * ONES) ^ 128 * ONES
    if BY_EIGHTS:
        tl.store(here, fresh, mask=inside)
    else:
        tl.store(here, (fresh[:, None] >> (8 * byte)).to(tl.uint8), mask=there)
    flipped = tl.sum(flipped if EVEN else tl.where(inside, flipped, 0)).to(tl.int64)
    tl.atomic_add(flips + layer * stride, flipped, sem="relaxed")


def _move(stored: Sequence[Tensor], votes: Sequence[Tensor], stream: Sequence[int],
          row: Tensor | None, column: Tensor | None, cap: Tensor | None, flips: Tensor,  # of the first layer
          stride: int,  # from there to those of the next
          least: Tensor | None = None, largest: Tensor | None = None,
          *, packed_width: int, top_level: int, memory_bits: int, spare_bits: int, quiet: float, p_min: int = 0, follow: int,
          seed: int, step: int | Tensor, call: int,
          early: bool = False) -> None:  # nothing was launched since factors_of
    """Move layers that are alike, in one launch."""
    first, bytes_a_row, (rows, columns) = stored[0], stored[0].shape[1], votes[0].shape
    in_words = by_eights(first, columns)
    in_row = triton.cdiv(columns, 8)
    eighths = min(MOVE_EIGHTHS, key=lambda some: triton.cdiv(in_row, some) * some)
    eighths = min(eighths, triton.next_power_of_2(in_row))
    # Where every weight draws a counter of its own, a thread has no registers for more than eight.
    rows_at_once = (MOVE_RUN if in_words else 1) * MOVE_WARPS * 32 // eighths
    even = in_words and rows % rows_at_once == 0 and columns % (eighths * 8) == 0
    # Odd and never 1: Triton compiles 1 and multiples of 16 into the kernel if they stand in a tuple, do_not_specialize or
    # not, and then every network would have kernels of its own.
    numbers = [2 * one + 3 for one in stream]
    used = [flips if one is None else one for one in (row, column, cap, least, largest)]
    with torch.cuda.device_of(first):
        _move_kernel[(triton.cdiv(rows, rows_at_once), triton.cdiv(columns, eighths * 8), len(stored))](
            padded(stored), padded(votes), padded(numbers), *used, flips, stride, rows, columns, bytes_a_row, quiet, p_min,
            follow, seed, on_device(step, first), call,
            TOPK=least is not None, WAITS=memory_bits > 0 and follow < FOLLOW_ALL, BY_EIGHTS=in_words, EVEN=even,
            PACKED=packed_width > 0, WIDTH=packed_width or 8, TOP_LEVEL=top_level, MEMORY_BITS=memory_bits,
            SPARE_BITS=spare_bits, ROWS=rows_at_once, EIGHTHS=eighths, OVERLAPS=early, num_warps=MOVE_WARPS,
            **launched_early(early))
    torch.autograd.graph.increment_version(stored)  # autograd does not see what a kernel writes


def move(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8, changed in place
         votes: Tensor,  # (rows, columns) int32 or int64
         columns: int,
         flips: Tensor,  # int64 scalar, to which is added how many levels change
         *,
         packed_width: int,  # bits of a packed field, 0 if stored with memory
         top_level: int,
         memory_bits: int,
         spare_bits: int = 0,  # of a packed field, below the level
         follow: int,
         seed: int, step: int | Tensor, stream: int, call: int,
         row: Tensor | None = None, column: Tensor | None = None, cap: float | Tensor | None = None,
         quiet: float = 0.0,  # step.Rounding
         least: Tensor | None = None, largest: Tensor | None = None, p_min: int = 0) -> None:  # step.TopK
    """step.rounding or step.topk on a whole stored matrix, in place."""
    if stored.numel():
        row, column = (None if one is None else one.contiguous() for one in (row, column))
        cap = None if cap is None else on_device(cap, stored)
        _move([stored], [votes.contiguous()], [stream], row, column, cap, flips, 0, least, largest,
              packed_width=packed_width, top_level=top_level, memory_bits=memory_bits, spare_bits=spare_bits, quiet=quiet,
              p_min=p_min, follow=follow, seed=seed, step=step, call=call)


class Rounded(NamedTuple):
    """What a step by rounding tells of one layer."""

    squares: Tensor  # (rows + columns + 1,) float32, as renewed
    flips: Tensor  # int64 scalar: how many levels have changed


def round_together(layers: Sequence[Layer],  # all on one device
                   lr: float | Tensor, *, clip: float, most_halvings: int, follow: int,
                   seed: int, step: int | Tensor, call: int) -> list[Rounded]:
    """step.rounding_factors and step.rounding of any layers, their weights in place.

    Those that are alike share three launches: squares, factors, move. One more clears all sums. The votes that were just
    squared are moved by while they may be in the cache, so one kind of layers follows the other.
    """
    layers = [layer._replace(votes=layer.votes.contiguous()) for layer in layers]
    shared = shared_launches(layer.kind() for layer in layers)
    step = on_device(step, layers[0].votes)
    strides = [stride_of(*layers[numbers[0]].votes.shape) for numbers in shared]
    sizes = [len(numbers) * stride for numbers, stride in zip(shared, strides, strict=True)]
    sums = torch.zeros(sum(sizes), dtype=torch.int64, device=step.device).split(sizes)
    told: dict[int, Rounded] = {}
    for numbers, stride, some_sums in zip(shared, strides, sums, strict=True):
        some = [layers[number] for number in numbers]
        stored, votes, running, worth, stream, *_ = zip(*some, strict=True)
        first, (rows, columns) = some[0], votes[0].shape
        factors, squares = factors_of(votes, some_sums, lr, worth, first.shift, clip=clip, most_halvings=most_halvings,
                                      running=None if first.running is None else running, step=step,
                                      own_size=first.own_size)
        flips = some_sums.view(-1, stride)[:, rows + columns + 2]
        _move(stored, votes, stream, factors, factors[:, rows:], factors[:, rows + columns], flips, stride,
              packed_width=first.packed_width, top_level=first.top_level, memory_bits=first.memory_bits,
              spare_bits=first.spare_bits, quiet=first.quiet, follow=follow, seed=seed, step=step, call=call,
              early=overlaps(first.votes))
        told.update(zip(numbers, map(Rounded, squares[:, : rows + columns + 1], flips), strict=True))
    return [told[number] for number in range(len(layers))]
