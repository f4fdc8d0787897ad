"""Orthogonalized votes: all singular values of a layer's votes made equal, as Muon does with a gradient.

The votes of a layer are a matrix, V = sum over tokens of q(grad_output) q(x)^T, of shape (out, in). A few directions of it,
in which tokens agree or x is simply large, outweigh all others together. In

    V = U · diag(s) · W^T          O = U · W^T

O has the directions of V, each as large as any other. What moves the weights is half of each:

    beta = V / |V| + O / |O|        |·|: the root of the sum of squares

O alone serves weights with memory as well; packed ones, which nothing averages, then follow too much of what is noise
(docs/lab-notes, 2026-11-17). Votes averaged by momentum (momentum.py) are moved by O alone.

O is found as Muon does (Jordan et al. 2024), without a decomposition: X <- a·X + b·(X X^T)·X + c·(X X^T)²·X leaves U and W
as they are and takes each singular value s to a·s + b·s³ + c·s⁵. Five rounds from X = V / |V| bring all but the least of
them to between 0.7 and 1.2. What that takes (`newton_schulz_multiply_adds`) is little beside the votes themselves where
tokens are many times the width, out of all proportion for wide layers and small batches.

The products are floats, rounded to integers once in the end: another device, or another number of threads, may not give
the same bits. So of several ranks each orthogonalizes some of the layers for all (distributed.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gft import ops
from gft.rules.matrices import ONE, alike, in_ones, lengths, newton_schulz, of_length_one


def orthogonalized(votes: Sequence[Tensor],  # each (out, in)
                   alone: bool = False) -> list[Tensor]:  # each (out, in) int32, none beyond BOUND
    """Half of each layer's votes as cast, half with all singular values equal, or these alone, in units of 1/ONE; layers of
    one shape share their products."""
    results: dict[int, Tensor] = {}
    for numbers in alike(votes):
        some = [votes[number] for number in numbers]
        results.update(zip(numbers, _alone(some) if alone else _with_votes(some), strict=True))
    return [results[number] for number in range(len(votes))]


def _with_votes(votes: Sequence[Tensor]) -> Tensor:  # (layers, out, in) int32
    unit = of_length_one(ops.as_floats(votes, torch.float32))
    return in_ones(unit + of_length_one(orthogonal(unit).float()))


def _alone(moves: Sequence[Tensor]) -> Tensor:  # none beyond BOUND -> (layers, out, in) int32
    """With few passes over a GPU's memory, since a running mean's step is near its bandwidth beside the products."""
    x = ops.as_floats(moves, torch.bfloat16 if moves[0].is_cuda else torch.float32)
    x = newton_schulz(of_length_one(x))
    return ops.in_units(x, ONE / lengths(x).flatten())


def orthogonal(x: Tensor) -> Tensor:  # (layers, out, in), each of length one -> nearly U · W^T
    """Newton-Schulz iterations: the matrices with all singular values near 1."""
    return newton_schulz(x.to(torch.bfloat16) if x.is_cuda else x)
