"""The votes: int8 products on tensor cores, exact in int32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens a step of the loop, programs that fill a GPU (two a multiprocessor), tokens worth a program.
TILE_K, PROGRAMS, LEAST_TOKENS_A_SPLIT = 128, 264, 512


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """A program's rows and columns. Neighbouring programs share some, so that what they read is in the cache."""
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    program, in_group = tl.program_id(0), GROUP * tiles_across
    first_down = program // in_group * GROUP
    group_height = tl.minimum(tiles_down - first_down, GROUP)
    down, across = first_down + program % in_group % group_height, program % in_group // group_height
    return down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit(do_not_specialize=["tiles_a_split"])
def _votes_kernel(delta, x, votes, rows, columns, tokens, tiles_a_split,
                  EVEN: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
                  GROUP: tl.constexpr):
    row, column = _tile(rows, columns, ROWS, COLUMNS, GROUP)
    first = tl.program_id(1) * tiles_a_split
    token = first * TOKENS + tl.arange(0, TOKENS)
    # Rows beyond the edge read row 0 and are not written.
    from_delta = delta + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * tokens + token[None, :]
    from_x = x + tl.where(column < columns, column, 0).to(tl.int64)[:, None] * tokens + token[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for tile in range(tiles_a_split):
        if EVEN:
            a, b = tl.load(from_delta), tl.load(from_x)
        else:
            live = (token + tile * TOKENS < tokens)[None, :]
            a, b = tl.load(from_delta, mask=live, other=0), tl.load(from_x, mask=live, other=0)
        total = tl.dot(a, tl.trans(b), total, out_dtype=tl.int32)
        from_delta += TOKENS
        from_x += TOKENS
    place = votes + row.to(tl.int64)[:, None] * columns + column[None, :]
    live = (row < rows)[:, None] & (column < columns)[None, :]
    if SPLIT:
        tl.atomic_add(place, total, mask=live, sem="relaxed")  # integers: the same in any order
    else:
        tl.store(place, total, mask=live)


def votes_product(delta: Tensor,  # (tokens, rows) int8, tokens side by side in memory
                  x: Tensor) -> Tensor:  # (tokens, columns) int8, likewise -> (rows, columns) int32
    """vote.tally where no sum exceeds int32: delta^T · x on int8 tensor cores."""
    delta, x = delta.t().contiguous(), x.t().contiguous()
    (rows, tokens), columns = delta.shape, x.shape[0]
    tile_rows, tile_columns = (128, 128) if rows * columns >= PROGRAMS * 128 * 128 else (64, 128)
    tiles = triton.cdiv(rows, tile_rows) * triton.cdiv(columns, tile_columns)
    # Few tiles leave most of the GPU idle: share the tokens out, too.
    splits = max(1, min(PROGRAMS // tiles, tokens // LEAST_TOKENS_A_SPLIT))
    tiles_a_split = triton.cdiv(tokens, splits * TILE_K)
    splits = triton.cdiv(tokens, tiles_a_split * TILE_K)
    votes = (torch.zeros if splits > 1 else torch.empty)(rows, columns, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        _votes_kernel[(tiles, splits)](
            delta, x, votes, rows, columns, tokens, tiles_a_split, EVEN=tokens == splits * tiles_a_split * TILE_K,
            SPLIT=splits > 1, ROWS=tile_rows, COLUMNS=tile_columns, TOKENS=TILE_K, GROUP=8,
            num_warps=4, num_stages=3 if tile_rows == 128 else 4)
    return votes


@triton.jit(do_not_specialize=["sequences", "sequences_a_split"])
def _sequence_votes_kernel(delta, x, votes, rows, columns, sequences, sequence, sequences_a_split,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr,
                           GROUP: tl.constexpr):
    row, column = _tile(rows, columns, ROWS, COLUMNS, GROUP)
    length = sequences.to(tl.int64) * 0 + sequence
    tokens, token = sequences * length, tl.arange(0, TOKENS)
    from_delta = delta + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * tokens + token[None, :]
    from_x = x + tl.where(column < columns, column, 0).to(tl.int64)[:, None] * tokens + token[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    first = tl.program_id(1) * sequences_a_split
    for one in range(first, tl.minimum(first + sequences_a_split, sequences)):
        voice = tl.zeros((ROWS, COLUMNS), tl.int32)
        for start in range(0, sequence, TOKENS):
            place = one * length + start
            if EVEN:
                a, b = tl.load(from_delta + place), tl.load(from_x + place)
            else:
                live = (start + token < sequence)[None, :]
                a, b = tl.load(from_delta + place, mask=live, other=0), tl.load(from_x + place, mask=live, other=0)
            voice = tl.dot(a, tl.trans(b), voice, out_dtype=tl.int32)
        total += (voice > 0).to(tl.int32) - (voice < 0).to(tl.int32)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    tl.atomic_add(votes + row.to(tl.int64)[:, None] * columns + column[None, :], total, mask=live, sem="relaxed")


def sequence_votes(delta: Tensor,  # (tokens, rows) int8
                   x: Tensor,  # (tokens, columns) int8
                   sequence: int) -> Tensor:  # tokens that make one sample -> (rows, columns) int32
    """The sum over sequences of the sign of a sequence's votes (vote._sequence_tally), none of which is ever written."""
    delta, x = delta.t().contiguous(), x.t().contiguous()
    (rows, tokens), columns = delta.shape, x.shape[0]
    sequences, tiles = tokens // sequence, triton.cdiv(rows, 64) * triton.cdiv(columns, 128)
    sequences_a_split = triton.cdiv(sequences, max(1, min(PROGRAMS // tiles, sequences)))
    votes = torch.zeros(rows, columns, dtype=torch.int32, device=x.device)
    at_once = TILE_K if sequence % TILE_K == 0 else TILE_K // 2
    with torch.cuda.device_of(x):
        _sequence_votes_kernel[(tiles, triton.cdiv(sequences, sequences_a_split))](
            delta, x, votes, rows, columns, sequences, sequence, sequences_a_split, ROWS=64, COLUMNS=128, TOKENS=at_once,
            EVEN=sequence % at_once == 0, GROUP=8, num_warps=4, num_stages=3)
    return votes
