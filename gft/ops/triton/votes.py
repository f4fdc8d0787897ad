"""The votes: int8 products on tensor cores, exact in int32."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.ops import checks

PROGRAMS = 264  # fill a GPU, two a multiprocessor
LEAST_TOKENS_A_SPLIT = 512  # that repay a program


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
def _votes_kernel(grad_output, x, votes, rows, columns, tokens, steps,
                  EVEN: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
                  GROUP: tl.constexpr):
    first_row, first_column = _tile(rows, columns, ROWS, COLUMNS, GROUP)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    first, token = tl.program_id(1) * steps, tl.arange(0, TOKENS)
    # Rows beyond the edge read row 0 and are not written.
    from_grad = grad_output + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * tokens + (first * TOKENS + token)[None, :]
    from_x = x + tl.where(column < columns, column, 0).to(tl.int64)[:, None] * tokens + (first * TOKENS + token)[None, :]
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
    live = (row < rows)[:, None] & (column < columns)[None, :]
    if SPLIT:
        # Integers: the same in any order. Said to be aligned to 4 bytes only, a thread has one column and not four side by
        # side: an atomic is of one number, and those of a warp then fill whole sectors.
        tl.atomic_add(tl.multiple_of(place, (4, 4)), total, mask=live, sem="relaxed")
    else:
        tl.store(place, total, mask=live)


def votes_product(grad_output: Tensor, x: Tensor) -> Tensor:
    """Multiply int8 matrices exactly on tensor cores (products.votes_product): fastest where both have their tokens side by
    side in memory."""
    checks.check_pair(grad_output, x)
    if not checks.are_int8(grad_output, x):
        return NotImplemented
    if not grad_output.numel() or not x.numel():
        return torch.zeros(grad_output.shape[1], x.shape[1], dtype=torch.int32, device=x.device)
    grad_output, x = grad_output.t().contiguous(), x.t().contiguous()
    (rows, tokens), columns = grad_output.shape, x.shape[0]
    cut = cut_for(rows, columns, tokens)
    tiles = triton.cdiv(rows, cut.rows) * triton.cdiv(columns, cut.columns)
    # Few tiles leave most of the GPU idle: share the tokens out, too.
    splits = max(1, min(cut.programs // tiles, tokens // LEAST_TOKENS_A_SPLIT))
    steps = triton.cdiv(tokens, splits * cut.tokens)  # of a program's loop
    splits = triton.cdiv(tokens, steps * cut.tokens)
    votes = (torch.zeros if splits > 1 else torch.empty)(rows, columns, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        _votes_kernel[(tiles, splits)](
            grad_output, x, votes, rows, columns, tokens, steps, EVEN=tokens % cut.tokens == 0, SPLIT=splits > 1,
            ROWS=cut.rows, COLUMNS=cut.columns, TOKENS=cut.tokens, GROUP=cut.group, num_warps=cut.warps,
            num_stages=cut.stages)
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
