"""Stored weights made float for a product; activations packed for backward and unpacked there."""

from typing import NamedTuple

import torch
from torch import Tensor

from gft import storage as packing
from gft.ops.operation import operation, twins
from gft.storage import Storage


class Scaling(NamedTuple):
    """What levels are multiplied by where they are read out: number · by_group · exp(root · log_gain)."""

    by_group: Tensor | None = None  # (rows, groups) float: one for each group of columns of a row
    log_gain: Tensor | None = None  # (1,) float: of the layer's gain
    number: float = 1.0
    root: float = 0.0

    def factors(self) -> Tensor | float:
        """All of it as one number, a scalar, or a factor for each group."""
        factor: Tensor | float = self.number
        if self.log_gain is not None:
            factor = (self.log_gain[0].float() * self.root).exp() * self.number
        return factor if self.by_group is None else self.by_group.float() * factor


PLAIN = Scaling()


@operation
def float_levels(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8
                 storage: Storage,
                 columns: int,
                 dtype: torch.dtype,
                 scaling: Scaling = PLAIN,
                 places: int = 1,
                 turned: bool = False) -> Tensor:  # (rows, columns); turned: (columns, rows)
    """The float weight that a stored one stands for, in `dtype`: its levels, times their scale. Levels alone are exact in
    any float type, and what they are multiplied by is rounded to it once, with them.

    Columns are (channels, places in a convolution's kernel). With `places` they come as (places, channels), the order of a
    weight that is channels_last in memory. `turned`: what lies side by side in memory is then a column."""
    levels, factors = storage.levels(stored, columns), scaling.factors()
    if isinstance(factors, Tensor):
        levels = times_factors(levels.float(), factors)
    elif factors != 1.0:
        levels = levels.float() * factors
    weight = levels.to(dtype)
    weight = weight if places == 1 else weight.unflatten(1, (-1, places)).transpose(1, 2).flatten(1)
    return weight.t().contiguous() if turned else weight


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


def runs_of(tensor: Tensor, tokens: int) -> int:
    """Over how many runs of these tokens does `quantize` sum squares on this device?"""
    if not tokens_last(tensor):
        return 1
    from gft.ops.triton.activations import runs_of

    return runs_of(tokens)
