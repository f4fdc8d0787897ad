"""Renewing running means of votes (ops/momentum.py): a launch for the largest entries, one for all else, for many layers."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft import philox
from gft.ops import checks
from gft.ops import momentum as definitions
from gft.ops.momentum import KeptMean
from gft.ops.triton.alike import padded, pick, pick_stream, pick_votes, shared_launches, streams_argument, votes_argument
from gft.ops.triton.grids import spread, spread_block
from gft.ops.triton.launch import Launcher
from gft.ops.triton.noise import KEY, noise16, noise16_by_eights, on_device, width
from gft.ops.triton.units import nearest
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
def _amax_kernel(stored, votes, scale, amax, stride, rows, columns, share, rest, TABLE: tl.constexpr, WIDE: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, TIMES: tl.constexpr):
    """momentum.mean_amax, written as integers, which have the order of the floats that are not negative. Of each layer
    `stride` of them."""
    blocks = tl.cdiv(columns, COLUMNS)
    layer, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    stored, votes, scale = pick(stored, layer), pick_votes(votes, layer, TABLE, WIDE), pick(scale, layer)
    amax, chunk = amax + layer * stride, spread_block().to(tl.int64)
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
def _renew_kernel(stored, votes, scale, amax, moves, stride, rows, columns, share, rest, bound,
                  seed, step, noise_stream, call,
                  first_row,  # of these rows in the whole matrix, where two rows share a random number
                  TABLE: tl.constexpr, WIDE: tl.constexpr, BY_EIGHTS: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):
    blocks = tl.cdiv(columns, COLUMNS)
    layer, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    stored, votes, scale = pick(stored, layer), pick_votes(votes, layer, TABLE, WIDE), pick(scale, layer)
    noise_stream = pick_stream(noise_stream, layer)
    amax, moves = amax + layer * stride, moves + layer.to(tl.int64) * rows * columns
    row = spread_block().to(tl.int64) * ROWS + tl.arange(0, ROWS)
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
    tl.store(moves + row[:, None] * columns + column[None, :], nearest(move), mask=live)


@triton.jit
def _divided(number, by):
    """number / by, exactly rounded as torch divides; 0 where that is next to nothing."""
    some = by > LEAST
    return tl.where(some, tl.div_rn(tl.full(by.shape, number, tl.float32), tl.where(some, by, 1.0)), 0.0)


_launch_amax, _launch_renew = Launcher(_amax_kernel), Launcher(_renew_kernel)
Layer = tuple[KeptMean, Tensor]  # a mean and its votes, contiguous; those of one launch have one shape and type of votes


def mean_amax(kept: KeptMean, votes: Tensor, share: float) -> Tensor:
    """Largest entries of a mean and of votes (momentum.mean_amax)."""
    if not _can_renew(kept, votes):
        return NotImplemented
    return _amax([(kept, votes.contiguous())], share)[0, : votes.shape[1] + 2]


def renew_mean(kept: KeptMean, votes: Tensor, amax: Tensor, share: float, bound: int, key: NoiseKey) -> Tensor:
    """Take votes into a mean, in place (momentum.renew_mean)."""
    columns = votes.shape[1]
    checks.check_tensor("the largest entries of the mean of votes", amax, (columns + 2,), torch.float32, votes.device)
    if not _can_renew(kept, votes) or key.first % columns:
        return NotImplemented
    moves = _renew([(kept, votes.contiguous())], amax.contiguous()[None], share, bound, key, [key.stream])
    torch.mul(amax[:columns], definitions.PER_LARGEST, out=kept.scale)
    return moves[0]


def renew_means(kept: Sequence[KeptMean], votes: Sequence[Tensor], share: float, bound: int,
                keys: Sequence[NoiseKey]) -> list[Tensor]:
    """Take votes into many means (momentum.renew_means)."""
    if not (all(_can_renew(one, cast) for one, cast in zip(kept, votes, strict=True)) and _but_for_streams(keys)):
        return NotImplemented
    layers = [(one, cast.contiguous()) for one, cast in zip(kept, votes, strict=True)]
    key, results, largest = replace(keys[0], step=on_device(keys[0].step, votes[0])), {}, {}
    for numbers in shared_launches((cast.shape, cast.dtype) for cast in votes):
        some = [layers[number] for number in numbers]
        amax = _amax(some, share)
        moves = _renew(some, amax, share, bound, key, [keys[number].stream for number in numbers])
        results.update(zip(numbers, moves, strict=True))
        largest.update(zip(numbers, amax[:, : moves.shape[2]], strict=True))
    scales = [one.scale for one in kept]
    torch._foreach_copy_(scales, [largest[number] for number in range(len(scales))])
    torch._foreach_mul_(scales, definitions.PER_LARGEST)
    return [results[number] for number in range(len(kept))]


def _amax(layers: Sequence[Layer], share: float) -> Tensor:  # (layers, at least columns + 2) float32
    rows, columns = layers[0][1].shape
    stride = triton.cdiv(columns + 2, 16) * 16
    amax = torch.zeros((len(layers), stride), dtype=torch.int32, device=layers[0][1].device)
    (stored, votes, scales), how, key = _arguments(layers)
    _launch_amax((*key, stride), _grid(layers, triton.cdiv(rows, ROWS * TIMES)),
                 (stored, votes, scales, amax, stride, rows, columns, *definitions.shares_of(share)),
                 {**how, "ROWS": ROWS, "COLUMNS": COLUMNS, "TIMES": TIMES}, num_warps=WARPS, enable_fp_fusion=False)
    return amax.view(torch.float32)


def _renew(layers: Sequence[Layer],
           amax: Tensor,  # (layers, at least columns + 2)
           share: float, bound: int,
           key: NoiseKey,  # of all of them, but for the stream
           streams: Sequence[int]) -> Tensor:  # (layers, rows, columns) int32
    """All but the new scales, which other programs still read the old ones of."""
    rows, columns = layers[0][1].shape
    moves = torch.empty((len(layers), rows, columns), dtype=torch.int32, device=amax.device)
    stride, first_row = amax.stride(0), key.first // columns
    (stored, votes, scales), how, kind = _arguments(layers)
    _launch_renew((*kind, stride, width(key), max(streams) >> 31, first_row >> 31),
                  _grid(layers, triton.cdiv(rows, ROWS)),
                  (stored, votes, scales, amax, moves, stride, rows, columns, *definitions.shares_of(share), float(bound),
                   key.seed, on_device(key.step, moves), streams_argument(streams), key.call, first_row),
                  {**how, "BY_EIGHTS": columns % 8 == 0, "ROWS": ROWS, "COLUMNS": COLUMNS}, num_warps=WARPS,
                  enable_fp_fusion=False)
    return moves


def _arguments(layers: Sequence[Layer]) -> tuple[tuple[object, ...], dict[str, bool], tuple[object, ...]]:
    """Means, votes and scales as kernels take them; the constants that go with these; and what they have in common."""
    votes, how = votes_argument([cast for _, cast in layers])
    stored, scales = padded([kept.stored for kept, _ in layers]), padded([kept.scale for kept, _ in layers])
    return (stored, votes, scales), how, (len(stored), layers[0][1].shape, layers[0][1].dtype, *how.values())


def _grid(layers: Sequence[Layer], row_blocks: int) -> tuple[int, int, int]:
    return (len(layers) * triton.cdiv(layers[0][1].shape[1], COLUMNS), *spread(row_blocks))


def _but_for_streams(keys: Sequence[NoiseKey]) -> bool:
    """Are these of one draw of whole layers?"""
    first = keys[0]
    steps = all(key.step is first.step or (isinstance(key.step, int) and key.step == first.step) for key in keys)
    return steps and all((key.seed, key.call, key.first) == (first.seed, first.call, 0) for key in keys)


def _can_renew(kept: KeptMean, votes: Tensor) -> bool:
    checks.check_kept(kept, votes)
    return checks.are_votes(votes) and kept.stored.is_contiguous() and kept.scale.is_contiguous()
