"""x and grad_output as small integers (paper, Section 4.1): stochastic rounding on a scale per feature, or the sign."""

from typing import NamedTuple

import torch
from torch import Tensor

from gft.ops.operation import operation
from gft.philox import NoiseKey, noise8

LARGEST_SQUARED = 1e15  # beyond it a value counts as this much in the mean square, which must fit float32


class Quantized(NamedTuple):
    """What one pass over x or grad_output gives."""

    q: Tensor  # (n, features) int8
    squares: Tensor | None  # (runs, features) float32, summed over runs of tokens; None for signs, which have no scale


class MeanSquare(NamedTuple):
    """Sums of squares on their way to a mean by feature."""

    squares: Tensor  # (runs, features) float32
    tokens: int  # that they were summed over
    mean: Tensor  # (features,) float32, where it goes
    add: bool  # to what is there, or in its place


@operation
def quantize(values: Tensor,  # (n, features) float
             factors: Tensor | None,  # (features,) float32: one unit of a feature, in 1/65536 of q; None: q is the sign
             largest: int,  # the largest |q|
             key: NoiseKey,
             not_finite: Tensor | None = None) -> Quantized:  # int64 scalar that counts what is NaN or inf
    """Round values to -largest..largest without bias. What is NaN or inf becomes 0: it casts no vote."""
    finite = torch.isfinite(values)
    if not_finite is not None:
        not_finite += (~finite).sum()
    kept = torch.where(finite, values, 0)
    if factors is None:
        return Quantized(kept.sign().to(torch.int8), None)
    top = largest * 65536
    # Fixed point with 16 fraction bits: one rounding of one product, then integers only (no add a GPU could fuse).
    fixed = (kept.float() * factors).clamp_(-top, top).to(torch.int32)
    rows, columns = values.shape
    noise = noise8(rows, columns, key, values.device).mul_(256).add_(128)  # the middle of what 8 bits stand for: unbiased
    # On a CPU in float64, as the C twin has it: rounded once, whatever the order.
    squares = _squares(values, torch.float64 if values.device.type == "cpu" else torch.float32)
    return Quantized(fixed.add_(noise).bitwise_right_shift_(16).to(torch.int8), squares.sum(0, keepdim=True).float())


@operation
def take_mean(squares: Tensor, tokens: int, mean: Tensor, add: bool) -> None:
    """What a MeanSquare says, in place."""
    new = squares.sum(0) / max(tokens, 1)
    mean.copy_(mean + new if add else new)


def mean_square(values: Tensor) -> Tensor:  # (n, features) -> (features,) float32
    """Mean square of each feature over what is finite; 0 of no values at all."""
    return _squares(values).sum(0) / max(len(values), 1)


def _squares(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    kept = torch.where(torch.isfinite(values), values, 0).float().clamp_(-LARGEST_SQUARED, LARGEST_SQUARED)
    return kept.to(dtype).square_()
