"""Spectral clipping: a move whose parts all point one way is taken smaller.

A layer's moves are measured weight by weight, but what they do to its output is their largest singular value. That of moves
of rms 1 that are noise, as most of a small batch's votes are, is

    sqrt(out) + sqrt(in)        (Bai and Yin)

Votes that agree, as most do in the first steps of a training, make moves of rank one, of singular value sqrt(out · in): a
step that is small for every weight is large for the output. So each layer's move is multiplied by

    share = min(1, limit · (sqrt(out) + sqrt(in)) / s)        s: the largest singular value of u, of rms 1

as muP's spectral condition has it (Yang, Simon and Bernstein 2023), measured and not assumed from the width. u are the votes
with rows and columns of equal size (rules/rounding.py), by this step's own votes, without the clipping at 4 rms.

s is found by power iteration from one fixed direction. It may come out too small where the largest singular values are close
together; there they are no larger than a random matrix's, or the share is near 1 anyway.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gft.rules.matrices import TINY, alike, evened, of_length_one

ROUNDS = 6  # of power iteration: within a few percent of s where it counts


def shares(votes: Sequence[Tensor],  # each (out, in), of any integer type
           limit: float) -> list[Tensor]:  # each a float32 number on the votes' device
    """By which each layer's move is to be multiplied; layers of one shape share their products."""
    results: dict[int, Tensor] = {}
    for numbers in alike(votes):
        rows, columns = votes[numbers[0]].shape
        if not rows * columns:
            results |= {number: torch.ones((), device=votes[number].device) for number in numbers}
            continue
        norms = relative_norms(torch.stack([votes[number] for number in numbers]).float())
        room = limit * (rows**0.5 + columns**0.5)
        results.update(zip(numbers, (room / norms.clamp_min(TINY)).clamp_max(1.0), strict=True))
    return [results[number] for number in range(len(votes))]


def relative_norms(votes: Tensor) -> Tensor:  # (layers, out, in) -> (layers,)
    """The largest singular value of u over its rms."""
    unit = evened(votes)
    direction = start(votes.shape[2], votes.device).expand(len(votes), -1)[..., None]
    for _ in range(ROUNDS):
        direction = of_length_one(unit.mT @ (unit @ direction))
    seen = torch.linalg.vector_norm(unit @ direction, dim=(1, 2))
    return seen * unit[0].numel() ** 0.5  # the rms of a matrix of length one


def multiply_adds(out: int, features: int) -> int:
    """Multiplications that one layer takes in a step."""
    return (2 * ROUNDS + 1) * out * features


@cache
def start(columns: int, device: torch.device) -> Tensor:
    """A direction that has a part of every other, the same each time."""
    direction = torch.randn(columns, generator=torch.Generator().manual_seed(columns))
    return (direction / direction.norm()).to(device)
