"""The integer grid a weight lives on, and how it is stored.

A weight of `bits` bits is one of the 2I+1 levels -I..I with I = 2^(bits-1) - 1 (paper, Section 4): ternary at
2 bits, -7..7 at 4. It is stored in one of two forms, and the dtype says which:

    packed   uint8 (rows, bytes): levels + I in fields of 2, 4 or 8 bits, several a byte; a
             bit the level does not need (one at 3 bits) counts fractions of a level         0.25 / 0.5 / 1 B a weight
    memory   int8  (rows, columns): the level in the high bits; in the 8 - bits low bits how
             far votes have carried the weight away from it, up to one level either way      1 B a weight

Both are read and written as `values`, int8 numbers. With m low bits, value = level · 2^m + rest, -2^(m-1) <= rest <
2^(m-1), and the votes have carried the weight to level + rest / 2^(m-1). The forward pass multiplies by the level alone,
`values_to_levels(values, m)`, and a fixed float `scale`. Packed values with m spare bits are of the same kind, but the
weight is at (value + 1/2) / 2^m: its level is simply the nearest.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gft import kernels

MIN_BITS, MAX_BITS = 2, 8

# The spacing a of the 2I+1 levels that loses least (mean square) of a standard Gaussian; the tests recompute it.
SPACING = {2: 1.2240, 3: 0.6508, 4: 0.3534, 5: 0.1932, 6: 0.1055, 7: 0.0573, 8: 0.0309}


def check_bits(bits: int) -> int:
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise TypeError(f"bits={bits!r}: give an integer from {MIN_BITS} to {MAX_BITS}")
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"bits={bits}: a symmetric grid needs {MIN_BITS} to {MAX_BITS} bits")
    return bits


def largest_level(bits: int) -> int:
    """I of the paper: the grid is -I..I."""
    return 2 ** (check_bits(bits) - 1) - 1


# ---------------------------------------------------------------------------------------------------- packing


def field_bits(bits: int) -> int:
    """Width of one packed level: 2 bits four a byte, 3 and 4 bits two a byte, more than that one a byte."""
    return 2 if bits <= 2 else 4 if bits <= 4 else 8


def packed_columns(columns: int, bits: int) -> int:
    """Bytes a row of `columns` levels takes. Rows start on a byte of their own."""
    per_byte = 8 // field_bits(bits)
    return -(-columns // per_byte)


def pack(levels: Tensor,  # (..., columns) any integer type, each in -I..I
         bits: int) -> Tensor:  # (..., packed_columns) uint8
    """Store levels + I, the first level of a byte in its lowest bits; a short last byte is filled with zero bits."""
    return pack_fields(levels, field_bits(bits), largest_level(bits))


def unpack(packed: Tensor,  # (..., packed_columns) uint8
           bits: int,
           columns: int) -> Tensor:  # (..., columns) int8
    """The inverse of `pack`."""
    return unpack_fields(packed, field_bits(bits), largest_level(bits), columns)


def pack_fields(numbers: Tensor,  # (..., columns) any integer type
                width: int,
                offset: int) -> Tensor:  # (..., bytes) uint8
    """Store numbers + offset in fields of `width` bits."""
    if numbers.is_cuda and numbers.dim() == 2 and numbers.dtype is torch.int8 and (kernel := kernels.twin_of(numbers)):
        return kernel.pack(numbers, width, offset)
    codes = (numbers.to(torch.int16) + offset).to(torch.uint8)
    if width == 8:
        return codes.contiguous()
    per_byte = 8 // width
    missing = -numbers.shape[-1] % per_byte
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    # Strided views rather than a reshape to (..., bytes, per_byte): elementwise on views is several times faster.
    packed = codes[..., 0::per_byte].clone()
    for place in range(1, per_byte):
        packed |= codes[..., place::per_byte] << (width * place)
    return packed


def unpack_fields(packed: Tensor,  # (..., bytes) uint8
                  width: int,
                  offset: int,
                  columns: int) -> Tensor:  # (..., columns) int8
    """The inverse of `pack_fields`."""
    if packed.is_cuda and packed.dim() == 2 and (kernel := kernels.twin_of(packed)):
        return kernel.float_levels(packed, columns, torch.int8, packed_width=width, top_level=offset, memory_bits=0)
    if width == 8:
        return (packed.to(torch.int16) - offset).to(torch.int8)
    per_byte, mask = 8 // width, 2**width - 1
    numbers = torch.empty(*packed.shape[:-1], packed.shape[-1] * per_byte, dtype=torch.int8, device=packed.device)
    for place in range(per_byte):
        numbers[..., place::per_byte] = ((packed >> (width * place)) & mask).to(torch.int8) - offset
    return numbers[..., :columns]


def values_to_levels(values: Tensor,  # int8
                     memory_bits: int) -> Tensor:  # int8
    """The level of a stored value: floor(value / 2^m + 1/2)."""
    if memory_bits == 0:
        return values
    return (values + (1 << (memory_bits - 1))) >> memory_bits


# ---------------------------------------------------------------------------------------------------- one stored matrix


@dataclass(frozen=True)
class Grid:
    """How one weight matrix of shape (rows, columns) is kept: its width, its form, and the way in and out."""

    bits: int
    rows: int
    columns: int
    memory: bool

    @property
    def memory_bits(self) -> int:
        """m. One bit would hold no more than a sign, so levels of 7 bits and more have none."""
        return 8 - self.bits if self.memory and self.bits <= 6 else 0

    @property
    def spare_bits(self) -> int:
        """Bits of a packed field that its level does not need: 1 at 3 bits, 3 to 1 at 5 to 7."""
        return 0 if self.memory else field_bits(self.bits) - self.bits

    @property
    def unit(self) -> int:
        """How far apart the stored values of two levels are."""
        return 1 << (self.memory_bits or self.spare_bits)

    def resolution(self, waits: bool) -> int:
        """A move is counted in 1/resolution of a level. What is kept beside a level reaches half of one either way; where
        levels wait before they follow, memory must hold a whole one."""
        return max(self.unit // 2, 1) if self.memory and waits else self.unit

    @property
    def limit(self) -> int:
        """The largest stored value: I levels; with spare bits also what rounds to them."""
        return largest_level(self.bits) * self.unit + max((1 << self.spare_bits) // 2 - 1, 0)

    @property
    def lowest(self) -> int:
        """The lowest stored value. With spare bits a value stands for what lies between it and the next: -1 is as far below
        the middle of level 0 as 0 is above it, and values reach one farther down than up."""
        return -self.limit - min(self.spare_bits, 1)

    @property
    def form(self) -> dict[str, int]:
        """How the matrix is stored, in the words of the kernels."""
        return {"packed_width": 0 if self.memory else field_bits(self.bits), "top_level": largest_level(self.bits),
                "memory_bits": self.memory_bits, "spare_bits": self.spare_bits}

    def store(self, levels: Tensor) -> Tensor:
        """(rows, columns) levels -> what the parameter holds, with nothing remembered: spare bits are just above or just
        below the middle of the level, as on a chessboard."""
        values = levels * self.unit
        if self.spare_bits:
            row, column = (torch.arange(size, device=levels.device) for size in values.shape)
            values = values - (row[:, None] + column) % 2
        return self.from_values(values.to(torch.int8))

    def store_nearest(self, positions: Tensor) -> Tensor:
        """(rows, columns) floats, in levels -> the nearest levels, and what they leave over where there is room for it."""
        if self.spare_bits:
            values = (positions * self.unit).floor().clamp(self.lowest, self.limit)
            return self.from_values(values.to(torch.int8))
        largest = largest_level(self.bits)
        positions = positions.clamp(-largest, largest)
        levels = positions.round()
        rest = ((positions - levels) * self.resolution(True)).round() if self.memory_bits else torch.zeros_like(levels)
        return self.from_values((levels * self.unit + rest).to(torch.int8))

    def values(self, stored: Tensor) -> Tensor:
        """What the parameter holds, or some rows of it -> int8 values."""
        return stored if self.memory else unpack_fields(stored, field_bits(self.bits), -self.lowest, self.columns)

    def from_values(self, values: Tensor) -> Tensor:
        return values if self.memory else pack_fields(values, field_bits(self.bits), -self.lowest)

    def value_levels(self, values: Tensor) -> Tensor:
        """The levels of stored values, whatever else they hold."""
        return values_to_levels(values, self.memory_bits or self.spare_bits)

    def levels(self, stored: Tensor) -> Tensor:
        """(rows, columns) int8 levels, as the forward pass uses them."""
        return self.value_levels(self.values(stored))

    def float_levels(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The same as floats, for a product."""
        kernel = kernels.twin_of(stored)
        if kernel is not None and stored.is_cuda:
            return kernel.float_levels(stored, self.columns, dtype, **self.form)
        if kernel is not None and self.memory and dtype is torch.float32:
            return kernel.float_levels(stored, self.memory_bits)
        return self.levels(stored).to(dtype)


# ---------------------------------------------------------------------------------------------------- where weights start


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
        raise TypeError(f"levels are taken from float weights, not from {weight.dtype}")
    if weight.is_meta:
        raise ValueError("the weight to quantize is on the meta device; give the model its values first")
    weight = weight.detach().float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight to quantize holds NaN or inf; load or initialise the model first")
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
