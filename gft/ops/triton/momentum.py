"""Renewing a running mean of votes (ops/momentum.py): one launch for the largest entries, one for all else."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft import philox
from gft.ops import checks
from gft.ops import momentum as definitions
from gft.ops.momentum import KeptMean
from gft.ops.triton.grids import spread, spread_block
from gft.ops.triton.launch import Launcher
from gft.ops.triton.noise import KEY, noise16, noise16_by_eights, on_device, width
from gft.philox import NoiseKey

ROWS, COLUMNS, TIMES, WARPS = 16, 64, 8, 4  # a program of the first kernel takes TIMES · ROWS rows
LARGEST, PER_LARGEST = tl.constexpr(definitions.LARGEST), tl.constexpr(definitions.PER_LARGEST)
LEAST = tl.constexpr(definitions.LEAST)
VOTE_ROUNDS = tl.constexpr(philox.VOTE_ROUNDS)


@triton.jit
def _renewed(stored, votes, row, block, rows, columns, scale, share, rest,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of some columns: the mean with this step's votes in it, their share of it, the votes, and where they are."""
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    old = tl.load(stored + row[:, None] * columns + column[None, :], mask=live, other=0)
    vote = tl.load(votes + row[:, None] * columns + column[None, :], mask=live, other=0)
    newest = vote.to(tl.float32) * rest
    mean = old.to(tl.float32) * scale[None, :] * share + newest
    return tl.where(live, mean, 0.0), newest, vote, live


@triton.jit
def _amax_kernel(stored, votes, scale, amax, rows, columns, share, rest, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, TIMES: tl.constexpr):
    """momentum.mean_amax, written as integers, which have the order of the floats that are not negative."""
    block, chunk = tl.program_id(0), spread_block().to(tl.int64)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    scales = tl.load(scale + column, mask=column < columns, other=0.0)
    top, largest = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), votes.dtype.element_ty)
    for time in range(TIMES):
        row = (chunk * TIMES + time) * ROWS + tl.arange(0, ROWS)
        mean, _, vote, live = _renewed(stored, votes, row, block, rows, columns, scales, share, rest, ROWS, COLUMNS)
        top = tl.maximum(top, tl.abs(mean))
        largest = tl.maximum(largest, tl.where(live, tl.abs(vote), 0))
    of_columns = tl.max(top, 0)
    tl.atomic_max(amax + column, of_columns.to(tl.int32, bitcast=True), mask=column < columns, sem="relaxed")
    tl.atomic_max(amax + columns, tl.max(of_columns).to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_max(amax + columns + 1, tl.max(largest).to(tl.float32).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=[*KEY, "first_row"])
def _renew_kernel(stored, votes, scale, amax, moves, rows, columns, share, rest, bound, seed, step, noise_stream, call,
                  first_row,  # of these rows in the whole matrix, where two rows share a random number
                  BY_EIGHTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    block, chunk = tl.program_id(0), spread_block().to(tl.int64)
    row = chunk * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    scales = tl.load(scale + column, mask=column < columns, other=0.0)
    mean, newest, _, live = _renewed(stored, votes, row, block, rows, columns, scales, share, rest, ROWS, COLUMNS)

    top = tl.load(amax + column, mask=column < columns, other=0.0)
    inverse = _divided(65536.0, top * PER_LARGEST)
    place = first_row + row
    if BY_EIGHTS:
        eighth = block * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
        counter = (place // 2)[:, None] * (columns // 8) + eighth[None, :]
        noise = tl.reshape(noise16_by_eights(counter, seed, step, noise_stream, call, VOTE_ROUNDS), (ROWS, COLUMNS))
    else:
        noise = noise16((place // 2)[:, None] * columns + column[None, :], seed, step, noise_stream, call, VOTE_ROUNDS)
    noise = (noise >> (8 * (place % 2))[:, None].to(tl.int32) & 0xFF) << 8 | 128
    TOP: tl.constexpr = LARGEST * 65536.0
    number = (tl.clamp(mean * inverse[None, :], -TOP, TOP).to(tl.int32) + noise) >> 16
    tl.store(stored + row[:, None] * columns + column[None, :], number.to(tl.int8), mask=live)

    largest = tl.load(amax + columns) * share + tl.load(amax + columns + 1) * rest  # no move is more
    move = (mean * share + newest) * _divided(bound, tl.full((1,), largest, tl.float32))[None, :]
    tl.store(moves + row[:, None] * columns + column[None, :], _nearest(move), mask=live)


@triton.jit
def _divided(number, by):
    """number / by, exactly rounded as torch divides; 0 where that is next to nothing."""
    some = by > LEAST
    return tl.where(some, tl.div_rn(tl.full(by.shape, number, tl.float32), tl.where(some, by, 1.0)), 0.0)


@triton.jit
def _nearest(value):
    """The nearest integer, of ties the even one, of numbers below 2^22: added to 1.5 · 2^23, no fraction is left."""
    return (value + 12582912.0 - 12582912.0).to(tl.int32)


_launch_amax, _launch_renew = Launcher(_amax_kernel), Launcher(_renew_kernel)


def mean_amax(kept: KeptMean, votes: Tensor, share: float) -> Tensor:
    """Largest entries of a mean and of votes (momentum.mean_amax)."""
    if not _can_renew(kept, votes):
        return NotImplemented
    rows, columns = votes.shape
    amax = torch.zeros(columns + 2, dtype=torch.int32, device=votes.device)
    _launch_amax((votes.shape, votes.dtype), (triton.cdiv(columns, COLUMNS), *spread(triton.cdiv(rows, ROWS * TIMES))),
                 (kept.stored, votes.contiguous(), kept.scale, amax, rows, columns, *definitions.shares_of(share)),
                 {"ROWS": ROWS, "COLUMNS": COLUMNS, "TIMES": TIMES}, num_warps=WARPS, enable_fp_fusion=False)
    return amax.view(torch.float32)


def renew_mean(kept: KeptMean, votes: Tensor, amax: Tensor, share: float, bound: int, key: NoiseKey) -> Tensor:
    """Take votes into a mean, in place (momentum.renew_mean)."""
    rows, columns = votes.shape
    checks.check_tensor("the largest entries of the mean of votes", amax, (columns + 2,), torch.float32, votes.device)
    if not _can_renew(kept, votes) or key.first % columns:
        return NotImplemented
    moves = torch.empty((rows, columns), dtype=torch.int32, device=votes.device)
    first_row = key.first // columns
    _launch_renew((votes.shape, votes.dtype, width(key), first_row >> 31),
                  (triton.cdiv(columns, COLUMNS), *spread(triton.cdiv(rows, ROWS))),
                  (kept.stored, votes.contiguous(), kept.scale, amax.contiguous(), moves, rows, columns,
                   *definitions.shares_of(share), float(bound), key.seed, on_device(key.step, votes), key.stream, key.call,
                   first_row),
                  {"BY_EIGHTS": columns % 8 == 0, "ROWS": ROWS, "COLUMNS": COLUMNS}, num_warps=WARPS,
                  enable_fp_fusion=False)
    torch.mul(amax[:columns], definitions.PER_LARGEST, out=kept.scale)
    return moves


def _can_renew(kept: KeptMean, votes: Tensor) -> bool:
    checks.check_kept(kept, votes)
    return checks.are_votes(votes) and kept.stored.is_contiguous() and kept.scale.is_contiguous()
