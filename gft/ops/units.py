"""Layers of one shape together: their votes as floats, and floats as whole numbers of a unit.

The first is how rules that look at whole matrices begin, the second how what they found becomes moves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gft.ops.operation import operation


@operation
def as_floats(votes: Sequence[Tensor],  # of each layer (rows, columns) int32 or int64
              dtype: torch.dtype) -> Tensor:  # (layers, rows, columns)
    """Votes that one tensor is made of."""
    return torch.stack(list(votes)).to(dtype)


@operation
def in_units(x: Tensor,  # (layers, rows, columns) float32 or bfloat16, in any order in memory
             per_unit: Tensor) -> Tensor:  # (layers,) float32 -> (layers, rows, columns) int32
    """x · per_unit of each layer, to the nearest integer, of ties the even one. None may exceed 2^22."""
    return x.float().mul(per_unit[:, None, None]).round_().to(torch.int32).contiguous()
