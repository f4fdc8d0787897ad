"""Orthogonalized votes: all singular values of a layer's votes made equal, as Muon does with a gradient.

The votes of a layer are a matrix, V = sum over tokens of q(grad_output) q(x)^T, of shape (out, in). A few directions of it,
in which tokens agree or x is simply large, outweigh all others together. In

    V = U · diag(s) · W^T          O = U · W^T

O has the directions of V, each as large as any other. What moves the weights is half of each:

    beta = V / |V| + O / |O|        |·|: the root of the sum of squares

O alone serves weights with memory as well; packed ones, which nothing averages, then follow too much of what is noise
(docs/lab-notes, 2026-11-17).

O is found as Muon does (Jordan et al. 2024), without a decomposition: X <- a·X + b·(X X^T)·X + c·(X X^T)²·X leaves U and W
as they are and takes each singular value s to a·s + b·s³ + c·s⁵. Five rounds from X = V / |V| bring all but the least of
them to between 0.7 and 1.2. What that takes (`multiply_adds`) is little beside the votes themselves where tokens are many
times the width, out of all proportion for wide layers and small batches.

The products are floats, rounded to integers once in the end: another device, or another number of threads, may not give
the same bits. So of several ranks each orthogonalizes some of the layers for all (distributed.py).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c
ROUNDS = 5
ONE = 1 << 20  # beta's unit: no entry of it exceeds 2, and most are near 1/sqrt(out · in)
BOUND = 2 * ONE  # no |beta| is larger
AT_ONCE = 1 << 25  # numbers a product takes together
TINY = 1e-30


def orthogonalized(votes: Sequence[Tensor]) -> list[Tensor]:  # each (out, in) -> (out, in) int32, none beyond BOUND
    """Half of each layer's votes as cast, half with all singular values equal, in units of 1/ONE; layers of one shape share
    their products."""
    results: dict[int, Tensor] = {}
    for numbers in alike(votes):
        results.update(zip(numbers, _beta(torch.stack([votes[number] for number in numbers])), strict=True))
    return [results[number] for number in range(len(votes))]


def alike(votes: Sequence[Tensor]) -> Iterator[list[int]]:
    """The numbers of layers of one shape, as many together as a product takes."""
    shapes: dict[tuple[torch.device, torch.dtype, torch.Size], list[int]] = defaultdict(list)
    for number, one in enumerate(votes):
        shapes[one.device, one.dtype, one.shape].append(number)
    for (_, _, shape), numbers in shapes.items():
        together = max(1, AT_ONCE // max(1, shape.numel()))
        yield from (numbers[start : start + together] for start in range(0, len(numbers), together))


def _beta(votes: Tensor) -> Tensor:  # (layers, out, in) -> the same, int32
    unit = of_length_one(votes.float())
    return (unit + of_length_one(orthogonal(unit).float())).mul_(ONE).round_().to(torch.int32)


def orthogonal(x: Tensor) -> Tensor:  # (layers, out, in), each of length one -> nearly U · W^T
    """Newton-Schulz iterations: the matrices with all singular values near 1."""
    return newton_schulz(x.to(torch.bfloat16) if x.is_cuda else x)


def newton_schulz(x: Tensor) -> Tensor:
    """The iterations, in the type that x has."""
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT).mT
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def multiply_adds(out: int, features: int) -> int:
    """Multiplications that one layer takes in a step: ROUNDS times three products, all of them with the smaller side."""
    small, large = sorted((out, features))
    return ROUNDS * (2 * small**2 * large + small**3)


def of_length_one(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(TINY)
