"""What comes before a layer's product: the weight as floats, and x or grad_output as the integers that votes are made of."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gft.ops.activations import Quantized, quantize
from gft.ops.levels import PLAIN, Scaling, float_levels
from gft.ops.operation import operation
from gft.philox import NoiseKey
from gft.storage import Storage


class StoredWeight(NamedTuple):
    """A weight to be read out: the arguments of `float_levels`."""

    stored: Tensor  # (rows, bytes) or (rows, columns)
    storage: Storage
    columns: int
    dtype: torch.dtype
    scaling: Scaling = PLAIN
    places: int = 1
    turned: bool = False


@operation
def read_and_quantize(weight: StoredWeight, values: Tensor, factors: Tensor | None, largest: int, key: NoiseKey,
                      not_finite: Tensor | None = None) -> tuple[Tensor, Quantized]:
    """`float_levels` of a weight and `quantize` of values, which do not depend on each other."""
    return float_levels(*weight), quantize(values, factors, largest, key, not_finite)


Preparer = Callable[[Tensor, NoiseKey], tuple[Tensor, Quantized]]


@operation
def preparer(weight: StoredWeight, values: Tensor, factors: Tensor | None, largest: int,
             not_finite: Tensor | None = None) -> Preparer:
    """`read_and_quantize` of one weight and of values like these, as a layer calls it again and again: weight, factors and
    counter are the same tensors each time, whatever they hold."""
    return lambda values, key: read_and_quantize(weight, values, factors, largest, key, not_finite)
