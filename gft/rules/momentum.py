"""Momentum: a running mean of the votes, of which every weight keeps a few bits.

    M <- momentum · M + (1 - momentum) · V           V (out, in): the votes of this step
    B  = momentum · M + (1 - momentum) · V           what moves the weights, with Nesterov's look ahead

as SGD and Muon have it. The mean is taken of votes, before anything is normalised, and that is what tells it from inertia
(rounding.py): what `orthogonalize` or the second moment make of B they make of twenty steps, not of the noise of one.

M is kept as integers m of 8 or 4 bits and a float for each column, M = m · unit, the largest of a column being 127 or 7.
Each step it is rounded anew, without bias: what is smaller than a unit counts by chance, and adds up all the same.

All of it is products and sums of floats, entry by entry (ops/momentum.py), and every device gives the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gft import ops
from gft.ops import KeptMean
from gft.philox import NoiseKey
from gft.rules.matrices import BOUND
from gft.rules.mean import Kind, RunningMean, State
from gft.storage import pack_fields

MEAN, UNIT = "momentum", "momentum_unit"
BITS = (8, 4)


@dataclass(frozen=True)
class Momentum(RunningMean):
    """A mean that keeps a share of itself in each step, in `bits` bits a weight."""

    exact: ClassVar[bool] = True
    share: float
    bits: int = 8

    @property
    def setting(self) -> str:
        return f"momentum={self.share}, momentum_bits={self.bits}"

    def tensors(self, rows: int, columns: int) -> dict[str, Kind]:
        mean = Kind((rows, columns), torch.int8) if self.bits == 8 else Kind((rows, -(-columns // 2)), torch.uint8)
        return {MEAN: mean, UNIT: Kind((columns,), torch.float32)}

    def start(self, rows: int, columns: int, device: torch.device) -> State:
        nothing = torch.zeros(rows, columns, dtype=torch.int8, device=device)
        unit = torch.zeros(columns, device=device)
        if self.bits < 8:
            nothing = pack_fields(nothing, self.bits, KeptMean(nothing, unit, self.bits).largest)
        return {MEAN: nothing, UNIT: unit}

    def renew(self, votes: Sequence[Tensor], means: Sequence[State], keys: Sequence[NoiseKey]) -> list[Tensor]:
        return [ops.renew_mean(self.kept(mean), one, self.share, BOUND, key)
                for one, mean, key in zip(votes, means, keys, strict=True)]

    def kept(self, state: State) -> KeptMean:
        return KeptMean(state[MEAN], state[UNIT], self.bits)
