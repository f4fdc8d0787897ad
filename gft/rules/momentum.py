"""Momentum: a running mean of the votes, of which every weight keeps a few bits.

    M <- momentum · M + (1 - momentum) · V           V (out, in): the votes of this step
    B  = momentum · M + (1 - momentum) · V           what moves the weights, with Nesterov's look ahead

as SGD and Muon have it. The mean is taken of votes, before anything is normalised, and that is what tells it from inertia
(rounding.py): what `orthogonalize` or the second moment make of B they make of twenty steps, not of the noise of one.

M is kept as integers m of 8 or 4 bits and a float for each column, M = m · unit, the largest of a column being 127 or 7.
Each step it is rounded anew, without bias: what is smaller than a unit counts by chance, and adds up all the same.

All of it is products and sums of floats, entry by entry, each rounded by itself. So every device gives the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gft import ops
from gft.philox import NoiseKey
from gft.rules.matrices import BOUND
from gft.rules.mean import Kind, RunningMean, State
from gft.storage import pack_fields, unpack_fields

MEAN, UNIT = "momentum", "momentum_unit"
BITS = (8, 4)
LEAST = 1e-30  # of a column whose largest entry is smaller nothing is kept


@dataclass(frozen=True)
class Momentum(RunningMean):
    """A mean that keeps a share of itself in each step, in `bits` bits a weight."""

    exact: ClassVar[bool] = True
    share: float
    bits: int = 8

    @property
    def setting(self) -> str:
        return f"momentum={self.share}, momentum_bits={self.bits}"

    @property
    def largest(self) -> int:
        """The integers are -largest..largest."""
        return (1 << self.bits - 1) - 1

    def tensors(self, rows: int, columns: int) -> dict[str, Kind]:
        mean = Kind((rows, columns), torch.int8) if self.bits == 8 else Kind((rows, -(-columns // 2)), torch.uint8)
        return {MEAN: mean, UNIT: Kind((columns,), torch.float32)}

    def start(self, rows: int, columns: int, device: torch.device) -> State:
        nothing = self._stored(torch.zeros(rows, columns, dtype=torch.int8, device=device))
        return {MEAN: nothing, UNIT: torch.zeros(columns, device=device)}

    def renew(self, votes: Sequence[Tensor], means: Sequence[State], keys: Sequence[NoiseKey]) -> list[Tensor]:
        return [self._renew(*one) for one in zip(votes, means, keys, strict=True)]

    def _renew(self, votes: Tensor, state: State, key: NoiseKey) -> Tensor:  # -> (out, in) int32
        newest = votes.float() * (1.0 - self.share)
        mean = self.mean_of(state, votes.shape[1]) * self.share + newest
        unit = mean.abs().amax(0) / self.largest if len(mean) else state[UNIT]
        unit = torch.where(unit > LEAST, unit, 0.0)
        per_unit = torch.where(unit > 0, 65536.0 / unit, 0.0)  # ops.quantize counts in 1/65536
        state[MEAN].copy_(self._stored(ops.quantize(mean, per_unit, self.largest, key).q))
        state[UNIT].copy_(unit)
        return _as_integers(mean.mul_(self.share).add_(newest))

    def mean_of(self, state: State, columns: int) -> Tensor:
        """(out, in) float32."""
        mean = state[MEAN] if self.bits == 8 else unpack_fields(state[MEAN], self.bits, self.largest, columns)
        return mean.float() * state[UNIT]

    def _stored(self, mean: Tensor) -> Tensor:  # (out, in) int8
        return mean if self.bits == 8 else pack_fields(mean, self.bits, self.largest)


def _as_integers(moves: Tensor) -> Tensor:  # (out, in) float32 -> the same in int32, in units of its own
    """A rule takes only how the entries of a layer compare: the largest becomes BOUND."""
    largest = moves.abs().amax() if moves.numel() else moves.new_zeros(())
    return moves.mul_(torch.where(largest > LEAST, BOUND / largest, 0.0)).round_().to(torch.int32)
