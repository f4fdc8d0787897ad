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
                 factors: Tensor | None = None,  # scalar, or (rows, groups) of equal length
                 places: int = 1) -> Tensor:  # (rows, columns)
    """The levels of a stored weight as numbers of `dtype`, which are exact in any float type; if given, times one factor for
    all (a gain), or one for each group of columns of a row (its scales).

    Columns are (channels, places in a convolution's kernel). With `places` they come as (places, channels), the order of a
    weight that is channels_last in memory."""
    levels = storage.levels(stored, columns)
    levels = levels.to(dtype) if factors is None else times_factors(levels.float(), factors).to(dtype)
    return levels if places == 1 else levels.unflatten(1, (-1, places)).transpose(1, 2).flatten(1)


def times_factors(levels: Tensor,  # (rows, columns) float32
                  factors: Tensor) -> Tensor:  # scalar or (rows, groups)
    """Each group of columns times its factor."""
    if factors.dim() == 0:
        return levels * factors.float()
    groups = factors.float()[:, :, None]
    return (levels.view(*factors.shape, levels.shape[1] // factors.shape[1]) * groups).view_as(levels)


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
