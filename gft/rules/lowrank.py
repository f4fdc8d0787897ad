"""Momentum of low rank: what the votes of many steps agree on, in a few numbers a row and a column.

Packed weights have no room to add votes up over steps, and most of one step's votes are noise. But noise lies in all
directions of a matrix alike, and what steps agree on in few of them. So of the running mean of a layer's votes

    T = decay · M + (1 - decay) · U        U (out, in): the votes, rows and columns of equal size, of length one

the largest `rank` directions are kept, M = left · right^T with left (out, rank) orthonormal and right (in, rank): one round
of subspace iteration a step, from the directions of the step before, as PowerSGD (Vogels et al. 2019) compresses gradients.

    left  <- orthonormal(T · right)
    right <- T^T · left

What moves the weights is half of each, beta = U + M / |M|. left and right lie in one tensor, the rows' numbers above the
columns'. The products are floats, so another device may not give the same bits; of several ranks each does some of the
layers for all (distributed.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gft import ops
from gft.philox import NoiseKey
from gft.rules.matrices import alike, evened, in_ones, newton_schulz, newton_schulz_multiply_adds, of_length_one
from gft.rules.mean import MEAN, Join, Kind, RunningMean, State

DECAY = 0.9  # of the mean: that of inertia
POLISH = 4  # cubic rounds, which bring singular values of 0.7 to 1.2 to 1


@dataclass(frozen=True)
class LowRank(RunningMean):
    """A mean of `rank` directions: (out + in, rank) float32."""

    rank: int

    @property
    def setting(self) -> str:
        return f"momentum_rank={self.rank}"

    def tensors(self, rows: int, columns: int) -> dict[str, Kind]:
        return {MEAN: Kind((rows + columns, min(self.rank, rows, columns)), torch.float32)}

    def start(self, rows: int, columns: int, device: torch.device) -> State:
        """No mean yet, and for its first directions some that have a part of every other, the same each time."""
        rank = min(self.rank, rows, columns)
        right = torch.randn(columns, rank, generator=torch.Generator().manual_seed(columns)) / columns**0.5
        return {MEAN: torch.cat([torch.zeros(rows, rank), right]).to(device)}

    def renew(self, votes: Sequence[Tensor],
              means: Sequence[State],
              keys: Sequence[NoiseKey],
              take_largest: Join | None = None) -> list[Tensor]:  # each (out, in) int32, none beyond matrices.BOUND
        """Each layer's votes and their running mean, half and half, in units of 1/ONE. Layers of one shape share their
        products."""
        results: dict[int, Tensor] = {}
        for numbers in alike(votes):
            some = [means[number][MEAN] for number in numbers]
            beta, new = _step(ops.as_floats([votes[number] for number in numbers], torch.float32), torch.stack(some))
            results.update(zip(numbers, beta, strict=True))
            for mean, one in zip(some, new, strict=True):
                mean.copy_(one)
        return [results[number] for number in range(len(votes))]


def multiply_adds(out: int, features: int, rank: int) -> int:
    """Multiplications that one layer takes in a step: three products of its own size with `rank` directions, and what it
    takes to make these orthonormal and to turn the mean into them."""
    rank = min(rank, out, features)
    orthonormal = newton_schulz_multiply_adds(out, rank) + POLISH * 2 * rank**2 * out
    return 3 * rank * out * features + 2 * rank**2 * (out + features) + orthonormal


def _step(votes: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:  # (layers, out, in), (layers, out + in, rank)
    rows = votes.shape[1]
    unit = evened(votes)
    left, right = mean[:, :rows], mean[:, rows:]
    towards = DECAY * left @ (right.mT @ right) + (1 - DECAY) * unit @ right
    new_left = _orthonormal(towards)
    new_right = DECAY * right @ (left.mT @ new_left) + (1 - DECAY) * unit.mT @ new_left
    seen = unit.abs().amax((1, 2), keepdim=True) > 0  # of no votes nothing is learnt, and the first directions are kept
    mean = torch.where(seen, torch.cat([new_left, new_right], 1), mean)
    beta = unit + of_length_one(mean[:, :rows] @ mean[:, rows:].mT)
    return in_ones(beta), mean


def _orthonormal(x: Tensor) -> Tensor:  # (layers, many, few) -> columns of length one, at right angles
    x = newton_schulz(of_length_one(x))
    for _ in range(POLISH):
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return x
