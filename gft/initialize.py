"""Where integer weights start: the levels nearest to float weights, a Gaussian's, or the paper's 90 % zeros."""

from collections.abc import Callable

import torch
from torch import Tensor

from gft.errors import UsageError, UsageTypeError
from gft.storage import check_bits, largest_level

# The spacing a of the 2I+1 levels that loses least (mean square) of a standard Gaussian; the tests recompute it.
SPACING = {2: 1.2240, 3: 0.6508, 4: 0.3534, 5: 0.1932, 6: 0.1055, 7: 0.0573, 8: 0.0309}

# The edge of a layer's grid lies at this over sqrt(fan_in) at least. It is where torch's own start of nn.Linear puts it at
# 2 bits. Starts that are smaller (GPT's 0.02, less still where it adds to the residual stream, or zeros) are meant to grow,
# and an integer weight cannot outgrow its grid.
LEAST_EDGE = 0.7
COARSEST = 4.0  # but never so far apart, in std, that next to no level but 0 is left: beyond 2 std lie 5 % of a Gaussian


def scale_for(std: Tensor,  # scalar
              fan_in: int, bits: int) -> Tensor:
    """The scale that suits weights of a deviation: a(bits) · std, but with room to grow (LEAST_EDGE)."""
    room = LEAST_EDGE / (largest_level(check_bits(bits)) * fan_in**0.5)
    return torch.where(std > 0, torch.maximum(SPACING[bits] * std, (COARSEST * std).clamp_max(room)), room)


def scale_of(weight: Tensor,  # (out, in, ...)
             bits: int) -> Tensor:
    """The scale that suits float weights: `scale_for` their own deviation, so a model's own start, or a pre-trained model's
    weights, carry over and the variance of what flows through the layer with them."""
    if not torch.is_floating_point(weight):
        raise UsageTypeError(f"levels are taken from float weights, not from {weight.dtype}")
    if weight.is_meta:
        raise UsageError("the weight to quantize is on the meta device; give the model its values first")
    weight = weight.detach().float()
    if not bool(torch.isfinite(weight).all()):
        raise UsageError("the weight to quantize holds NaN or inf; load or initialise the model first")
    # The mean square, not the deviation from the mean: a layer's offset is part of what it computes.
    std = weight.square().mean().sqrt() if weight.numel() else weight.new_zeros(())
    return scale_for(std, max(weight[0].numel(), 1) if len(weight) else 1, bits)


def levels_of(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Float weights -> (nearest levels, scale)."""
    scale, largest = scale_of(weight, bits), largest_level(bits)
    return (weight.detach().float() / scale).round().clamp(-largest, largest).to(torch.int8), scale


def paper_start(rows: int, columns: int, bits: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """The paper's start: 90 % zeros, 10 % ±1. The forward weight is level / I over sqrt(fan_in) (its
    "multiplications by 3 and 7"), so that a full level passes variance on."""
    drawn = torch.randint(0, 20, (rows, columns), device=device)
    levels = (drawn == 0).to(torch.int8) - (drawn == 1).to(torch.int8)
    scale = torch.tensor(1.0 / (largest_level(bits) * max(columns, 1) ** 0.5), device=device)
    return levels, scale


def variance_start(rows: int, columns: int, bits: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """A fresh layer's start: the levels of a Gaussian of standard deviation 1/sqrt(fan_in)."""
    return levels_of(torch.randn(rows, columns, device=device) / max(columns, 1) ** 0.5, bits)


STARTS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"variance": variance_start, "paper": paper_start}
