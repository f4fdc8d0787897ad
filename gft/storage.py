"""How an integer weight is kept: `Storage`, everything that says what the bytes of a weight mean.

A weight of `bits` bits is one of the 2I+1 levels -I..I with I = 2^(bits-1) - 1 (paper, Section 4): ternary at 2 bits, -7..7
at 4. It is stored in one of two forms:

    packed   uint8 (rows, bytes): levels + I in fields of 2, 4 or 8 bits, several a byte;
             bits the level does not need (one at 3 bits; two at 2 bits where fields of 4
             are asked for) count fractions of a level                                       0.25 / 0.5 / 1 B a weight
    memory   int8  (rows, columns): the level in the high bits; in the 8 - bits low bits how
             far votes have carried the weight away from it                                  1 B a weight

Both are read and written as `values`, int8 numbers value = level · 2^m + rest with m low bits and
-2^(m-1) <= rest < 2^(m-1). What the rest means is the encoding:

    inertia      the weight is at z = level + rest / 2^(m-1), up to a whole level away: the level may lag behind (rules/)
    no inertia   the weight is at z = value / 2^m, and its level is simply the nearest; twice as fine
    spare bits   (packed) the weight is at (value + 1/2) / 2^m, and its level is the nearest

The forward pass multiplies by the level alone, floor(value / 2^m + 1/2) in every encoding, and by a fixed float `scale`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gft.errors import UsageError, UsageTypeError, shortened

MIN_BITS, MAX_BITS = 2, 8
HALF = "half"  # memory=HALF: half a byte a weight
ENCODING = 2  # version of what `Storage.code` writes


def check_bits(bits: int) -> int:
    """`bits`, or an error that says which numbers of bits there are."""
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise UsageTypeError(f"bits={shortened(bits)}: give an integer from {MIN_BITS} to {MAX_BITS}")
    if not MIN_BITS <= bits <= MAX_BITS:
        raise UsageError(f"bits={shortened(bits)}: a symmetric grid needs {MIN_BITS} to {MAX_BITS} bits")
    return bits


def largest_level(bits: int) -> int:
    """I of the paper: the levels are -I..I."""
    return 2 ** (check_bits(bits) - 1) - 1


def field_bits(bits: int) -> int:
    """Width of one packed level: 2 bits four a byte, 3 and 4 bits two a byte, more than that one a byte."""
    return 2 if bits <= 2 else 4 if bits <= 4 else 8


@dataclass(frozen=True)
class Storage:
    """How the bytes of a weight are read: saved with the weight, and all that a kernel needs to know of it.

    bits: 2 to 8; a weight has 2^bits - 1 levels.
    memory: True: one byte a weight, whose low bits hold votes not yet spent. False: levels packed side by side.
    half: Packed in half a byte also at 2 bits, which could do with a quarter: the two bits to spare count quarters of a
        level.
    inertia: True: the rest of a byte reaches a whole level either way, so that a level can lag behind it. Only where there
        is memory of two bits or more; set by the optimizer's rule.
    """

    bits: int
    memory: bool = True
    inertia: bool = True
    half: bool = False

    def __post_init__(self) -> None:
        check_bits(self.bits)
        object.__setattr__(self, "half", self.half and not self.memory and field_bits(self.bits) < 4)
        object.__setattr__(self, "inertia", self.inertia and self.memory_bits > 0)

    @staticmethod
    def as_asked(bits: int, memory: bool | str) -> "Storage":
        """How a new layer keeps its weight: `memory` as gft.quantize_ takes it. At 3 and 4 bits "half" is what False
        is."""
        if memory not in (True, False, HALF):
            raise UsageError(f"memory={shortened(memory)}: choose True, False or {HALF!r}")
        if memory == HALF and field_bits(check_bits(bits)) > 4:
            raise UsageError(f'memory="{HALF}" keeps a weight in half a byte, which is too little for {bits} bits; choose '
                             "at most 4 bits, or memory=False")
        return Storage(bits, memory != HALF and bool(memory), half=memory == HALF)

    # ------------------------------------------------------------------ derived numbers

    @property
    def largest(self) -> int:
        """I: the levels are -I..I."""
        return (1 << self.bits - 1) - 1

    @property
    def memory_bits(self) -> int:
        """Low bits of a byte that hold unspent votes. One bit would hold no more than a sign, so levels of 7 bits and more
        have none."""
        return 8 - self.bits if self.memory and self.bits <= 6 else 0

    @property
    def field_bits(self) -> int:
        """Width of a packed field; 8 with memory."""
        return 8 if self.memory else 4 if self.half else field_bits(self.bits)

    @property
    def spare_bits(self) -> int:
        """Bits of a packed field that its level does not need: 1 at 3 bits, 3 to 1 at 5 to 7; 2 at 2 bits in half a byte."""
        return 0 if self.memory else self.field_bits - self.bits

    @property
    def low_bits(self) -> int:
        """Bits below the level, of either kind."""
        return self.memory_bits or self.spare_bits

    @property
    def unit(self) -> int:
        """How far apart the stored values of two levels are."""
        return 1 << self.low_bits

    @property
    def resolution(self) -> int:
        """A move is counted in 1/resolution of a level."""
        return self.unit // 2 if self.inertia else self.unit

    @property
    def limit(self) -> int:
        """The largest stored value: I levels; with spare bits also what rounds to them."""
        return self.largest * self.unit + max((1 << self.spare_bits) // 2 - 1, 0)

    @property
    def lowest(self) -> int:
        """The lowest stored value. With spare bits a value stands for what lies between it and the next: -1 is as far below
        the middle of level 0 as 0 is above it, and values reach one farther down than up."""
        return -self.limit - min(self.spare_bits, 1)

    @property
    def asked_for(self) -> bool | str:
        """What gft.quantize_ has to be told as `memory` for this storage."""
        return HALF if self.half else self.memory

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.memory else torch.uint8

    def holds(self, stored: Tensor, older: bool = False) -> bool:
        """Can all these bytes be weights of this storage? Older: of a time when packed levels left spare bits unused."""
        if self.memory:
            return bool((stored >= self.lowest).all()) and bool((stored <= self.limit).all())
        mask, most = (1 << self.field_bits) - 1, 2 * self.largest if older else self.limit - self.lowest
        return all(bool((stored >> shift & mask <= most).all()) for shift in range(0, 8, self.field_bits))

    def bytes_per_row(self, columns: int) -> int:
        """Bytes a row of `columns` weights takes. Rows start on a byte of their own."""
        return -(-columns * self.field_bits // 8)

    # ------------------------------------------------------------------ in and out

    def values(self, stored: Tensor, columns: int) -> Tensor:
        """What the parameter holds, or some rows of it -> (rows, columns) int8 values."""
        return stored if self.memory else unpack_fields(stored, self.field_bits, -self.lowest, columns)

    def from_values(self, values: Tensor) -> Tensor:
        """The inverse of `values`."""
        return values if self.memory else pack_fields(values, self.field_bits, -self.lowest)

    def value_levels(self, values: Tensor) -> Tensor:
        """The levels of stored values, whatever else they hold: floor(value / 2^m + 1/2)."""
        return (values + self.unit // 2) >> self.low_bits if self.low_bits else values

    def levels(self, stored: Tensor, columns: int) -> Tensor:
        """(rows, columns) int8 levels, as the forward pass uses them."""
        return self.value_levels(self.values(stored, columns))

    def exported_levels(self, stored: Tensor, columns: int) -> Tensor:
        """`levels` as an exported graph reads them: nothing is written in place, and every operation is one that ONNX and
        its runtimes have for these types, which leaves shifts out. float32 holds all of it exactly."""
        width = self.field_bits
        if width == 8:
            values = stored.float()
        else:
            fields = [(stored & (2**width - 1 << shift)).float() / 2**shift for shift in range(0, 8, width)]
            values = torch.stack(fields, -1).flatten(-2)[..., :columns]
        if not self.memory:
            values = values + self.lowest
        if self.low_bits:
            values = (values / self.unit + 0.5).floor()
        return values.to(torch.int8)

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
        positions = positions.clamp(-self.largest, self.largest)
        if not self.memory_bits:
            return self.from_values(positions.round().to(torch.int8))
        if not self.inertia:
            return (positions * self.unit).round().to(torch.int8)
        levels = positions.round()
        return (levels * self.unit + ((positions - levels) * self.resolution).round()).to(torch.int8)

    def converted(self, stored: Tensor, other: "Storage") -> Tensor:
        """`stored` in the encoding of `other`, which differs in `inertia` only: the weight stays where votes have carried
        it. To inertia it is rounded to half of the resolution; from inertia a level that lagged behind follows."""
        if replace(self, inertia=False) != replace(other, inertia=False):
            raise UsageError(f"{self} cannot be read as {other}: only the encoding of the memory can change")
        if self.inertia == other.inertia:
            return stored
        levels = self.value_levels(stored)
        rest = (stored - levels * self.unit).to(torch.float32)
        rest = rest * 2 if self.inertia else (rest / 2).round()  # half to even: no drift
        return (levels * self.unit + rest).clamp(self.lowest, self.limit).to(torch.int8)

    # ------------------------------------------------------------------ saved with the weight

    @property
    def code(self) -> list[int]:
        """Four numbers for a state_dict, so that 2-bit numbers are never read as 4-bit ones."""
        return [ENCODING, self.bits, 2 if self.half else int(self.memory), int(self.inertia)]

    @staticmethod
    def from_code(code: list[int] | None) -> "Storage":
        """The inverse of `code`. Older files have [bits, memory] or [bits, 0, spare bits], always with inertia."""
        if code is None or not all(type(number) is int for number in code):
            raise UsageError("the weight is not said how to be read: its _extra_state is no row of a few whole numbers")
        if len(code) == 4 and code[0] == ENCODING:
            return Storage(code[1], code[2] not in (0, 2), bool(code[3]), half=code[2] == 2)
        if len(code) in (2, 3) and (len(code) == 2 or not code[1]):
            return Storage(code[0], bool(code[1]))
        raise UsageError(f"the weight is stored in a way that this version of gft does not know ({code}); update gft")


# ---------------------------------------------------------------------------------------------------- packing


def pack_fields(numbers: Tensor,  # (..., columns) any integer type
                width: int,
                offset: int) -> Tensor:  # (..., bytes) uint8
    """Store numbers + offset in fields of `width` bits, a byte's lowest first; a short last byte ends in zero bits."""
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
    if width == 8:
        return (packed.to(torch.int16) - offset).to(torch.int8)
    per_byte, mask = 8 // width, 2**width - 1
    numbers = torch.empty(*packed.shape[:-1], packed.shape[-1] * per_byte, dtype=torch.int8, device=packed.device)
    for place in range(per_byte):
        numbers[..., place::per_byte] = ((packed >> (width * place)) & mask).to(torch.int8) - offset
    return numbers[..., :columns]
