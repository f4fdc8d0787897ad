"""Floats as whole numbers of a unit (ops/units.py): read, scaled, rounded, if need be turned, and written in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.ops import checks
from gft.ops.triton.grids import spread, spread_block
from gft.ops.triton.launch import Launcher

TILE = 64  # rows and columns of a program


@triton.jit
def nearest(value):
    """The nearest integer, of ties the even one, of numbers below 2^22: added to 1.5 · 2^23, no fraction is left."""
    return (value + 12582912.0 - 12582912.0).to(tl.int32)


@triton.jit
def _units_kernel(x, per_unit, numbers, rows, columns, TURNED: tl.constexpr, TILE: tl.constexpr):
    """TURNED: x lies column by column."""
    blocks = tl.cdiv(columns, TILE)
    layer = (tl.program_id(0) // blocks).to(tl.int64)
    row = spread_block().to(tl.int64)[None] * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) % blocks * TILE + tl.arange(0, TILE)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    first, here = layer * rows * columns, row[:, None] * columns + column[None, :]
    there = column[None, :].to(tl.int64) * rows + row[:, None] if TURNED else here
    value = tl.load(x + first + there, mask=live, other=0.0).to(tl.float32) * tl.load(per_unit + layer)
    tl.store(numbers + first + here, nearest(value), mask=live)


_launch_units = Launcher(_units_kernel)


def in_units(x: Tensor, per_unit: Tensor) -> Tensor:
    """Floats as whole numbers of a unit (units.in_units)."""
    layers, rows, columns = x.shape
    checks.check_tensor("what makes units", per_unit, (layers,), torch.float32, x.device)
    turned = x.mT.is_contiguous() and not x.is_contiguous()
    if not (turned or x.is_contiguous()) or x.dtype not in (torch.float32, torch.bfloat16) or not x.numel():
        return NotImplemented
    numbers = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    _launch_units((rows, columns, x.dtype, turned), (triton.cdiv(columns, TILE) * layers, *spread(triton.cdiv(rows, TILE))),
                  (x, per_unit.contiguous(), numbers, rows, columns), {"TURNED": turned, "TILE": TILE},
                  enable_fp_fusion=False)  # or the product would be added to 1.5 · 2^23 unrounded
    return numbers
