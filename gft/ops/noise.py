"""Random numbers as a tensor, for who rounds by operations of torch."""

from torch import Tensor

from gft.ops.operation import operation
from gft.philox import NoiseKey, noise16


@operation
def draw_noise(numbers: Tensor,  # any shape, int32
               key: NoiseKey) -> Tensor:  # the same
    """Fill a tensor with the 16-bit numbers of its elements (philox.noise16)."""
    return numbers.copy_(noise16(numbers.numel(), key, device=numbers.device).view_as(numbers))
