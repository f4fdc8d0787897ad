"""The votes: int8 products on tensor cores, exact in int32."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.ops import checks
from gft.ops.activations import MeanSquare, take_mean
from gft.ops.triton.activations import mean_of_runs
from gft.ops.triton.launch import Launcher

MEANS = 128  # features whose mean square one program takes
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
def _tile(program, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """A program's first row and first column. Neighbouring programs share rows and columns, so that what they read is in the
    cache."""
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    in_group = GROUP * tiles_across
    first_down = program // in_group * GROUP
    group_height = tl.minimum(tiles_down - first_down, GROUP)
    down, across = first_down + program % in_group % group_height, program % in_group // group_height
    return down * ROWS, across * COLUMNS


@triton.jit
def _votes_tile(program, grad_output, x, votes, rows, columns, tokens, steps,
                EVEN: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
                GROUP: tl.constexpr):
    first_row, first_column = _tile(program, rows, columns, ROWS, COLUMNS, GROUP)
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


@triton.jit(do_not_specialize=["steps", "x_runs", "x_tokens", "x_add", "grad_runs", "grad_tokens", "grad_add"])
def _votes_kernel(grad_output, x, votes, rows, columns, tokens, steps,
                  x_squares, x_mean, x_runs, x_tokens, x_add, x_features,
                  grad_squares, grad_mean, grad_runs, grad_tokens, grad_add, grad_features,
                  MEANS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                  TOKENS: tl.constexpr, GROUP: tl.constexpr):
    """A tile of the votes. With MEANS, the first programs take the mean squares of x and grad_output instead, of so many
    features each: a launch of their own would take longer."""
    if MEANS == 0:
        _votes_tile(tl.program_id(0), grad_output, x, votes, rows, columns, tokens, steps, EVEN, SPLIT, ROWS, COLUMNS,
                    TOKENS, GROUP)
    else:
        of_x = tl.cdiv(x_features, MEANS)
        before = of_x + tl.cdiv(grad_features, MEANS)
        program = tl.program_id(0)
        if program >= before:
            _votes_tile(program - before, grad_output, x, votes, rows, columns, tokens, steps, EVEN, SPLIT, ROWS, COLUMNS,
                        TOKENS, GROUP)
        elif tl.program_id(1) == 0:
            if program < of_x:
                mean_of_runs(x_squares, x_mean, x_runs, x_tokens, x_add, x_features, program, 32, MEANS)
            else:
                mean_of_runs(grad_squares, grad_mean, grad_runs, grad_tokens, grad_add, grad_features, program - of_x, 32,
                             MEANS)


_launch_votes = Launcher(_votes_kernel)


class _Product(NamedTuple):
    """How a product of one kind is launched."""

    tiles: int
    splits: int
    steps: int  # of a program's loop
    constants: dict[str, Any]
    options: dict[str, int]


_products: dict[Hashable, _Product] = {}


def votes_product(grad_output: Tensor, x: Tensor, means: Sequence[MeanSquare] = ()) -> Tensor:
    """Multiply int8 matrices exactly on tensor cores (products.votes_product): fastest where both have their tokens side by
    side in memory."""
    kind = grad_output.shape, grad_output.dtype, grad_output.device, x.shape, x.dtype, x.device
    product = _products.get(kind)
    if product is None:
        checks.check_pair(grad_output, x)
        if not checks.are_int8(grad_output, x):
            return NotImplemented
        product = _products[kind] = _product_of(grad_output.shape[1], x.shape[1], x.shape[0])
    together = len(means) == 2 and bool(means[0].squares.shape[0] and means[1].squares.shape[0])
    for one in () if together else means:
        take_mean(*one)
    (tokens, rows), columns = grad_output.shape, x.shape[1]
    votes = (torch.zeros if product.splits > 1 or not tokens else torch.empty)(
        (rows, columns), dtype=torch.int32, device=x.device)
    if not votes.numel() or not tokens:
        for one in means if together else ():
            take_mean(*one)
        return votes
    programs, of_means = product.tiles, (votes, votes, 0, 1, 0, 1) * 2
    if together:
        of_means = (*_mean_arguments(means[0]), *_mean_arguments(means[1]))
        programs += -(-of_means[5] // MEANS) - (-of_means[11] // MEANS)
    _launch_votes((kind, together, of_means[5], of_means[11]), (programs, product.splits, 1),
                  (_tokens_last(grad_output), _tokens_last(x), votes, rows, columns, tokens, product.steps, *of_means),
                  {"MEANS": MEANS if together else 0, **product.constants}, **product.options)
    return votes


def _tokens_last(q: Tensor) -> Tensor:  # (n, features) int8
    """The same numbers, with the tokens of a feature side by side in memory."""
    return q if q.stride() == (1, q.shape[0]) else q.t().contiguous()


def _mean_arguments(one: MeanSquare) -> tuple[Any, ...]:
    (runs, features), mean = one.squares.shape, one.mean
    checks.check_tensor("the mean squares", mean, (features,), torch.float32, one.squares.device)
    return one.squares, mean, runs, max(one.tokens, 1), int(one.add), features


def _product_of(rows: int, columns: int, tokens: int) -> _Product:
    cut = cut_for(rows, columns, tokens)
    tiles = triton.cdiv(rows, cut.rows) * triton.cdiv(columns, cut.columns)
    # Few tiles leave most of the GPU idle: share the tokens out, too.
    splits = max(1, min(cut.programs // max(tiles, 1), tokens // LEAST_TOKENS_A_SPLIT))
    steps = max(1, triton.cdiv(tokens, splits * cut.tokens))  # of a program's loop
    splits = triton.cdiv(tokens, steps * cut.tokens)
    return _Product(tiles, splits, steps,
                    {"EVEN": tokens % cut.tokens == 0, "SPLIT": splits > 1, "ROWS": cut.rows, "COLUMNS": cut.columns,
                     "TOKENS": cut.tokens, "GROUP": cut.group}, {"num_warps": cut.warps, "num_stages": cut.stages})


@triton.jit(do_not_specialize=["pieces_a_split"])
def _sequence_votes_kernel(grad_output, x, votes, rows, columns, tokens, pieces_a_split,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PIECES: tl.constexpr,
                           GROUP: tl.constexpr):
    first_row, first_column = _tile(tl.program_id(0), rows, columns, ROWS, COLUMNS, GROUP)
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
