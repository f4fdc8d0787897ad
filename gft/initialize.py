"""Where integer weights start: the levels nearest to float weights, a Gaussian's, or the paper's 90 % zeros.

The float weight is scale · level. One scale serves the whole weight ("tensor"), each row ("row"), or each group of so many
columns of a row (64, 128, …): the finer, the closer levels come to float weights. Scales of rows and groups are float16, as
the formats of inference runtimes keep them, unless they are too small or too large for it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gft.errors import UsageError, UsageTypeError, shortened
from gft.storage import check_bits, largest_level

# The spacing a of the 2I+1 levels that loses least (mean square) of a standard Gaussian; the tests recompute it.
SPACING = {2: 1.2240, 3: 0.6508, 4: 0.3534, 5: 0.1932, 6: 0.1055, 7: 0.0573, 8: 0.0309}

# The edge of a layer's grid lies at this over sqrt(fan_in) at least. It is where torch's own start of nn.Linear puts it at
# 2 bits. Starts that are smaller (GPT's 0.02, less still where it adds to the residual stream, or zeros) are meant to grow,
# and an integer weight cannot outgrow its grid.
LEAST_EDGE = 0.7
COARSEST = 4.0  # but never so far apart, in std, that next to no level but 0 is left: beyond 2 std lie 5 % of a Gaussian


FITS_TRIED, FITS_SOLVED = 25, 3  # scales tried by `fitted_scale`, and rounds of least squares after


def groups_a_row(scales: str | int, columns: int) -> int | None:
    """How many scales a row of `columns` weights has; None: one for all rows together."""
    if scales == "tensor":
        return None
    if scales == "row":
        return 1
    if isinstance(scales, bool) or not isinstance(scales, int) or scales < 1:
        raise UsageError(f'scales={shortened(scales)}: choose "tensor", "row", or how many weights of a row share a scale, '
                         "as 64")
    if columns % scales:
        raise UsageError(f'scales={scales} does not divide a row of {columns} weights; choose scales="row", a number that '
                         "does, or leave this layer out with filter_fn")
    return columns // scales


def kept_scale(scale: Tensor) -> Tensor:
    """Scales as they are kept: one as float32, several as float16 if all of them are normal numbers there."""
    if scale.dim() == 0:
        return scale.float()
    limits = torch.finfo(torch.float16)
    small = bool(((scale >= limits.tiny) & (scale <= limits.max)).all())
    return scale.to(torch.float16 if small else torch.float32)


def scale_for(std: Tensor,  # scalar, or (rows, groups)
              fan_in: int, bits: int) -> Tensor:
    """The scale that suits weights of a deviation: a(bits) · std, but with room to grow (LEAST_EDGE)."""
    room = LEAST_EDGE / (largest_level(check_bits(bits)) * fan_in**0.5)
    return torch.where(std > 0, torch.maximum(SPACING[bits] * std, (COARSEST * std).clamp_max(room)), room)


def scale_of(weight: Tensor,  # (out, in, ...)
             bits: int,
             scales: str | int = "tensor") -> Tensor:  # scalar, or (out, groups)
    """The scale that suits float weights: `scale_for` their own deviation, so a model's own start, or a pre-trained model's
    weights, carry over and the variance of what flows through the layer with them."""
    weight = checked(weight)
    # The mean square, not the deviation from the mean: a layer's offset is part of what it computes.
    grouped = _grouped(weight, scales)
    std = grouped.square().mean(-1).sqrt() if grouped.numel() else grouped.new_zeros(grouped.shape[:-1])
    return kept_scale(scale_for(std, max(weight[0].numel(), 1) if len(weight) else 1, bits))


def fitted_scale(weight: Tensor,  # (out, in, ...)
                 bits: int,
                 scales: str | int = "tensor") -> Tensor:  # scalar, or (out, groups)
    """The scale that loses least (mean square) of these very weights, for those that are trained already: `scale_of` leaves
    small starts room to grow, and takes weights for a Gaussian's. The best of many, then least squares: scale = <weight,
    levels> / <levels, levels>, levels = round(weight / scale)."""
    grouped, largest = _grouped(checked(weight), scales), largest_level(bits)
    if not grouped.numel():
        return scale_of(weight, bits, scales)
    start = SPACING[bits] * grouped.square().mean(-1).sqrt()
    start = torch.where(start > 0, start, torch.ones_like(start))

    def levels(scale: Tensor) -> Tensor:
        return (grouped / scale[..., None]).round_().clamp_(-largest, largest)

    def loss(scale: Tensor) -> Tensor:
        return (levels(scale) * scale[..., None] - grouped).square_().sum(-1)

    best, least = start, loss(start)
    for factor in torch.linspace(0.4, 2.4, FITS_TRIED).tolist():
        tried = start * factor
        lost = loss(tried)
        best, least = torch.where(lost < least, tried, best), torch.minimum(lost, least)
    for _ in range(FITS_SOLVED):
        chosen = levels(best)
        square = chosen.square().sum(-1)
        best = torch.where(square > 0, (grouped * chosen).sum(-1) / square.clamp_min(1), best)
    return kept_scale(best)


def _grouped(weight: Tensor, scales: str | int) -> Tensor:  # (weights,) or (rows, groups, group)
    """The weights that share a scale, along the last axis."""
    columns = weight[0].numel() if len(weight) else 1
    groups = groups_a_row(scales, columns)
    return weight.reshape(-1) if groups is None else weight.reshape(len(weight), groups, columns // groups)


def in_levels(weight: Tensor,  # (rows, columns) float32
              scale: Tensor) -> Tensor:  # scalar, or (rows, groups)
    """weight / scale, before it is rounded."""
    if scale.dim() == 0:
        return weight / scale
    grouped = weight.reshape(*scale.shape, -1) if weight.numel() else weight[..., None]
    return (grouped / scale.float()[..., None]).reshape(weight.shape)


def checked(weight: Tensor) -> Tensor:
    """Float weights as float32; raises for what levels cannot be taken from."""
    if not torch.is_floating_point(weight):
        raise UsageTypeError(f"levels are taken from float weights, not from {weight.dtype}")
    if weight.is_meta:
        raise UsageError("the weight to quantize is on the meta device; give the model its values first")
    weight = weight.detach().float()
    if not bool(torch.isfinite(weight).all()):
        raise UsageError("the weight to quantize holds NaN or inf; load or initialise the model first")
    return weight


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
