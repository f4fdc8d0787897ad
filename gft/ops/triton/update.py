"""Moving weights: votes and stored weights in, stored weights out.

No autotuning: `_move_kernel` writes its input, and a tuner would apply the step once per candidate.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.ops import checks
from gft.ops import rounding as definitions
from gft.ops.rounding import CLIP, Rounded, RoundingJob, RoundingPlan
from gft.ops.topk import TopKPlan
from gft.ops.triton.alike import (
    Batch,
    by_eights,
    kind_of,
    padded,
    pick,
    pick_stream,
    pick_votes,
    shared_launches,
    streams_argument,
    votes_argument,
)
from gft.ops.triton.constants import constants_of
from gft.ops.triton.factors import factors_of, stride_of
from gft.ops.triton.launch import Launcher
from gft.ops.triton.noise import KEY, load_eights, noise16, noise16_by_eights, on_device, width
from gft.ops.triton.overlap import launched_early, overlaps, wait_for_previous
from gft.philox import NoiseKey
from gft.storage import Storage

# A thread moves RUN times eight weights. Its program takes 128 eighths of a row where that leaves no more threads idle at a
# row's end than 16 eighths do, and as many rows as it then has threads for; both keep factors and words in their threads.
MOVE_RUN, MOVE_WARPS, MOVE_EIGHTHS = 4, 4, (128, 16)


@triton.jit
def _moved(old, vote, noise, row_factor, column_factor, cap, dead_zone, follow, least, largest, p_min,
           TOPK: tl.constexpr, THRESHOLD: tl.constexpr, INERTIA: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
           MEMORY_BITS: tl.constexpr, SPARE_BITS: tl.constexpr):
    """rounding.round_weights or topk.topk_weights, of some values. They come and go half a level higher: then the bits above
    the lowest are the level."""
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
        if THRESHOLD:
            move -= tl.minimum(tl.maximum(move, -dead_zone), dead_zone)
        move = (move + noise) >> 16
    if TOPK or not INERTIA:
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


@triton.jit(do_not_specialize=[*KEY, "noise_first", "threshold_share", "p_min", "follow"])
def _move_kernel(stored, votes, flips, stride, rows, columns, bytes_a_row,
                 row_factor, column_factor, cap, threshold_share, follow, least, largest, p_min,  # a plan's
                 seed, step, noise_stream, call, noise_first,
                 TOPK: tl.constexpr, THRESHOLD: tl.constexpr, SUITED: tl.constexpr, PACKED: tl.constexpr,
                 WIDTH: tl.constexpr, LARGEST: tl.constexpr, MEMORY_BITS: tl.constexpr, SPARE_BITS: tl.constexpr,
                 INERTIA: tl.constexpr, BY_EIGHTS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
                 EIGHTHS: tl.constexpr, OVERLAPS: tl.constexpr, TABLE: tl.constexpr, WIDE: tl.constexpr):
    """A thread has eight weights side by side: one counter of noise, and one word of WIDTH bytes.

    BY_EIGHTS: no row ends inside a word. EVEN: and none inside a program.
    """
    # From the end, where the votes that were squared last may still be in the cache.
    block, layer = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    row_blocks = tl.cdiv(rows, ROWS)
    row_block, eighth_block = block % row_blocks, block // row_blocks
    stored, votes = pick(stored, layer), pick_votes(votes, layer, TABLE, WIDE)
    noise_stream = pick_stream(noise_stream, layer)
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
    LOWEST: tl.constexpr = 0 if PACKED else 128 + HALF - (LARGEST << MEMORY_BITS)
    HIGHEST: tl.constexpr = (2 * LARGEST + 1 << SPARE_BITS) - 1 if PACKED else 128 + HALF + (LARGEST << MEMORY_BITS)
    byte = tl.arange(0, WIDTH)[None, :]
    here = stored + row * bytes_a_row + eighth * WIDTH
    if BY_EIGHTS:
        here = here.to(tl.pointer_type(tl.uint16 if WIDTH == 2 else WORD), bitcast=True)
        word = tl.load(here, mask=inside).to(WORD)
        vote = load_eights(votes + element, inside)
        counter = row.to(tl.uint32) * (columns // 8).to(tl.uint32) + eighth.to(tl.uint32)
        counter += (noise_first // 8).to(tl.uint32)  # whole eighths: it is a number of rows
        noise = tl.reshape(noise16_by_eights(counter, seed, step, noise_stream, call), (N, 8))
    else:
        here = here.to(tl.pointer_type(tl.uint8), bitcast=True)[:, None] + byte
        there = inside[:, None] & (eighth[:, None] * WIDTH + byte < bytes_a_row)
        word = tl.sum(tl.load(here, mask=there, other=0).to(WORD) << (8 * byte), 1)
        element = element[:, None] + tl.arange(0, 8)[None, :]
        vote = tl.load(votes + element, mask=live, other=0)
        noise = noise16(element + noise_first, seed, step, noise_stream, call)
    word = (word ^ 128 * ONES) + HALF * ONES
    shift = WIDTH * tl.arange(0, 8)[None, :]
    old = (word[:, None] >> shift & ((1 << WIDTH) - 1)).to(tl.int32)
    wait_for_previous(OVERLAPS)  # until the factors are there; votes and weights have been all along
    if TOPK:
        new = _moved(old, vote, noise, 0.0, 0.0, 0.0, 0, follow, tl.load(least), tl.load(largest), p_min,
                     TOPK, THRESHOLD, INERTIA, LOWEST, HIGHEST, MEMORY_BITS, SPARE_BITS)
    else:
        most = tl.load(cap)
        follow = tl.where(most > 0, follow, 0)  # at a lr of 0, which may have been on the device, nothing follows
        if SUITED:
            threshold_share = tl.load(threshold_share + layer * stride)
        dead_zone = (tl.full((1, 1), most, tl.float32) * threshold_share).to(tl.int32)
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
        new = _moved(old, vote, noise, by_row, by_column, most, dead_zone, follow, 0, 0, p_min,
                     TOPK, THRESHOLD, INERTIA, LOWEST, HIGHEST, MEMORY_BITS, SPARE_BITS)
    if not BY_EIGHTS:
        new = tl.where(live, new, old)
    if WIDTH == 8:
        fours = tl.reshape(new.to(tl.uint32), (N, 2, 4)) << (8 * tl.arange(0, 4)[None, None, :])
        low, high = tl.split(tl.sum(fours, 2))
        moved = high.to(tl.uint64) << 32 | low.to(tl.uint64)
    else:
        moved = tl.sum(new.to(tl.uint32) << shift, 1)
    LOW_BITS: tl.constexpr = MEMORY_BITS + SPARE_BITS
    LEVELS: tl.constexpr = ((1 << WIDTH) - (1 << LOW_BITS)) * (0x11111111 if WIDTH == 4 else 0x0101010101010101)
    flipped = _fields_set((word ^ moved) & LEVELS if LOW_BITS else word ^ moved, WIDTH)
    moved = (moved - HALF * ONES) ^ 128 * ONES
    if BY_EIGHTS:
        tl.store(here, moved, mask=inside)
    else:
        tl.store(here, (moved[:, None] >> (8 * byte)).to(tl.uint8), mask=there)
    flipped = tl.sum(flipped if EVEN else tl.where(inside, flipped, 0)).to(tl.int64)
    tl.atomic_add(flips + layer * stride, flipped, sem="relaxed")


_launch_move = Launcher(_move_kernel)


def _plan_arguments(plan: RoundingPlan | TopKPlan, unused: Tensor) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """The kernel's numbers and constants for either plan; in place of the other's numbers something that is not read."""
    if isinstance(plan, TopKPlan):
        numbers = unused, unused, unused, 0.0, 0, plan.least, plan.largest, plan.p_min
        return numbers, {"TOPK": True, "THRESHOLD": False, "SUITED": False}
    cap = plan.cap if isinstance(plan.cap, Tensor) else on_device(plan.cap, unused)  # of a batch one for each
    share, suited = plan.threshold_share, isinstance(plan.threshold_share, Tensor)
    numbers = plan.row, plan.column, cap, share if suited else float(share), plan.follow, unused, unused, 0
    return numbers, {"TOPK": False, "THRESHOLD": suited or share > 0, "SUITED": suited}


def _move(batch: Batch,
          plan: RoundingPlan | TopKPlan,  # of the first weight
          key: NoiseKey,  # of all of them, but for the stream
          flips: Tensor,  # int64 of the first weight, to which is added how many levels change
          stride: int = 0,  # from the first's factors, cap and flips to those of the next
          early: bool = False) -> None:  # nothing was launched since factors_of
    """Move weights that are alike, in one launch."""
    first, bytes_a_row, (rows, columns) = batch.stored[0], batch.stored[0].shape[1], batch.votes[0].shape
    in_words = by_eights(first, columns)
    in_row = triton.cdiv(columns, 8)
    eighths = min(MOVE_EIGHTHS, key=lambda some: triton.cdiv(in_row, some) * some)
    eighths = min(eighths, triton.next_power_of_2(in_row))
    # Where every weight draws a counter of its own, a thread has no registers for more than eight.
    rows_at_once = (MOVE_RUN if in_words else 1) * MOVE_WARPS * 32 // eighths
    even = in_words and rows % rows_at_once == 0 and columns % (eighths * 8) == 0
    streams = streams_argument(batch.streams)
    # Blocks of rows and of columns in one number: a grid's second may not exceed 65,535.
    grid = triton.cdiv(rows, rows_at_once) * triton.cdiv(columns, eighths * 8), len(batch.stored), 1
    numbers, kind = _plan_arguments(plan, flips)
    votes, their_kind = votes_argument(batch.votes)
    constants = {**kind, **constants_of(batch.storage), "BY_EIGHTS": in_words, "EVEN": even, "ROWS": rows_at_once,
                 "EIGHTHS": eighths, "OVERLAPS": early, **their_kind}
    _launch_move((len(streams), rows, columns, batch.votes[0].dtype, stride, isinstance(numbers[2], Tensor), width(key),
                  max(streams) >> 31, key.first >> 31, *constants.values()), grid,
                 (padded(batch.stored), votes, flips, stride, rows, columns, bytes_a_row, *numbers, key.seed,
                  on_device(key.step, first), streams, key.call, key.first), constants, num_warps=MOVE_WARPS,
                 **launched_early(early))
    torch.autograd.graph.increment_version(batch.stored)  # autograd does not see what a kernel writes


def round_weights(stored: Tensor, votes: Tensor, storage: Storage, plan: RoundingPlan, key: NoiseKey) -> Tensor:
    """Move a stored weight by stochastic rounding, in place (rounding.round_weights)."""
    checks.check_weight(stored, votes, storage)
    checks.check_factors(plan, votes)
    plan = replace(plan, row=plan.row.contiguous(), column=plan.column.contiguous())
    return _moved_alone(stored, votes, storage, plan, key)


def topk_weights(stored: Tensor, votes: Tensor, storage: Storage, plan: TopKPlan, key: NoiseKey) -> Tensor:
    """Move the weights with the largest votes one level, in place (topk.topk_weights)."""
    checks.check_weight(stored, votes, storage)
    checks.check_choice(plan, votes)
    return _moved_alone(stored, votes, storage, plan, key)


def _moved_alone(stored: Tensor, votes: Tensor, storage: Storage, plan: RoundingPlan | TopKPlan, key: NoiseKey) -> Tensor:
    if not _can_move(stored, votes, key):
        return NotImplemented
    flips = torch.zeros((), dtype=torch.int64, device=stored.device)
    _move(Batch([stored], [votes.contiguous()], [key.stream], storage), plan, key, flips)
    return flips


def _can_move(stored: Tensor, votes: Tensor, key: NoiseKey) -> bool:
    return checks.are_votes(votes, key.first) and stored.is_contiguous() and key.first % votes.shape[1] == 0


def round_many(jobs: Sequence[RoundingJob], lr: float | Tensor) -> list[Rounded]:
    """Move many weights by stochastic rounding, in place (rounding.round_many).

    Weights that are alike share three launches: squares, factors, move. One more clears all sums. The votes that were just
    squared are moved by while they may be in the cache, so one kind of weights follows the other.
    """
    for job in jobs:
        checks.check_job(job, lr)
        checks.check_weight(job.stored, job.votes, job.storage)
        _check_alike(job, jobs[0])
    able = [number for number, job in enumerate(jobs) if _can_move(job.stored, job.votes, job.key)]
    results = dict(zip(able, _round_together([jobs[number] for number in able], lr), strict=True))
    return [results[number] if number in results else definitions.round_many.definition([job], lr)[0]
            for number, job in enumerate(jobs)]


def _check_alike(job: RoundingJob, first: RoundingJob) -> None:
    one, other = job.key, first.key
    steps_differ = one.step is not other.step and (isinstance(one.step, Tensor) or one.step != other.step)
    same = (one.seed, one.call, one.first) == (other.seed, other.call, other.first)
    if not same or steps_differ or job.stored.device != first.stored.device:
        raise UsageError("weights that move together must share one device, seed, step and call of random numbers")


def _lies_well(job: RoundingJob) -> bool:
    return job.votes.is_contiguous() and (job.running is None or job.running.is_contiguous())


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _round_together(jobs: Sequence[RoundingJob], lr: float | Tensor) -> list[Rounded]:
    if not jobs:
        return []
    # All that has to be copied is copied before the sums are cleared: nothing may be launched in between.
    key = replace(jobs[0].key, step=on_device(jobs[0].key.step, jobs[0].votes))
    lr = on_device(lr, jobs[0].votes) if isinstance(lr, Tensor) else lr
    jobs = [job if _lies_well(job) else replace(job, votes=job.votes.contiguous(), running=_contiguous(job.running))
            for job in jobs]
    shared = shared_launches(kind_of(job) for job in jobs)
    strides = [stride_of(*jobs[numbers[0]].votes.shape) for numbers in shared]
    sizes = [len(numbers) * stride for numbers, stride in zip(shared, strides, strict=True)]
    sums = torch.zeros(sum(sizes), dtype=torch.int64, device=jobs[0].votes.device).split(sizes)
    results: dict[int, Rounded] = {}
    for numbers, stride, some_sums in zip(shared, strides, sums, strict=True):
        some = [jobs[number] for number in numbers]
        first, (rows, columns) = some[0], some[0].votes.shape
        factors, moments = factors_of(some, some_sums, lr, key.step)
        share = factors[:, rows + columns + 1] if first.threshold is None else first.threshold / CLIP
        plan = RoundingPlan(factors, factors[:, rows:], factors[:, rows + columns], share, first.follow)
        flips = some_sums.view(-1, stride)[:, rows + columns + 2]
        batch = Batch([job.stored for job in some], [job.votes for job in some], [job.key.stream for job in some],
                      first.storage)
        _move(batch, plan, key, flips, stride, early=overlaps(first.votes))
        results.update(zip(numbers, map(Rounded, flips, moments[:, : rows + columns + 1]), strict=True))
    return [results[number] for number in range(len(jobs))]
