"""Renewing a running mean of votes that is kept in few bits a weight, and what then moves the weight.

    M <- share · M + (1 - share) · V           M = m · unit, m of 8 or 4 bits, unit a float for each column
    B  = share · M + (1 - share) · V           in integers: a layer's B in units of its own

rules/momentum.py says what for. M is rounded to whole units without bias, on a unit by which the largest entry of its column
just fits; B is taken from M before that. Every product and sum is rounded by itself, so that all devices give the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gft.ops.activations import quantize
from gft.ops.operation import operation
from gft.philox import NoiseKey
from gft.storage import pack_fields, unpack_fields

LEAST = 1e-30  # of a column whose unit is smaller nothing is kept


@dataclass(frozen=True, eq=False, slots=True)
class KeptMean:
    """A running mean as it lies in memory, to be renewed in place."""

    stored: Tensor  # (rows, columns) int8 or, with 4 bits, (rows, columns / 2) uint8: m, two a byte
    unit: Tensor  # (columns,) float32
    bits: int  # 8 or 4

    @property
    def largest(self) -> int:
        """The largest |m|."""
        return (1 << self.bits - 1) - 1

    def floats(self) -> Tensor:  # (rows, columns) float32
        columns = len(self.unit)
        numbers = self.stored if self.bits == 8 else unpack_fields(self.stored, self.bits, self.largest, columns)
        return numbers.float() * self.unit


@operation
def renew_mean(kept: KeptMean,
               votes: Tensor,  # (rows, columns) int32 or int64
               share: float,  # that the mean keeps of itself
               bound: int,  # what none of the result will exceed
               key: NoiseKey) -> Tensor:  # (rows, columns) int32: B
    """Take votes into a mean, in place."""
    share, rest = shares_of(share)
    newest = votes.float() * rest
    mean = kept.floats() * share + newest
    top = mean.abs().amax(0) if len(mean) else kept.unit
    unit = top / kept.largest
    per_unit = torch.where(unit > LEAST, 65536.0 / unit, 0.0)  # quantize counts in 1/65536
    numbers = quantize(mean, per_unit, kept.largest, key).q
    kept.stored.copy_(numbers if kept.bits == 8 else pack_fields(numbers, kept.bits, kept.largest))
    kept.unit.copy_(unit)
    most = _largest(top) * share + _largest(votes.abs()).float() * rest  # no |B| is more
    per_move = torch.where(most > LEAST, bound / most, 0.0)
    return mean.mul_(share).add_(newest).mul_(per_move).round_().to(torch.int32)


def shares_of(share: float) -> tuple[float, float]:
    """What the mean and what the votes are multiplied by, as float32 holds them: the same on all devices."""
    both = torch.tensor([share, 1.0 - share], dtype=torch.float32).tolist()
    return both[0], both[1]


def _largest(values: Tensor) -> Tensor:
    """Of values >= 0, of which there may be none."""
    return values.amax() if values.numel() else values.new_zeros(())
