"""Votes become moves: running means of them (mean.h), their squares, factors and moved weights (moves.h)."""

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gft.ops import checks
from gft.ops.momentum import KeptMean, factors_of, shares_of
from gft.ops.native.interface import (
    CMoments,
    CRoundingPlan,
    CTopKPlan,
    MeanJob,
    MoveJob,
    SquaresJob,
    c_key,
    c_storage,
    filled,
)
from gft.ops.native.memory import scratch
from gft.ops.native.threads import functions, side_by_side
from gft.ops.rounding import CLIP, RoundingJob, RoundingPlan, share_of_newest, size_of_moves, suited
from gft.ops.topk import TopKPlan
from gft.philox import NoiseKey
from gft.storage import Storage

ROWS_OF_SQUARES = 64  # summed together, whatever the threads: so the sum's order, and its last bit, never changes


def mean_amax(kept: KeptMean, votes: Tensor, share: float) -> Tensor:
    """Largest entries of a mean and of votes (momentum.mean_amax)."""
    checks.check_kept(kept, votes)
    if not _can_renew(kept, votes):
        return NotImplemented
    votes, (rows, columns) = votes.contiguous(), votes.shape
    pieces = -(-rows // ROWS_OF_SQUARES)
    amax, largest = torch.zeros(pieces, columns), torch.zeros(pieces, dtype=torch.int64)
    share, rest = shares_of(share)
    job = MeanJob(kept.stored.data_ptr(), votes.data_ptr(), kept.scale.data_ptr(), None, amax.data_ptr(), largest.data_ptr(),
                  None, columns, ROWS_OF_SQUARES, 0, votes.dtype is torch.int64, share, rest, 0.0)
    side_by_side(functions().gft_mean_amax, job, rows, votes.numel(), ROWS_OF_SQUARES)
    by_column = amax.amax(0)
    return torch.cat([by_column, by_column.amax().view(1), largest.amax().float().view(1)])


def renew_mean(kept: KeptMean, votes: Tensor, amax: Tensor, share: float, bound: int, key: NoiseKey) -> Tensor:
    """Take votes into a mean, in place (momentum.renew_mean)."""
    checks.check_tensor("the largest entries of the mean of votes", amax, (votes.shape[1] + 2,), torch.float32, votes.device)
    checks.check_kept(kept, votes)
    if not _can_renew(kept, votes) or key.first % votes.shape[1]:
        return NotImplemented
    votes, (rows, columns) = votes.contiguous(), votes.shape
    scale, inverse, per_move = factors_of(amax, share, bound)
    share, rest = shares_of(share)
    moves = scratch.borrow((rows, columns), torch.int32)
    job = MeanJob(kept.stored.data_ptr(), votes.data_ptr(), kept.scale.data_ptr(), inverse.data_ptr(), None, None,
                  moves.data_ptr(), columns, ROWS_OF_SQUARES, key.first // columns, votes.dtype is torch.int64, share, rest,
                  float(per_move), c_key(replace(key, first=0)))
    side_by_side(functions().gft_renew_mean, job, rows, votes.numel())
    torch.autograd.graph.increment_version(kept.stored)  # autograd does not see what C writes
    kept.scale.copy_(scale)
    return moves


def _can_renew(kept: KeptMean, votes: Tensor) -> bool:
    return checks.are_votes(votes) and kept.stored.is_contiguous() and kept.scale.is_contiguous()


def sums_of_squares(votes: Tensor, shift: int) -> Tensor:
    """Sum the squares of votes by row and by column (rounding.sums_of_squares)."""
    checks.check_matrix("the votes", votes)
    if not checks.are_votes(votes):
        return NotImplemented
    votes, (rows, columns) = votes.contiguous(), votes.shape
    by_row = torch.empty(rows, dtype=torch.int64)
    by_column = torch.zeros(-(-rows // ROWS_OF_SQUARES), columns, dtype=torch.int64)
    job = SquaresJob(votes.data_ptr(), by_row.data_ptr(), by_column.data_ptr(), columns, ROWS_OF_SQUARES,
                     votes.dtype is torch.int64, shift)
    side_by_side(functions().gft_squares, job, rows, votes.numel(), ROWS_OF_SQUARES)
    return torch.cat([by_row, by_column.sum(0)])


def rounding_plan(job: RoundingJob, lr: float | Tensor) -> tuple[RoundingPlan, Tensor]:
    """Normalise votes by row and column (rounding.rounding_plan)."""
    checks.check_job(job, lr)
    if not checks.are_votes(job.votes) or (isinstance(lr, Tensor) and lr.is_cuda):
        return NotImplemented
    size, threshold_share = suited(size_of_moves(job, lr), job.threshold)
    rows, columns = job.votes.shape
    by_row, by_column = sums_of_squares(job.votes, job.shift).split([rows, columns])
    row, column = (torch.empty(shape, dtype=torch.float32) for shape in ((rows, 1), (1, columns)))
    moments = torch.zeros(rows + columns + 1) if job.running is None else job.running.clone()
    how = CMoments(share=share_of_newest(int(job.key.step)), size=size, shift=job.shift, rescale_step=job.rescale_step)
    functions().gft_factors(by_row.data_ptr(), by_column.data_ptr(), rows, columns, how, moments.data_ptr(), row.data_ptr(),
                          column.data_ptr())
    return RoundingPlan(row, column, CLIP * size, threshold_share, job.follow), moments


def round_weights(stored: Tensor, votes: Tensor, storage: Storage, plan: RoundingPlan, key: NoiseKey) -> Tensor:
    """Move a stored weight by stochastic rounding, in place (rounding.round_weights)."""
    checks.check_weight(stored, votes, storage)
    checks.check_factors(plan, votes)
    if not checks.are_votes(votes, key.first) or not stored.is_contiguous():
        return NotImplemented
    plan = replace(plan, row=plan.row.contiguous(), column=plan.column.contiguous())
    return _moved(functions().gft_round, stored, votes, storage, key, rounding=filled(CRoundingPlan, plan))


def topk_weights(stored: Tensor, votes: Tensor, storage: Storage, plan: TopKPlan, key: NoiseKey) -> Tensor:
    """Move the weights with the largest votes one level, in place (topk.topk_weights)."""
    checks.check_weight(stored, votes, storage)
    checks.check_choice(plan, votes)
    if not checks.are_votes(votes, key.first) or not stored.is_contiguous():
        return NotImplemented
    return _moved(functions().gft_topk, stored, votes, storage, key, topk=filled(CTopKPlan, plan))


def _moved(work: Any, stored: Tensor, votes: Tensor, storage: Storage, key: NoiseKey, **plan: ctypes.Structure) -> Tensor:
    """Move all rows in place -> int64 scalar: how many levels changed."""
    votes, (rows, columns) = votes.contiguous(), votes.shape
    job = MoveJob(stored.data_ptr(), votes.data_ptr(), columns, votes.dtype is torch.int64, c_storage(storage),
                  key=c_key(key), **plan)
    flips = side_by_side(work, job, rows, votes.numel())
    torch.autograd.graph.increment_version(stored)  # autograd does not see what C writes
    return torch.tensor(flips, dtype=torch.int64)
