"""Packed numbers: stored weights made float for a product, activations packed for backward and unpacked there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.ops import checks
from gft.ops.triton.constants import constants_of
from gft.ops.triton.grids import spread, spread_block
from gft.storage import Storage

ROWS, COLUMNS = 4, 512  # of a program


@triton.jit
def _levels_kernel(stored, levels, factors, rows, columns, bytes_a_row, groups, group, FACTORS: tl.constexpr,
                   PACKED: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, MEMORY_BITS: tl.constexpr,
                   SPARE_BITS: tl.constexpr, INERTIA: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    block = spread_block()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = block * BYTES + tl.arange(0, BYTES)
    inside = (row < rows)[:, None] & (byte < bytes_a_row)[None, :]
    raw = tl.load(stored + row[:, None] * bytes_a_row + byte[None, :], mask=inside, other=0).to(tl.int32)
    if PACKED:
        PER_BYTE: tl.constexpr = 8 // WIDTH
        shift = WIDTH * tl.arange(0, PER_BYTE)[None, None, :]
        field = tl.reshape((raw[:, :, None] >> shift) & ((1 << WIDTH) - 1), (ROWS, BYTES * PER_BYTE))
        level = (field >> SPARE_BITS) - LARGEST
    else:
        PER_BYTE: tl.constexpr = 1
        level = (raw + ((1 << MEMORY_BITS) >> 1)) >> MEMORY_BITS
    column = block * BYTES * PER_BYTE + tl.arange(0, BYTES * PER_BYTE)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    number = level.to(tl.float32)
    if FACTORS == 1:
        number *= tl.load(factors).to(tl.float32)
    elif FACTORS == 2:
        at = row[:, None] * groups + (column // group)[None, :]
        number *= tl.load(factors + at, mask=live, other=0.0).to(tl.float32)
    tl.store(levels + row[:, None] * columns + column[None, :], number.to(levels.dtype.element_ty), mask=live)


@triton.jit
def _placed_levels_kernel(stored, levels, factors, channels, bytes_a_row, groups, group, FACTORS: tl.constexpr,
                          PACKED: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, MEMORY_BITS: tl.constexpr,
                          SPARE_BITS: tl.constexpr, INERTIA: tl.constexpr, PLACES: tl.constexpr, UP_TO: tl.constexpr,
                          CHANNELS: tl.constexpr):
    """(channels, places) of a row -> (places, channels): reads what lies together, turns it round, writes likewise."""
    row = tl.program_id(0).to(tl.int64)
    channel, place = spread_block() * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, UP_TO)
    live = (channel < channels)[:, None] & (place < PLACES)[None, :]
    column = channel[:, None] * PLACES + place[None, :]
    source = stored + row * bytes_a_row
    if PACKED:
        PER_BYTE: tl.constexpr = 8 // WIDTH
        raw = tl.load(source + column // PER_BYTE, mask=live, other=0).to(tl.int32)
        field = (raw >> (WIDTH * (column % PER_BYTE))) & ((1 << WIDTH) - 1)
        level = (field >> SPARE_BITS) - LARGEST
    else:
        raw = tl.load(source + column, mask=live, other=0).to(tl.int32)
        level = (raw + ((1 << MEMORY_BITS) >> 1)) >> MEMORY_BITS
    number = level.to(tl.float32)
    if FACTORS == 1:
        number *= tl.load(factors).to(tl.float32)
    elif FACTORS == 2:
        number *= tl.load(factors + row * groups + column // group, mask=live, other=0.0).to(tl.float32)
    target = levels + row * (channels * PLACES) + place[:, None] * channels + channel[None, :]
    tl.store(target, tl.trans(number.to(levels.dtype.element_ty)), mask=tl.trans(live))


def float_levels(stored: Tensor, storage: Storage, columns: int, dtype: torch.dtype,
                 factors: Tensor | None = None, places: int = 1) -> Tensor:
    """Read a stored weight out as floats, in one pass (levels.float_levels)."""
    checks.check_stored(stored, storage, columns)
    checks.check_level_factors(factors, stored, columns)
    if dtype not in checks.FLOATS:
        return NotImplemented
    if places < 1 or columns % places:
        raise UsageError(f"{columns} columns are not channels of {places} places each")
    if places > 1:
        return _placed(stored, columns, dtype, constants_of(storage), factors, places)
    return _unpacked(stored, columns, dtype, constants_of(storage), factors)


def unpack_fields(packed: Tensor, width: int, offset: int, columns: int) -> Tensor:
    """Unpack a matrix (levels.unpack_fields): as levels of which none has a bit to spare."""
    if packed.dim() != 2 or packed.dtype is not torch.uint8 or width not in (2, 4, 8):
        return NotImplemented
    if packed.shape[1] != triton.cdiv(columns * width, 8):
        raise UsageError(f"{columns} fields of {width} bits take {triton.cdiv(columns * width, 8)} bytes a row but there "
                         f"are {packed.shape[1]}")
    constants = {"PACKED": True, "WIDTH": width, "LARGEST": offset, "MEMORY_BITS": 0, "SPARE_BITS": 0, "INERTIA": False}
    return _unpacked(packed, columns, torch.int8, constants)


def _unpacked(stored: Tensor, columns: int, dtype: torch.dtype, constants: dict[str, int],
              factors: Tensor | None = None) -> Tensor:
    stored, (rows, bytes_a_row) = stored.contiguous(), stored.shape
    levels = torch.empty(rows, columns, dtype=dtype, device=stored.device)
    if levels.numel():
        bytes_at_once = COLUMNS * constants["WIDTH"] // 8
        factors = levels if factors is None else factors.contiguous()
        dimensions = 0 if factors is levels else 1 if factors.dim() == 0 else 2
        groups = factors.shape[1] if dimensions == 2 else 1
        with torch.cuda.device_of(stored):
            _levels_kernel[(triton.cdiv(rows, ROWS), *spread(triton.cdiv(bytes_a_row, bytes_at_once)))](
                stored, levels, factors, rows, columns, bytes_a_row, groups, columns // groups, FACTORS=dimensions,
                **constants, ROWS=ROWS, BYTES=bytes_at_once)
    return levels


def _placed(stored: Tensor, columns: int, dtype: torch.dtype, constants: dict[str, int], factors: Tensor | None,
            places: int) -> Tensor:
    stored, (rows, bytes_a_row), channels = stored.contiguous(), stored.shape, columns // places
    levels = torch.empty(rows, columns, dtype=dtype, device=stored.device)
    if levels.numel():
        factors = levels if factors is None else factors.contiguous()
        dimensions = 0 if factors is levels else 1 if factors.dim() == 0 else 2
        groups, up_to = factors.shape[1] if dimensions == 2 else 1, triton.next_power_of_2(places)
        at_once = max(1, min(COLUMNS * ROWS // up_to, triton.next_power_of_2(channels)))
        with torch.cuda.device_of(stored):
            _placed_levels_kernel[(rows, *spread(triton.cdiv(channels, at_once)))](
                stored, levels, factors, channels, bytes_a_row, groups, columns // groups, FACTORS=dimensions, **constants,
                PLACES=places, UP_TO=up_to, CHANNELS=at_once)
    return levels


@triton.jit
def _pack_kernel(numbers, packed, rows, columns, bytes_a_row,
                 WIDTH: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    PER_BYTE: tl.constexpr = 8 // WIDTH
    block = spread_block()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = block * BYTES + tl.arange(0, BYTES)
    column = block * BYTES * PER_BYTE + tl.arange(0, BYTES * PER_BYTE)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(numbers + row[:, None] * columns + column[None, :], mask=live, other=-OFFSET).to(tl.int32)
    shift = WIDTH * tl.arange(0, PER_BYTE)[None, None, :]
    code = tl.reshape(number + OFFSET, (ROWS, BYTES, PER_BYTE)) << shift
    inside = (row < rows)[:, None] & (byte < bytes_a_row)[None, :]
    tl.store(packed + row[:, None] * bytes_a_row + byte[None, :], tl.sum(code, 2).to(tl.uint8), mask=inside)


def pack_fields(numbers: Tensor, width: int, offset: int) -> Tensor:
    """Pack an int8 matrix, several numbers a byte (levels.pack_fields)."""
    if numbers.dim() != 2 or numbers.dtype is not torch.int8 or width not in (2, 4, 8):
        return NotImplemented
    numbers, (rows, columns) = numbers.contiguous(), numbers.shape
    bytes_a_row, bytes_at_once = triton.cdiv(columns * width, 8), COLUMNS * width // 8
    packed = torch.empty(rows, bytes_a_row, dtype=torch.uint8, device=numbers.device)
    if packed.numel():
        with torch.cuda.device_of(numbers):
            _pack_kernel[(triton.cdiv(rows, ROWS), *spread(triton.cdiv(bytes_a_row, bytes_at_once)))](
                numbers, packed, rows, columns, bytes_a_row, WIDTH=width, OFFSET=offset, ROWS=ROWS, BYTES=bytes_at_once)
    return packed
