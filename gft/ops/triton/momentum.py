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
LEAST, VOTE_ROUNDS = tl.constexpr(definitions.LEAST), tl.constexpr(philox.VOTE_ROUNDS)


@triton.jit
def _renewed(stored, votes, row, block, rows, columns, unit, share, rest, BITS: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of some columns: the mean with this step's votes in it, their share of it, the votes, and where they are."""
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    if BITS == 8:
        old = tl.load(stored + row[:, None] * columns + column[None, :], mask=live, other=0).to(tl.int32)
    else:
        byte, bytes_a_row = block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2), (columns + 1) // 2
        there = (row < rows)[:, None] & (byte < bytes_a_row)[None, :]
        pair = tl.load(stored + row[:, None] * bytes_a_row + byte[None, :], mask=there, other=0).to(tl.int32)
        old = tl.reshape(tl.join((pair & 15) - 7, (pair >> 4) - 7), (ROWS, COLUMNS))
    vote = tl.load(votes + row[:, None] * columns + column[None, :], mask=live, other=0)
    newest = vote.to(tl.float32) * rest
    mean = old.to(tl.float32) * unit[None, :] * share + newest
    return tl.where(live, mean, 0.0), newest, vote, live


@triton.jit
def _tops_kernel(stored, votes, unit, tops, rows, columns, share, rest, BITS: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, TIMES: tl.constexpr):
    """The largest entry of each column of the renewed mean, and behind them the largest of all and the largest vote: as
    integers, which have the order of the floats that are not negative."""
    block, chunk = tl.program_id(0), spread_block().to(tl.int64)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    units = tl.load(unit + column, mask=column < columns, other=0.0)
    top, largest = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), votes.dtype.element_ty)
    for time in range(TIMES):
        row = (chunk * TIMES + time) * ROWS + tl.arange(0, ROWS)
        mean, _, vote, live = _renewed(stored, votes, row, block, rows, columns, units, share, rest, BITS, ROWS, COLUMNS)
        top = tl.maximum(top, tl.abs(mean))
        largest = tl.maximum(largest, tl.where(live, tl.abs(vote), 0))
    of_columns = tl.max(top, 0)
    tl.atomic_max(tops + column, of_columns.to(tl.int32, bitcast=True), mask=column < columns, sem="relaxed")
    tl.atomic_max(tops + columns, tl.max(of_columns).to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_max(tops + columns + 1, tl.max(largest).to(tl.float32).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=KEY)
def _renew_kernel(stored, votes, unit, tops, moves, rows, columns, share, rest, bound, seed, step, noise_stream, call,
                  BITS: tl.constexpr, BY_EIGHTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    LARGEST: tl.constexpr = (1 << BITS - 1) - 1
    block, chunk = tl.program_id(0), spread_block().to(tl.int64)
    row = chunk * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    units = tl.load(unit + column, mask=column < columns, other=0.0)
    mean, newest, _, live = _renewed(stored, votes, row, block, rows, columns, units, share, rest, BITS, ROWS, COLUMNS)

    top = tl.load(tops + column, mask=column < columns, other=0).to(tl.float32, bitcast=True)
    new_unit = tl.div_rn(top, tl.full((COLUMNS,), LARGEST, tl.float32))
    per_unit = _divided(65536.0, new_unit)
    if BY_EIGHTS:
        eighth = block * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
        counter = (row // 2)[:, None] * (columns // 8) + eighth[None, :]
        noise = tl.reshape(noise16_by_eights(counter, seed, step, noise_stream, call, VOTE_ROUNDS), (ROWS, COLUMNS))
    else:
        noise = noise16((row // 2)[:, None] * columns + column[None, :], seed, step, noise_stream, call, VOTE_ROUNDS)
    noise = (noise >> (8 * (row % 2))[:, None].to(tl.int32) & 0xFF) << 8 | 128
    TOP: tl.constexpr = LARGEST * 65536.0
    number = (tl.clamp(mean * per_unit[None, :], -TOP, TOP).to(tl.int32) + noise) >> 16
    if BITS == 8:
        tl.store(stored + row[:, None] * columns + column[None, :], number.to(tl.int8), mask=live)
    else:
        number = tl.where(live, number + LARGEST, 0)  # a byte without a second number ends in zeros
        low, high = tl.split(tl.reshape(number, (ROWS, COLUMNS // 2, 2)))
        byte, bytes_a_row = block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2), (columns + 1) // 2
        there = (row < rows)[:, None] & (byte < bytes_a_row)[None, :]
        tl.store(stored + row[:, None] * bytes_a_row + byte[None, :], (low | high << 4).to(tl.uint8), mask=there)

    largest = tl.load(tops + columns).to(tl.float32, bitcast=True) * share
    largest += tl.load(tops + columns + 1).to(tl.float32, bitcast=True) * rest  # no move is more
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


_launch_tops, _launch_renew = Launcher(_tops_kernel), Launcher(_renew_kernel)


def renew_mean(kept: KeptMean, votes: Tensor, share: float, bound: int, key: NoiseKey) -> Tensor:
    """Take votes into a mean, in place (momentum.renew_mean)."""
    checks.check_kept(kept, votes)
    (rows, columns), stored, unit = votes.shape, kept.stored, kept.unit
    if not (checks.are_votes(votes) and stored.is_contiguous() and unit.is_contiguous()) or key.first:
        return NotImplemented
    votes = votes.contiguous()
    tops = torch.zeros(columns + 2, dtype=torch.int32, device=votes.device)
    moves = torch.empty((rows, columns), dtype=torch.int32, device=votes.device)
    blocks, shares = triton.cdiv(columns, COLUMNS), definitions.shares_of(share)
    constants = {"BITS": kept.bits, "ROWS": ROWS, "COLUMNS": COLUMNS}
    kind = votes.shape, votes.dtype, kept.bits
    _launch_tops(kind, (blocks, *spread(triton.cdiv(rows, ROWS * TIMES))),
                 (stored, votes, unit, tops, rows, columns, *shares), {**constants, "TIMES": TIMES},
                 num_warps=WARPS, enable_fp_fusion=False)
    _launch_renew((*kind, width(key)), (blocks, *spread(triton.cdiv(rows, ROWS))),
                  (stored, votes, unit, tops, moves, rows, columns, *shares, float(bound), key.seed,
                   on_device(key.step, votes), key.stream, key.call),
                  {"BITS": kept.bits, "BY_EIGHTS": columns % 8 == 0, "ROWS": ROWS, "COLUMNS": COLUMNS},
                  num_warps=WARPS, enable_fp_fusion=False)
    torch.div(tops[:columns].view(torch.float32), kept.largest, out=unit)
    return moves
