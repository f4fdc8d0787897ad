"""What a step by rounding must know of whole layers: second moments of their votes, and the factors of their moves."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.ops import checks
from gft.ops.rounding import CLIP, MOST_HALVINGS, MULTIPLES, ONE, SUITED, RoundingJob, RoundingPlan
from gft.ops.triton.alike import padded, pick, pick_votes, votes_argument
from gft.ops.triton.launch import Launcher
from gft.ops.triton.noise import on_device
from gft.ops.triton.overlap import launched_early, let_next_begin, overlaps, wait_for_previous
from gft.ops.triton.votes import PROGRAMS

# Votes a program squares at once: each of its warps ROWS rows of WIDTH · 128 columns; and how often, at most.
SQUARES_WARPS, SQUARES_ROWS, SQUARES_WIDTH, MOST_TIMES = 4, 8, 1, 16
FACTORS_BLOCK = 512
FIRST_OCTAVE = tl.constexpr(2.0 * ONE)
SHARES = tuple(threshold / CLIP for threshold in SUITED[1:])


@triton.jit
def _votes(votes, row, column, rows, columns):
    live = (row < rows)[:, :, None, None] & (column < columns)[None, None, :, :]
    return tl.load(votes + row[:, :, None, None] * columns + column[None, None, :, :], mask=live, other=0)


@triton.jit(do_not_specialize=["shift"])
def _squares_kernel(votes, sums, stride, rows, columns, shift, SHIFTED: tl.constexpr, WARPS: tl.constexpr,
                    ROWS: tl.constexpr, WIDTH: tl.constexpr, TIMES: tl.constexpr, OVERLAPS: tl.constexpr,
                    TABLE: tl.constexpr, WIDE: tl.constexpr):
    """sums: of each layer the total's high and low half, then rows, then columns. Integers are the same in whatever order
    atomics add.

    Shaped so that a warp has rows of its own: a column is added up inside a thread until the end, and a row inside a warp.
    """
    let_next_begin(OVERLAPS)
    votes, sums = pick_votes(votes, tl.program_id(1), TABLE, WIDE), sums + tl.program_id(1) * stride
    # Both blocks in one number: a grid's second may not exceed 65,535.
    row_blocks = tl.cdiv(rows, WARPS * ROWS * TIMES)
    column = tl.program_id(0) // row_blocks * (WIDTH * 128) + tl.arange(0, WIDTH)[:, None] * 128 + tl.arange(0, 128)[None, :]
    row = (tl.program_id(0) % row_blocks).to(tl.int64) * (WARPS * ROWS * TIMES)
    row += tl.arange(0, WARPS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    by_column = tl.zeros((WARPS, WIDTH, 128), tl.int64)
    coming = _votes(votes, row, column, rows, columns)
    wait_for_previous(OVERLAPS)  # until the sums are cleared
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


@triton.jit(do_not_specialize=["rows", "columns", "lr", "shift", "warmup"])
def _factors_kernel(sums, running, step, moments, factors, stride, rows, columns, lr, lr_scale, warmup, clip, shift,
                    multiples, shares,  # rounding.suited
                    LR_ON_DEVICE: tl.constexpr, RUNNING: tl.constexpr, RESCALE_STEP: tl.constexpr,
                    SUITED: tl.constexpr, MOST_HALVINGS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """moments: the running ones as renewed, of rows, of columns, then of all. factors: of rows, of columns, then the cap
    and, if it suits the move, the threshold as a share of the cap."""
    let_next_begin(OVERLAPS)
    layer = tl.program_id(1)
    sums, moments, factors = sums + layer * stride, moments + layer * stride, factors + layer * stride
    if LR_ON_DEVICE:
        lr = tl.load(lr)
    count = tl.load(step) + 1
    grown = tl.minimum(count.to(tl.float64) / warmup.to(tl.float64), 1.0).to(tl.float32)  # rounding.share_of_warmup
    size = tl.full((BLOCK,), lr, tl.float32) * pick(lr_scale, layer) * grown
    threshold_share = tl.zeros((BLOCK,), tl.float32)
    if SUITED:
        rms, multiple = size, tl.full((BLOCK,), 1.0, tl.float32)
        for octave in tl.static_range(len(shares)):
            below = rms < FIRST_OCTAVE * 0.5**octave
            multiple = tl.where(below, multiples[octave], multiple)
            threshold_share = tl.where(below, shares[octave], threshold_share)
        size = rms * multiple
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_all = place < rows, place == rows + columns
    wait_for_previous(OVERLAPS)  # until the sums are added up
    high, low = tl.load(sums), tl.load(sums + 1)
    total = (high + (low >> 32)).to(tl.float64) * 4294967296.0 + (low & 0xFFFFFFFF).to(tl.float64)
    total /= (rows.to(tl.int64) * columns).to(tl.float64)
    mean = tl.load(sums + 2 + place, mask=place < rows + columns, other=0).to(tl.float64)
    mean = tl.where(is_all, total, mean / tl.where(is_row, columns, rows).to(tl.float64))
    unit = (shift.to(tl.int64) * 0 + 1 << shift).to(tl.float64)
    mean, total = mean * unit * unit, total * unit * unit
    own = (tl.zeros((BLOCK,), tl.float64) + total).to(tl.float32).to(tl.float64)
    if RUNNING:
        running = pick(running, layer)
        share = tl.full((1,), 1.0, tl.float64)
        for halvings in tl.static_range(1, MOST_HALVINGS + 1):
            share = tl.where(count >= 1 << halvings, 0.5**halvings, share)
        old = tl.load(running + place, mask=place <= rows + columns, other=0.0).to(tl.float64)
        mean = tl.where(old > 0, old + (mean - old) * share, mean)
        of_all = tl.load(running + rows + columns).to(tl.float64)
        total = tl.where(of_all > 0, of_all + (total - of_all) * share, total)
    moment = mean.to(tl.float32)
    tl.store(moments + place, moment, mask=place <= rows + columns)
    overall = (tl.zeros((BLOCK,), tl.float64) + total).to(tl.float32).to(tl.float64)
    # `own` is 0 only where there are no votes; then nothing moves anyway.
    overall = overall / tl.sqrt(tl.where(own > 0, own, 1.0)) if RESCALE_STEP else tl.sqrt(overall)
    inverse = tl.where(moment > 0, 1.0 / tl.sqrt(tl.where(moment > 0, moment, 1.0).to(tl.float64)), 0.0)
    factor = tl.where(is_row, inverse * overall * size.to(tl.float64), inverse).to(tl.float32)
    factor = tl.where(is_all, size * clip, tl.where(place > rows + columns, threshold_share, factor))
    tl.store(factors + place, factor, mask=place < rows + columns + 2)


_launch_squares, _launch_factors = Launcher(_squares_kernel), Launcher(_factors_kernel)


def stride_of(rows: int, columns: int) -> int:
    """From a layer's sums, factors or moments to the next one's: room for all of them and three numbers more, aligned."""
    return triton.cdiv(rows + columns + 3, 16) * 16


def _square(votes: Sequence[Tensor],  # of one shape and type, contiguous
            sums: Tensor,  # (votes · stride,) int64, all 0, and nothing launched since they were cleared
            shift: int) -> bool:  # did it begin early?
    (rows, columns), first = votes[0].shape, votes[0]
    # A program that goes on to the rows below saves atomics; but all of the GPU should have work.
    at_once = SQUARES_WARPS * SQUARES_ROWS, SQUARES_WIDTH * 128
    times = len(votes) * first.numel() // (PROGRAMS * at_once[0] * at_once[1])
    times = 1 << min(max(times, 1), MOST_TIMES).bit_length() - 1
    grid = triton.cdiv(rows, at_once[0] * times) * triton.cdiv(columns, at_once[1]), len(votes), 1
    early, (layers, kind) = overlaps(first), votes_argument(votes)
    constants = {"SHIFTED": shift > 0 or first.dtype is torch.int64, "WARPS": SQUARES_WARPS, "ROWS": SQUARES_ROWS,
                 "WIDTH": SQUARES_WIDTH, "TIMES": times, "OVERLAPS": early, **kind}
    _launch_squares((len(layers), rows, columns, first.dtype, *constants.values()), grid,
                    (layers, sums, stride_of(rows, columns), rows, columns, shift), constants, num_warps=SQUARES_WARPS,
                    **launched_early(early))
    return early


def sums_of_squares(votes: Tensor, shift: int) -> Tensor:
    """Sum the squares of votes by row and by column (rounding.sums_of_squares)."""
    checks.check_matrix("the votes", votes)
    if not checks.are_votes(votes):
        return NotImplemented
    votes, (rows, columns) = votes.contiguous(), votes.shape
    sums = torch.zeros(stride_of(rows, columns), dtype=torch.int64, device=votes.device)
    _square([votes], sums, shift)
    return sums[2 : 2 + rows + columns]


def factors_of(jobs: Sequence[RoundingJob],  # of one kind, their votes contiguous
               sums: Tensor,  # (jobs · stride,) int64, all 0: scratch
               lr: float | Tensor,
               step: int | Tensor) -> tuple[Tensor, Tensor]:  # (jobs, stride) float32
    """rounding.rounding_plan of many: of each the factors of its rows, of its columns, the cap and the threshold's share of
    it; and its second moments.

    Nothing may be launched between what clears `sums` and this: squaring begins while that still goes on.
    """
    job, votes = jobs[0], [job.votes for job in jobs]
    (rows, columns), first, stride = votes[0].shape, votes[0], stride_of(*votes[0].shape)
    factors, moments = torch.empty(2, len(jobs), stride, dtype=torch.float32, device=first.device).unbind()
    running = [job.running.contiguous() for job in jobs if job.running is not None] or [moments]
    early = _square(votes, sums, job.shift)
    constants = {"LR_ON_DEVICE": isinstance(lr, Tensor), "RUNNING": job.running is not None,
                 "RESCALE_STEP": job.rescale_step, "SUITED": job.threshold is None,
                 "MOST_HALVINGS": MOST_HALVINGS, "BLOCK": FACTORS_BLOCK, "OVERLAPS": early}
    scales = padded([job.lr_scale for job in jobs])
    _launch_factors((len(scales), len(running), stride, *constants.values()),
                    (triton.cdiv(rows + columns + 2, FACTORS_BLOCK), len(votes), 1),
                    (sums, padded(running), on_device(step, first), moments, factors, stride, rows, columns,
                     on_device(lr, first) if isinstance(lr, Tensor) else float(lr), scales, max(job.warmup, 1),
                     CLIP, job.shift, MULTIPLES[1:], SHARES), constants, **launched_early(early))
    return factors, moments


def rounding_plan(job: RoundingJob, lr: float | Tensor) -> tuple[RoundingPlan, Tensor]:
    """rounding.rounding_plan. The cap stays on the device."""
    checks.check_job(job, lr)
    if not checks.are_votes(job.votes):
        return NotImplemented
    job, (rows, columns) = replace(job, votes=job.votes.contiguous()), job.votes.shape
    sums = torch.zeros(stride_of(rows, columns), dtype=torch.int64, device=job.votes.device)
    factors, moments = factors_of([job], sums, lr, job.key.step)
    row, column, cap, share = factors[0, : rows + columns + 2].split([rows, columns, 1, 1])
    threshold_share = share[0] if job.threshold is None else job.threshold / CLIP
    plan = RoundingPlan(row[:, None], column[None, :], cap[0], threshold_share, job.follow)
    return plan, moments[0, : rows + columns + 1]
