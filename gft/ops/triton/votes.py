"""The votes: int8 products on tensor cores, exact in int32."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.ops import checks
from gft.ops.triton.grids import MOST

PROGRAMS = 264  # fill a GPU, two a multiprocessor
LEAST_TOKENS_A_SPLIT = 512  # that repay a program
MOST_TOKENS_A_SPLIT = 1 << 16  # products of int8 whose sum int32 holds, with one step more


class Cut(NamedTuple):
    """How a product is cut into programs, each of which makes a tile of the votes from some of the tokens."""

    rows: int  # of a tile
    columns: int
    tokens: int  # a step of a program's loop
    warps: int
    stages: int  # steps of the loop under way at once
    programs: int = PROGRAMS  # where the tiles are fewer, their tokens are split until there are about as many
    group: int = 8  # tiles one below the other that run side by side, and so read the same x from the cache


def cut_for(rows: int, columns: int, tokens: int) -> Cut:
    """Of grad_output^T · x, (rows, tokens) · (tokens, columns)."""
    if rows * columns >= PROGRAMS * 128 * 128:
        return Cut(128, 128, 128, warps=4, stages=3)
    return Cut(64, 128, 128, warps=4, stages=4)


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """A program's first row and first column. Neighbouring programs share rows and columns, so that what they read is in the
    cache."""
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    program, in_group = tl.program_id(0), GROUP * tiles_across
    first_down = program // in_group * GROUP
    group_height = tl.minimum(tiles_down - first_down, GROUP)
    down, across = first_down + program % in_group % group_height, program % in_group // group_height
    return down * ROWS, across * COLUMNS


@triton.jit(do_not_specialize=["steps"])
def _votes_kernel(grad_output, x, votes, rows, columns, tokens, grad_stride, x_stride, steps,
                  EVEN: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                  TOKENS: tl.constexpr, GROUP: tl.constexpr):
    first_row, first_column = _tile(rows, columns, ROWS, COLUMNS, GROUP)
    group = tl.program_id(2).to(tl.int64)  # of those that have rows and columns of their own
    grad_output, x = grad_output + group * rows * grad_stride, x + group * columns * x_stride
    votes += group * rows * columns
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    first, token = tl.program_id(1) * steps, tl.arange(0, TOKENS)
    # Rows beyond the edge read row 0 and are not written.
    row_live, column_live = row < rows, column < columns
    start = (first * TOKENS + token)[None, :]
    from_grad = grad_output + tl.where(row_live, row, 0).to(tl.int64)[:, None] * grad_stride + start
    from_x = x + tl.where(column_live, column, 0).to(tl.int64)[:, None] * x_stride + start
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for one in range(first, tl.minimum(first + steps, tl.cdiv(tokens, TOKENS))):
        if EVEN:
            a, b = tl.load(from_grad), tl.load(from_x)
        else:
            live = (one * TOKENS + token < tokens)[None, :]
            a, b = tl.load(from_grad, mask=live, other=0), tl.load(from_x, mask=live, other=0)
        total = tl.dot(a, tl.trans(b), total, out_dtype=tl.int32)
        from_grad += TOKENS
        from_x += TOKENS
    place = votes + first_row.to(tl.int64) * columns + first_column
    place = place + (tl.arange(0, ROWS)[:, None] * columns + tl.arange(0, COLUMNS)[None, :])
    live = row_live[:, None] & column_live[None, :]
    total = total.to(votes.dtype.element_ty)
    if SPLIT:
        # Integers: the same in any order. Said to be aligned to 4 bytes only, a thread has one column and not four side by
        # side: an atomic is of one number, and those of a warp then fill whole sectors.
        tl.atomic_add(tl.multiple_of(place, (4, 4)), total, mask=live, sem="relaxed")
    else:
        if ADD:  # the tile is this program's alone
            total += tl.load(place, mask=live, other=0)
        tl.store(place, total, mask=live)


def features_first(q: Tensor) -> Tensor:  # (n, features) -> (features, n)
    """With the tokens of a feature side by side: without a copy if `q` lies so, or is a part of what does."""
    by_feature = q.t()
    return by_feature if by_feature.stride(1) == 1 or by_feature.shape[1] == 1 else by_feature.contiguous()


def votes_product(grad_output: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor:
    """Multiply int8 matrices exactly on tensor cores (products.votes_product): fastest where both have their tokens side by
    side in memory."""
    checks.check_pair(grad_output, x)
    shape = grad_output.shape[1], x.shape[1]
    if not checks.are_int8(grad_output, x):
        return NotImplemented
    if into is not None:
        checks.check_tensor("the votes to add to", into, shape, into.dtype, x.device)
        if into.dtype not in checks.VOTES or not into.is_contiguous():
            return NotImplemented
    if not grad_output.numel() or not x.numel():
        return torch.zeros(shape, dtype=torch.int32, device=x.device) if into is None else into
    dtype = torch.int32 if into is None else into.dtype
    return _product(features_first(grad_output), features_first(x), 1, dtype, into)


def grouped_votes_product(grad_output: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply int8 matrices of several groups in one launch (products.grouped_votes_product)."""
    if grad_output.dim() != 3 or x.dim() != 3 or x.shape[:2] != grad_output.shape[:2] or x.device != grad_output.device:
        raise UsageError(f"groups of grad_output and x must be of the same tokens but have the shapes "
                         f"{tuple(grad_output.shape)} on {grad_output.device} and {tuple(x.shape)} on {x.device}")
    groups, rows, columns = len(x), grad_output.shape[2], x.shape[2]
    if not checks.are_int8(grad_output, x) or dtype not in checks.VOTES or groups > MOST:
        return NotImplemented
    if not grad_output.numel() or not x.numel():
        return torch.zeros(groups, rows, columns, dtype=dtype, device=x.device)

    def all_rows(q: Tensor) -> Tensor:  # (groups, n, features) -> (groups · features, n)
        by_feature = q.transpose(1, 2)
        return features_first(by_feature.reshape(-1, by_feature.shape[2]).t())

    return _product(all_rows(grad_output), all_rows(x), groups, dtype, None).view(groups, rows, columns)


def _product(grad_output: Tensor, x: Tensor, groups: int, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """(groups · rows, tokens), (groups · columns, tokens) -> (groups · rows, columns), added to `into` or new."""
    tokens, rows, columns = grad_output.shape[1], len(grad_output) // groups, len(x) // groups
    cut = cut_for(rows, columns, tokens)
    tiles = triton.cdiv(rows, cut.rows) * triton.cdiv(columns, cut.columns)
    # Few tiles leave most of the GPU idle: share the tokens out, too.
    splits = max(1, min(cut.programs // (tiles * groups), tokens // LEAST_TOKENS_A_SPLIT))
    if dtype is torch.int64:  # then an int32 might not hold the sum of all
        splits = max(splits, triton.cdiv(tokens, MOST_TOKENS_A_SPLIT))
    steps = triton.cdiv(tokens, splits * cut.tokens)  # of a program's loop
    splits = triton.cdiv(tokens, steps * cut.tokens)
    votes, empty = into, torch.zeros if splits > 1 else torch.empty
    if votes is None:
        votes = empty(groups * rows, columns, dtype=dtype, device=x.device)
    with torch.cuda.device_of(x):
        _votes_kernel[(tiles, splits, groups)](
            grad_output, x, votes, rows, columns, tokens, grad_output.stride(0), x.stride(0), steps,
            EVEN=tokens % cut.tokens == 0, SPLIT=splits > 1, ADD=into is not None, ROWS=cut.rows, COLUMNS=cut.columns,
            TOKENS=cut.tokens, GROUP=cut.group, num_warps=cut.warps, num_stages=cut.stages)
    return votes


@triton.jit(do_not_specialize=["pieces_a_split"])
def _sequence_votes_kernel(grad_output, x, votes, rows, columns, tokens, pieces_a_split,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PIECES: tl.constexpr,
                           GROUP: tl.constexpr):
    first_row, first_column = _tile(rows, columns, ROWS, COLUMNS, GROUP)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    first, token = tl.program_id(1) * pieces_a_split, tl.arange(0, TOKENS)
    from_grad = grad_output + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * tokens + (first * TOKENS + token)[None, :]
    from_x = x + tl.where(column < columns, column, 0).to(tl.int64)[:, None] * tokens + (first * TOKENS + token)[None, :]
    total, own = tl.zeros((ROWS, COLUMNS), tl.int32), tl.zeros((ROWS, COLUMNS), tl.int32)  # own: of the sequence so far
    # One loop and not two, so that the next pieces are read while this one is multiplied, also across sequences.
    for piece in range(first, tl.minimum(first + pieces_a_split, tokens // TOKENS)):
        own = tl.dot(tl.load(from_grad), tl.trans(tl.load(from_x)), own, out_dtype=tl.int32)
        if piece % PIECES == PIECES - 1:  # the sequence ends
            total += (own > 0).to(tl.int32) - (own < 0).to(tl.int32)
            own = tl.zeros((ROWS, COLUMNS), tl.int32)
        from_grad += TOKENS
        from_x += TOKENS
    live = (row < rows)[:, None] & (column < columns)[None, :]
    tl.atomic_add(votes + row.to(tl.int64)[:, None] * columns + column[None, :], total, mask=live, sem="relaxed")


def sequence_votes(grad_output: Tensor, x: Tensor, sequence: int) -> Tensor:
    """Sum one vote a sequence (products.sequence_votes); the votes of a single sequence are never written to memory."""
    checks.check_pair(grad_output, x)
    if not checks.are_int8(grad_output, x) or not grad_output.numel() or not x.numel():
        return NotImplemented
    if sequence < 1 or x.shape[0] % sequence:
        raise UsageError(f"{x.shape[0]} tokens are not sequences of {sequence}")
    at_once = 128 if sequence % 128 == 0 else 64 if sequence > 32 else 32
    pieces = triton.cdiv(sequence, at_once)  # of a sequence

    def filled_up(q: Tensor) -> Tensor:
        """Feature by feature, each sequence filled up with zeros, which add nothing, to whole pieces: a sequence of 50 would
        begin anywhere, and be read byte by byte."""
        return F.pad(q.t().unflatten(1, (-1, sequence)), (0, pieces * at_once - sequence)).flatten(1).contiguous()

    grad_output, x = filled_up(grad_output), filled_up(x)
    (rows, tokens), columns = grad_output.shape, x.shape[0]
    sequences, tiles = tokens // (pieces * at_once), triton.cdiv(rows, 64) * triton.cdiv(columns, 128)
    sequences_a_split = triton.cdiv(sequences, max(1, min(PROGRAMS // tiles, sequences)))
    votes = torch.zeros(rows, columns, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        _sequence_votes_kernel[(tiles, triton.cdiv(sequences, sequences_a_split))](
            grad_output, x, votes, rows, columns, tokens, sequences_a_split * pieces, ROWS=64, COLUMNS=128, TOKENS=at_once,
            PIECES=pieces, GROUP=8, num_warps=4, num_stages=3)
    return votes
