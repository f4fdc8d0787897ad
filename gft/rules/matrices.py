"""What rules do with the votes of whole layers, several of one shape at a time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gft import ops

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of a Newton-Schulz round
ROUNDS = 5
ONE = 1 << 20  # beta's unit: no entry of it exceeds 2, and most are near 1/sqrt(out · in)
BOUND = 2 * ONE  # no |beta| is larger
AT_ONCE = 1 << 24  # numbers a product takes together, and so an optimizer's step of them
TINY = 1e-30


def alike(votes: Sequence[Tensor]) -> Iterator[list[int]]:
    """The numbers of layers of one shape, as many together as a product takes."""
    shapes: dict[tuple[torch.device, torch.dtype, torch.Size], list[int]] = defaultdict(list)
    for number, one in enumerate(votes):
        shapes[one.device, one.dtype, one.shape].append(number)
    for (_, _, shape), numbers in shapes.items():
        together = max(1, AT_ONCE // max(1, shape.numel()))
        yield from (numbers[start : start + together] for start in range(0, len(numbers), together))


def lengths(x: Tensor) -> Tensor:  # (layers, out, in) -> (layers, 1, 1) float32
    """The root of the sum of squares."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32).clamp_min(TINY)


def of_length_one(x: Tensor) -> Tensor:  # (layers, out, in)
    return x / lengths(x).to(x.dtype)


def evened(votes: Tensor) -> Tensor:  # (layers, out, in)
    """Rows and columns of equal size, and in all of length one."""
    votes = votes / votes.abs().amax((1, 2), keepdim=True).clamp_min(1.0)  # whose squares are numbers
    squares = votes * votes
    row, column = (squares.mean(axis, keepdim=True).clamp_min(TINY).rsqrt() for axis in (2, 1))
    return of_length_one(votes * row * column)


def in_ones(beta: Tensor) -> Tensor:  # (layers, out, in) float32 -> the same, int32
    """In units of 1/ONE."""
    return ops.in_units(beta, beta.new_full((len(beta),), ONE))


def newton_schulz(x: Tensor) -> Tensor:
    """(…, out, in) -> the same singular vectors with singular values of 0.7 to 1.2, all but the least of them."""
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT).mT
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def newton_schulz_multiply_adds(out: int, features: int) -> int:
    """ROUNDS times three products, all of them with the smaller side."""
    small, large = sorted((out, features))
    return ROUNDS * (2 * small**2 * large + small**3)
