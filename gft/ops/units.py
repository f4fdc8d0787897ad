"""Floats as whole numbers of a unit, several layers at a time: what orthogonalized votes become before they move weights."""

import torch
from torch import Tensor

from gft.ops.operation import operation


@operation
def in_units(x: Tensor,  # (layers, rows, columns) float32 or bfloat16, in any order in memory
             per_unit: Tensor) -> Tensor:  # (layers,) float32 -> (layers, rows, columns) int32
    """x · per_unit of each layer, to the nearest integer, of ties the even one. None may exceed 2^22."""
    return x.float().mul(per_unit[:, None, None]).round_().to(torch.int32).contiguous()
