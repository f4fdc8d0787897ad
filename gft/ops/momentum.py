"""Renewing a running mean of votes that is kept in a byte a weight, and what then moves the weight.

    M <- share · M + (1 - share) · V           M = m · scale, m of 8 bits, scale a float for each column
    B  = share · M + (1 - share) · V           in integers: a layer's B in units of its own

rules/momentum.py says what for. m is rounded without bias, on a scale by which the largest entry of its column just
fits; B is taken from M before that. Every product and sum is rounded by itself, so that all devices give the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gft.ops.activations import quantize
from gft.ops.operation import operation
from gft.philox import NoiseKey

LARGEST = 127  # |m|
PER_LARGEST = 1 / LARGEST  # torch divides by a number on a CPU, and multiplies by its inverse on a GPU: so do we everywhere
LEAST = 1e-30  # of a column whose scale is smaller nothing is kept


@dataclass(frozen=True, eq=False, slots=True)
class KeptMean:
    """A running mean as it lies in memory, to be renewed in place."""

    stored: Tensor  # (rows, columns) int8: m
    scale: Tensor  # (columns,) float32

    def floats(self) -> Tensor:  # (rows, columns) float32
        return self.stored.float() * self.scale


@operation
def mean_amax(kept: KeptMean,
              votes: Tensor,  # (rows, columns) int32 or int64
              share: float) -> Tensor:  # (columns + 2,) float32
    """The largest entry of each column of the renewed mean, of all of it, and the largest vote: what rows must know of each
    other. The largest of several amax are those of all their rows together."""
    share, rest = shares_of(share)
    if not votes.numel():
        return torch.zeros(votes.shape[1] + 2, device=votes.device)
    columns = (kept.floats() * share + votes.float() * rest).abs().amax(0)
    return torch.cat([columns, columns.amax().view(1), votes.abs().amax().float().view(1)])


@operation
def renew_mean(kept: KeptMean,
               votes: Tensor,  # (rows, columns) int32 or int64
               amax: Tensor,  # of all rows of the weight
               share: float,  # that the mean keeps of itself
               bound: int,  # what none of the result will exceed
               key: NoiseKey) -> Tensor:  # (rows, columns) int32: B
    """Take votes into a mean, in place. Where ranks share out the rows of a weight, the key says which these are."""
    scale, inverse, per_move = factors_of(amax, share, bound)
    share, rest = shares_of(share)
    newest = votes.float() * rest
    mean = kept.floats() * share + newest
    kept.stored.copy_(_quantized(mean, inverse, key))
    kept.scale.copy_(scale)
    return mean.mul_(share).add_(newest).mul_(per_move).round_().to(torch.int32)


@operation
def renew_means(kept: Sequence[KeptMean],
                votes: Sequence[Tensor],  # of each (rows, columns)
                share: float,
                bound: int,
                keys: Sequence[NoiseKey]) -> list[Tensor]:  # of each (rows, columns) int32: B
    """`mean_amax`, then `renew_mean`, of many. On a GPU those of one shape share their launches."""
    return [renew_mean(one, cast, mean_amax(one, cast, share), share, bound, key)
            for one, cast, key in zip(kept, votes, keys, strict=True)]


def factors_of(amax: Tensor, share: float, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean's new scales, 65536 over each of them, in which `quantize` counts, and what makes moves of B."""
    share, rest = shares_of(share)
    scale = amax[:-2] * PER_LARGEST
    inverse = torch.where(scale > LEAST, 65536.0 / scale, 0.0)
    most = amax[-2] * share + amax[-1] * rest  # no |B| is more
    return scale, inverse, torch.where(most > LEAST, bound / most, 0.0)


def _quantized(mean: Tensor, inverse: Tensor, key: NoiseKey) -> Tensor:  # (rows, columns) int8
    """The rows draw what they would draw in the whole matrix, where two of them share a number."""
    columns = mean.shape[1]
    first_row = key.first // max(columns, 1)
    odd, key = first_row % 2, replace(key, first=first_row // 2 * columns)
    if odd:
        mean = torch.cat([mean.new_zeros(1, columns), mean])
    return quantize(mean, inverse, LARGEST, key).q[odd:]


def shares_of(share: float) -> tuple[float, float]:
    """What the mean and what the votes are multiplied by, as float32 holds them: the same on all devices."""
    both = torch.tensor([share, 1.0 - share], dtype=torch.float32).tolist()
    return both[0], both[1]
