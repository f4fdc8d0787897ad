"""What the votes say along the weight itself: one number a layer, by which its gain learns."""

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.ops import checks
from gft.ops.triton.launch import Launcher

ROWS, COLUMNS = 8, 512  # of a program


@triton.jit
def _along_kernel(votes, weight, row_factors, column_factors, sums, slope, rows, columns,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of one block. A program writes its own, so that they are added in a fixed order."""
    row_blocks = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // row_blocks * COLUMNS + tl.arange(0, COLUMNS)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    vote = tl.load(votes + place, mask=live, other=0).to(tl.float32)
    value = tl.load(weight + place, mask=live, other=0.0).to(tl.float32)
    by_row = 65536.0 / tl.load(row_factors + row, mask=row < rows, other=1.0)
    by_column = 65536.0 / tl.load(column_factors + column, mask=column < columns, other=1.0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(vote * value * by_column[None, :], 1) * by_row, 0) * slope)


_launch_along = Launcher(_along_kernel)


_checked: set[Hashable] = set()  # kinds of arguments


def along_levels(votes: Tensor, weight: Tensor, row_factors: Tensor, column_factors: Tensor, slope: float = 1.0) -> Tensor:
    """Sum votes · weight on the votes' scales, in one pass (products.along_levels)."""
    (rows, columns), device = votes.shape, votes.device
    kind = tuple((one.shape, one.dtype, one.device) for one in (votes, weight, row_factors, column_factors))
    if kind not in _checked:
        checks.check_tensor("the weight", weight, (rows, columns), weight.dtype, device)
        checks.check_tensor("the row factors", row_factors, (rows,), torch.float32, device)
        checks.check_tensor("the column factors", column_factors, (columns,), torch.float32, device)
        if not checks.are_votes(votes) or weight.dtype not in checks.FLOATS:
            return NotImplemented
        _checked.add(kind)
    programs = -(-rows // ROWS) * -(-columns // COLUMNS)
    sums = torch.empty(programs, dtype=torch.float32, device=device)
    given = (one if one.is_contiguous() else one.contiguous() for one in (votes, weight, row_factors, column_factors))
    _launch_along(kind, (programs, 1, 1), (*given, sums, float(slope), rows, columns), {"ROWS": ROWS, "COLUMNS": COLUMNS})
    return sums.sum(0, keepdim=True)
