"""Votes of whole sequences: the sign of each one's own sum, by one launch."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.ops import checks
from gft.ops.products import EXACT_IN_INT32
from gft.ops.triton.votes import PROGRAMS, tile_of


@triton.jit(do_not_specialize=["pieces_a_split"])
def _sequence_votes_kernel(grad_output, x, votes, rows, columns, tokens, pieces_a_split,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PIECES: tl.constexpr,
                           GROUP: tl.constexpr):
    first_row, first_column = tile_of(tl.program_id(0), rows, columns, ROWS, COLUMNS, GROUP)
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
    if not checks.are_int8(grad_output, x) or not grad_output.numel() or not x.numel() or sequence > EXACT_IN_INT32:
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
