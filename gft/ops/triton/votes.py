"""The votes: int8 products on tensor cores, exact in int32."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.ops import checks
from gft.ops.activations import MeanSquare, take_mean
from gft.ops.triton.activations import mean_of_runs
from gft.ops.triton.grids import MOST
from gft.ops.triton.launch import Launcher
from gft.ops.windows import ALIGNED, COLUMNS_A_LOAD, POSITIONS_A_STEP, Window

MEANS = 128  # features whose mean square one program takes
PROGRAMS = 264  # fill a GPU, two a multiprocessor
MANY_TILES = 240  # of 128 × 128: then larger tiles are faster
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
    if rows * columns >= MANY_TILES * 128 * 128:
        return Cut(128, 128, 128, warps=4, stages=3)
    return Cut(64, 128, 128, warps=4, stages=4)


@triton.jit
def tile_of(program, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """A program's first row and first column. Neighbouring programs share rows and columns, so that what they read is in the
    cache."""
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    in_group = GROUP * tiles_across
    first_down = program // in_group * GROUP
    group_height = tl.minimum(tiles_down - first_down, GROUP)
    down, across = first_down + program % in_group % group_height, program % in_group // group_height
    return down * ROWS, across * COLUMNS


@triton.jit
def _votes_tile(program, grad_output, x, votes, rows, columns, tokens, grad_stride, x_stride, steps,
                firsts, steps_an_image, edge,
                EVEN: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, BY_ROWS: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr):
    """With BY_ROWS, x is what RowPatches holds: a column's first token lies where `firsts` says, and after the steps of an
    image come as many bytes of its edge, which are passed over."""
    first_row, first_column = tile_of(program, rows, columns, ROWS, COLUMNS, GROUP)
    group = tl.program_id(2).to(tl.int64)  # of those that have rows and columns of their own
    grad_output, x = grad_output + group * rows * grad_stride, x + group * columns * x_stride
    votes += group * rows * columns
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    first, token = tl.program_id(1) * steps, tl.arange(0, TOKENS)
    # Rows beyond the edge read row 0 and are not written.
    row_live, column_live = row < rows, column < columns
    start = (first * TOKENS + token)[None, :]
    from_grad = grad_output + tl.where(row_live, row, 0).to(tl.int64)[:, None] * grad_stride + start
    if BY_ROWS:
        its_first = tl.multiple_of(tl.load(firsts + tl.where(column_live, column, 0)), BY_ROWS)
        from_x = x + its_first[:, None] + token[None, :]
    else:
        from_x = x + tl.where(column_live, column, 0).to(tl.int64)[:, None] * x_stride + start
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for one in range(first, tl.minimum(first + steps, tl.cdiv(tokens, TOKENS))):
        if BY_ROWS:
            passed = one * TOKENS + one // steps_an_image * edge
            a, b = tl.load(from_grad), tl.load(from_x + tl.multiple_of(passed, BY_ROWS))
        elif EVEN:
            a, b = tl.load(from_grad), tl.load(from_x)
        else:
            live = (one * TOKENS + token < tokens)[None, :]
            a, b = tl.load(from_grad, mask=live, other=0), tl.load(from_x, mask=live, other=0)
        total = tl.dot(a, tl.trans(b), total, out_dtype=tl.int32)
        from_grad += TOKENS
        if BY_ROWS == 0:
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


@triton.jit(do_not_specialize=["steps", "steps_an_image", "edge", "x_runs", "x_tokens", "x_add", "grad_runs", "grad_tokens",
                               "grad_add"])
def _votes_kernel(grad_output, x, votes, rows, columns, tokens, grad_stride, x_stride, steps,
                  firsts, steps_an_image, edge,
                  x_squares, x_mean, x_runs, x_tokens, x_add, x_features,
                  grad_squares, grad_mean, grad_runs, grad_tokens, grad_add, grad_features,
                  MEANS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, BY_ROWS: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr):
    """A tile of the votes. With MEANS, the first programs take the mean squares of x and grad_output instead, of so many
    features each: a launch of their own would take longer."""
    if MEANS == 0:
        _votes_tile(tl.program_id(0), grad_output, x, votes, rows, columns, tokens, grad_stride, x_stride, steps, firsts,
                    steps_an_image, edge, EVEN, SPLIT, ADD, BY_ROWS, ROWS, COLUMNS, TOKENS, GROUP)
    else:
        of_x = tl.cdiv(x_features, MEANS)
        before = of_x + tl.cdiv(grad_features, MEANS)
        program = tl.program_id(0)
        if program >= before:
            _votes_tile(program - before, grad_output, x, votes, rows, columns, tokens, grad_stride, x_stride, steps,
                        firsts, steps_an_image, edge, EVEN, SPLIT, ADD, BY_ROWS, ROWS, COLUMNS, TOKENS, GROUP)
        elif tl.program_id(1) == 0:
            if program < of_x:
                mean_of_runs(x_squares, x_mean, x_runs, x_tokens, x_add, x_features, program, 32, MEANS)
            else:
                mean_of_runs(grad_squares, grad_mean, grad_runs, grad_tokens, grad_add, grad_features, program - of_x, 32,
                             MEANS)


_launch_votes = Launcher(_votes_kernel)


class _Product:
    """How a product of one kind is launched; itself the key of its launches."""

    def __init__(self, sizes: tuple[int, int, int], groups: int, dtype: torch.dtype, add: bool,
                 by_rows: "_ByRows | None" = None) -> None:
        rows, columns, tokens = self.sizes = sizes  # rows and columns of a group
        cut = cut_for(rows, columns, tokens)
        if by_rows is not None and by_rows.positions % cut.tokens:
            cut = cut._replace(tokens=POSITIONS_A_STEP)
        self.by_rows = None if by_rows is None else (by_rows.firsts, by_rows.positions // cut.tokens, by_rows.edge)
        self.groups, self.tiles = groups, triton.cdiv(rows, cut.rows) * triton.cdiv(columns, cut.columns)
        # Few tiles leave most of the GPU idle: share the tokens out, too.
        splits = max(1, min(cut.programs // max(self.tiles * groups, 1), tokens // LEAST_TOKENS_A_SPLIT))
        if dtype is torch.int64:  # then an int32 might not hold the sum of all
            splits = max(splits, triton.cdiv(tokens, MOST_TOKENS_A_SPLIT))
        self.steps = max(1, triton.cdiv(tokens, splits * cut.tokens))  # of a program's loop
        self.splits = triton.cdiv(tokens, self.steps * cut.tokens)
        self.constants = {"MEANS": 0, "EVEN": tokens % cut.tokens == 0, "SPLIT": self.splits > 1, "ADD": add,
                          "BY_ROWS": 0 if by_rows is None else by_rows.aligned, "ROWS": cut.rows, "COLUMNS": cut.columns,
                          "TOKENS": cut.tokens, "GROUP": cut.group}
        self.beside_means = {**self.constants, "MEANS": MEANS}
        self.options = {"num_warps": cut.warps, "num_stages": cut.stages}
        # Where programs add to a tile one after the other it has to begin with zeros.
        self.room = torch.zeros if self.splits > 1 else torch.empty

    def launch(self, grad_output: Tensor, x: Tensor, strides: tuple[int, int], votes: Tensor,
               means: Sequence[MeanSquare]) -> None:
        """(groups · rows, tokens), (groups · columns, tokens) -> (groups · rows, columns) in `votes`, and the means beside.
        `strides`: from a feature to the next."""
        numbers = *self.sizes, *strides, self.steps, *(self.by_rows or (votes, 1, 0))
        if len(means) == 2 and means[0].squares.shape[0] and means[1].squares.shape[0]:
            (of_x, x_features), (of_grad, grad_features) = map(_mean_arguments, means)
            programs = self.tiles - (-x_features // MEANS) - (-grad_features // MEANS)
            _launch_votes((self, x_features, grad_features, strides), (programs, self.splits, self.groups),
                          (grad_output, x, votes, *numbers, *of_x, x_features, *of_grad, grad_features), self.beside_means,
                          **self.options)
            return
        for one in means:
            take_mean(*one)
        _launch_votes((self, strides), (self.tiles, self.splits, self.groups),
                      (grad_output, x, votes, *numbers, *(votes, votes, 0, 1, 0, 1) * 2), self.constants, **self.options)


def _mean_arguments(one: MeanSquare) -> tuple[tuple[Any, ...], int]:
    squares, tokens, mean, add = one
    runs, features = squares.shape
    if mean.shape[0] != features or mean.dtype is not torch.float32 or mean.device != squares.device:
        checks.check_tensor("the mean squares", mean, (features,), torch.float32, squares.device)
    return (squares, mean, runs, tokens or 1, int(add)), features


_products: dict[Hashable, _Product] = {}


def votes_product(grad_output: Tensor, x: Tensor, into: Tensor | None = None, means: Sequence[MeanSquare] = ()) -> Tensor:
    """Multiply int8 matrices exactly on tensor cores (products.votes_product): fastest where both have their tokens side by
    side in memory."""
    kind = (grad_output.shape, grad_output.dtype, grad_output.device, x.shape, x.dtype, x.device,
            None if into is None else (into.shape, into.dtype, into.device, into.is_contiguous()))
    product = _products.get(kind)
    if product is None:
        checks.check_pair(grad_output, x)
        (tokens, rows), columns = grad_output.shape, x.shape[1]
        if into is not None:
            checks.check_tensor("the votes to add to", into, (rows, columns), into.dtype, x.device)
            if into.dtype not in checks.VOTES or not into.is_contiguous():
                return NotImplemented
        if not checks.are_int8(grad_output, x):
            return NotImplemented
        product = _products[kind] = _Product((rows, columns, tokens), 1, torch.int32 if into is None else into.dtype,
                                             into is not None)
    if not (product.sizes[0] and product.sizes[1] and product.sizes[2]):
        for one in means:
            take_mean(*one)
        return into if into is not None else torch.zeros(product.sizes[:2], dtype=torch.int32, device=x.device)
    votes = product.room(product.sizes[:2], dtype=torch.int32, device=x.device) if into is None else into
    (one, of_grad), (other, of_x) = grad_output.stride(), x.stride()
    if one != 1 or other != 1:  # else they lie feature by feature as they are
        grad_output, x = features_first(grad_output), features_first(x)
        of_grad, of_x = grad_output.stride(0), x.stride(0)
    product.launch(grad_output, x, (of_grad, of_x), votes, means)
    return votes


class _ByRows(NamedTuple):
    """Where a product along rows finds its x."""

    firsts: Tensor  # (channels · kernel,) int64: how far the first token of each column lies from the first of all
    positions: int  # of an image
    edge: int  # elements between the last token of an image and the first of the next one
    aligned: int  # what all of these are whole multiples of


def row_votes(single: Tensor, made: Tensor, window: Window, into: Tensor, means: Sequence[MeanSquare] = ()) -> Tensor:
    """Add the votes of a convolution (windows.row_votes): each row of the kernel reads the same patches, further on."""
    kind = (single.shape, single.dtype, single.device, made.shape, made.dtype, made.stride(), made.device, window,
            into.shape, into.dtype, into.device, into.is_contiguous())
    product = _products.get(kind)
    if product is None:
        product = _row_product(single, made, window, into)
        if product is None:
            return NotImplemented
        _products[kind] = product
    by_row = features_first(single)
    product.launch(by_row, made, (by_row.stride(0), made.stride(1)), into, means)
    return into


def _row_product(single: Tensor, made: Tensor, window: Window, into: Tensor) -> _Product | None:
    """How it is launched, once all has been checked; None for what is left to the definition."""
    checks.check_matrix("the patches", made)
    checks.check_matrix("what meets the patches", single)
    (height, width), (down, across), further = window.positions, window.kernel, window.dilation[0]
    positions, edge = height * width, (down - 1) * further * width
    images = single.shape[0] // positions
    if single.shape[0] % positions or made.shape[0] != images * (positions + edge) or made.device != single.device:
        raise UsageError(f"{made.shape[0]} patches of rows on {made.device} and {single.shape[0]} positions on "
                         f"{single.device} are not of images of {height} × {width} positions")
    columns = made.shape[1] * down
    checks.check_tensor("the votes to add to", into, (single.shape[1], columns), into.dtype, made.device)
    lies_well = made.stride(0) == 1 and made.stride(1) % ALIGNED == 0 and into.is_contiguous()
    in_steps = positions % POSITIONS_A_STEP == 0 and width % COLUMNS_A_LOAD == 0
    if not (checks.are_int8(single, made) and into.dtype in checks.VOTES and lies_well and in_steps and single.numel()
            and into.numel()):
        return None
    channel, row, column = (torch.arange(n, device=made.device) for n in (made.shape[1] // across, down, across))
    firsts = (channel[:, None, None] * across + column) * made.stride(1) + (row * further * width)[:, None]
    by_rows = _ByRows(firsts.flatten(), positions, edge, math.gcd(width, ALIGNED))
    return _Product((single.shape[1], columns, single.shape[0]), 1, into.dtype, True, by_rows)


def grouped_votes_product(grad_output: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply int8 matrices of several groups in one launch (products.grouped_votes_product)."""
    if grad_output.dim() != 3 or x.dim() != 3 or x.shape[:2] != grad_output.shape[:2] or x.device != grad_output.device:
        raise UsageError(f"groups of grad_output and x must be of the same tokens but have the shapes "
                         f"{tuple(grad_output.shape)} on {grad_output.device} and {tuple(x.shape)} on {x.device}")
    (groups, tokens, rows), columns = grad_output.shape, x.shape[2]
    if not checks.are_int8(grad_output, x) or dtype not in checks.VOTES or groups > MOST:
        return NotImplemented
    if not grad_output.numel() or not x.numel():
        return torch.zeros(groups, rows, columns, dtype=dtype, device=x.device)

    def all_rows(q: Tensor) -> Tensor:  # (groups, n, features) -> (groups · features, n)
        by_feature = q.transpose(1, 2)
        return features_first(by_feature.reshape(-1, by_feature.shape[2]).t())

    kind = grad_output.shape, columns, dtype, x.device
    product = _products.setdefault(kind, _Product((rows, columns, tokens), groups, dtype, False))
    votes = product.room((groups, rows, columns), dtype=dtype, device=x.device)
    grad_output, x = all_rows(grad_output), all_rows(x)
    product.launch(grad_output, x, (grad_output.stride(0), x.stride(0)), votes, ())
    return votes


def features_first(q: Tensor) -> Tensor:  # (n, features)
    """The same numbers with the tokens of a feature side by side, (features, n): without a copy if `q` lies so, or is a part
    of what does."""
    by_feature = q.t()
    return by_feature if by_feature.stride(1) == 1 or by_feature.shape[1] == 1 else by_feature.contiguous()
