"""Layers of one shape together (ops/units.py), a launch each way."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.ops import checks
from gft.ops.triton.alike import pick_votes, shared_launches, votes_argument
from gft.ops.triton.grids import spread, spread_block
from gft.ops.triton.launch import Launcher

BLOCK = 1024  # votes of a program that makes floats
TILE = 64  # rows and columns of one that makes numbers


@triton.jit
def _floats_kernel(votes, floats, count, TABLE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    layer = tl.program_id(1)
    votes, place = pick_votes(votes, layer, TABLE, WIDE), tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(votes + place, mask=place < count, other=0).to(tl.float32)
    tl.store(floats + layer.to(tl.int64) * count + place, value.to(floats.dtype.element_ty), mask=place < count)


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


_launch_floats, _launch_units = Launcher(_floats_kernel), Launcher(_units_kernel)


def as_floats(votes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Votes that one tensor is made of (units.as_floats)."""
    first = votes[0]
    alike = all((one.shape, one.dtype, one.device) == (first.shape, first.dtype, first.device) for one in votes)
    if not alike or not checks.are_votes(first) or dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    floats = torch.empty((len(votes), *first.shape), dtype=dtype, device=first.device)
    for numbers in shared_launches([None] * len(votes)):
        some, how = votes_argument([votes[number].contiguous() for number in numbers])
        _launch_floats((len(numbers), first.shape, first.dtype, dtype, *how.values()),
                       (triton.cdiv(first.numel(), BLOCK), len(numbers), 1), (some, floats[numbers[0]], first.numel()),
                       {**how, "BLOCK": BLOCK})
    return floats


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
