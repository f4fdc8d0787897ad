"""Stored weights made float for a product; activations packed for backward and unpacked there."""

import torch
from torch import Tensor

from gft import storage as packing
from gft.ops.operation import operation, twins
from gft.storage import Storage


@operation
def float_levels(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8
                 storage: Storage,
                 columns: int,
                 dtype: torch.dtype,
                 gain: Tensor | None = None) -> Tensor:  # scalar -> (rows, columns)
    """The levels of a stored weight as numbers of `dtype`, which are exact in any float type; times the gain if given."""
    levels = storage.levels(stored, columns)
    return levels.to(dtype) if gain is None else (levels.float() * gain.float()).to(dtype)


@operation
def pack_fields(numbers: Tensor,  # (rows, columns) int8
                width: int,
                offset: int) -> Tensor:  # (rows, bytes) uint8
    """Store small integers several a byte (storage.pack_fields)."""
    return packing.pack_fields(numbers, width, offset)


@operation
def unpack_fields(packed: Tensor,  # (rows, bytes) uint8
                  width: int,
                  offset: int,
                  columns: int) -> Tensor:  # (rows, columns) int8
    """Read packed integers (storage.unpack_fields)."""
    return packing.unpack_fields(packed, width, offset, columns)


def tokens_last(tensor: Tensor) -> bool:
    """Does `quantize` on this device lay its result out feature by feature? Triton's does, as int8 tensor cores want it."""
    return tensor.is_cuda and "quantize" in twins("cuda")
