"""Momentum: a running mean of the votes, of which every weight keeps a byte.

    M <- momentum · M + (1 - momentum) · V           V (out, in): the votes of this step
    B  = momentum · M + (1 - momentum) · V           what moves the weights, with Nesterov's look ahead

as SGD and Muon have it. The mean is taken of votes, before anything is normalised, and that is what tells it from inertia
(rounding.py): what `orthogonalize` or the second moment make of B they make of many steps, not of the noise of one.

M is kept as integers m of 8 bits and a float for each column, M = m · scale, the largest of a column being 127.
Each step it is rounded anew, without bias: what is smaller than the scale counts by chance, and adds up all the same.

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
from gft.rules.mean import MEAN, SCALE, Join, Kind, RunningMean, State


@dataclass(frozen=True)
class Momentum(RunningMean):
    """A mean that keeps a share of itself in each step."""

    exact: ClassVar[bool] = True
    by_rows: ClassVar[frozenset[str]] = frozenset({MEAN})
    share: float

    @property
    def setting(self) -> str:
        return f"momentum={self.share}"

    def tensors(self, rows: int, columns: int) -> dict[str, Kind]:
        return {MEAN: Kind((rows, columns), torch.int8), SCALE: Kind((columns,), torch.float32)}

    def start(self, rows: int, columns: int, device: torch.device) -> State:
        return {name: torch.zeros(kind.shape, dtype=kind.dtype, device=device)
                for name, kind in self.tensors(rows, columns).items()}

    def renew(self, votes: Sequence[Tensor], means: Sequence[State], keys: Sequence[NoiseKey],
              take_largest: Join | None = None) -> list[Tensor]:
        layers = [(KeptMean(mean[MEAN], mean[SCALE]), one) for one, mean in zip(votes, means, strict=True)]
        if take_largest is None:
            return ops.renew_means([kept for kept, _ in layers], votes, self.share, BOUND, keys) if layers else []
        amax = [ops.mean_amax(kept, one, self.share) for kept, one in layers]
        take_largest(amax)
        return [ops.renew_mean(kept, one, its_amax, self.share, BOUND, key)
                for (kept, one), its_amax, key in zip(layers, amax, keys, strict=True)]
