"""Packed numbers: stored weights made float for a product, activations packed for backward and unpacked there."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.ops import checks
from gft.ops.levels import PLAIN, Scaling
from gft.ops.lowprecision import FP8, LARGEST
from gft.ops.prepare import StoredWeight
from gft.ops.triton.constants import constants_of
from gft.ops.triton.grids import spread, spread_block
from gft.ops.triton.launch import Launcher
from gft.storage import Storage

ROWS, COLUMNS = 4, 512  # of a program
TURNED = 32, 64  # likewise where columns are written side by side: a sector of memory each


@triton.jit
def _factor(number, log_gain, root, GAIN: tl.constexpr):
    """What all levels of a weight are multiplied by, (1, 1)."""
    factor = tl.full((1, 1), number, tl.float32)
    if GAIN:
        factor *= tl.exp(tl.load(log_gain).to(tl.float32) * root)
    return factor


@triton.jit
def read_block(row_block, block, stored, levels, by_group, log_gain, number, root, rows, columns, bytes_a_row, groups, group,
               GROUPS: tl.constexpr, GAIN: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr,
               MEMORY_BITS: tl.constexpr, SPARE_BITS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
               TURN: tl.constexpr):
    """Some bytes of some rows."""
    row = row_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
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
    factor = _factor(number, log_gain, root, GAIN)
    if GROUPS:
        at = row[:, None] * groups + (column // group)[None, :]
        factor = tl.load(by_group + at, mask=live, other=0.0).to(tl.float32) * factor
    value = (level.to(tl.float32) * factor).to(levels.dtype.element_ty)
    if TURN:
        target = levels + column.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(target, tl.trans(value), mask=tl.trans(live))
    else:
        tl.store(levels + row[:, None] * columns + column[None, :], value, mask=live)


@triton.jit
def _levels_kernel(stored, levels, by_group, log_gain, number, root, rows, columns, bytes_a_row, groups, group,
                   GROUPS: tl.constexpr, GAIN: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
                   LARGEST: tl.constexpr, MEMORY_BITS: tl.constexpr, SPARE_BITS: tl.constexpr, INERTIA: tl.constexpr,
                   ROWS: tl.constexpr, BYTES: tl.constexpr, TURN: tl.constexpr):
    read_block(tl.program_id(0), spread_block(), stored, levels, by_group, log_gain, number, root, rows, columns,
               bytes_a_row, groups, group, GROUPS, GAIN, PACKED, WIDTH, LARGEST, MEMORY_BITS, SPARE_BITS, ROWS, BYTES, TURN)


@triton.jit
def read_placed_block(row, block, stored, levels, by_group, log_gain, number, root, columns, bytes_a_row, groups, group,
                      GROUPS: tl.constexpr, GAIN: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
                      LARGEST: tl.constexpr, MEMORY_BITS: tl.constexpr, SPARE_BITS: tl.constexpr, PLACES: tl.constexpr,
                      UP_TO: tl.constexpr, CHANNELS: tl.constexpr):
    """Some (channels, places) of a row -> (places, channels): reads what lies together, turns it round, writes likewise."""
    row, channels = row.to(tl.int64), columns // PLACES
    channel, place = block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, UP_TO)
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
    factor = _factor(number, log_gain, root, GAIN)
    if GROUPS:
        factor = tl.load(by_group + row * groups + column // group, mask=live, other=0.0).to(tl.float32) * factor
    value = (level.to(tl.float32) * factor).to(levels.dtype.element_ty)
    target = levels + row * columns + place[:, None] * channels + channel[None, :]
    tl.store(target, tl.trans(value), mask=tl.trans(live))


@triton.jit
def _placed_levels_kernel(stored, levels, by_group, log_gain, number, root, rows, columns, bytes_a_row, groups, group,
                          GROUPS: tl.constexpr, GAIN: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
                          LARGEST: tl.constexpr, MEMORY_BITS: tl.constexpr, SPARE_BITS: tl.constexpr, INERTIA: tl.constexpr,
                          PLACES: tl.constexpr, UP_TO: tl.constexpr, CHANNELS: tl.constexpr):
    read_placed_block(tl.program_id(0), spread_block(), stored, levels, by_group, log_gain, number, root, columns,
                      bytes_a_row, groups, group, GROUPS, GAIN, PACKED, WIDTH, LARGEST, MEMORY_BITS, SPARE_BITS, PLACES,
                      UP_TO, CHANNELS)


_launch_levels, _launch_placed = Launcher(_levels_kernel), Launcher(_placed_levels_kernel)


class Reading(NamedTuple):
    """How weights of one kind are read out."""

    grid: tuple[int, int, int]
    sizes: tuple[int, int, int, int, int]  # rows, columns, bytes a row, groups, columns a group
    shape: tuple[int, int]  # of what is read out
    constants: dict[str, Any]

    @property
    def blocks_across(self) -> int:
        """Programs for the same rows."""
        return self.grid[1] * self.grid[2]


_readings: dict[Hashable, Reading] = {}


def float_levels(stored: Tensor, storage: Storage, columns: int, dtype: torch.dtype,
                 scaling: Scaling = PLAIN, places: int = 1, turned: bool = False) -> Tensor:
    """Read a stored weight out as floats, in one pass (levels.float_levels)."""
    weight = StoredWeight(stored, storage, columns, dtype, scaling, places, turned)
    kind = kind_of(weight)
    reading = reading_of(kind, weight)
    return NotImplemented if reading is None else _read(stored, dtype, reading, scaling, kind)


def kind_of(weight: StoredWeight) -> Hashable:
    """What a reading, and the launch of it, depend on."""
    stored, storage, columns, dtype, scaling, places, turned = weight
    return (stored.shape, stored.dtype, stored.device, storage, columns, dtype, _kind_of(scaling.by_group),
            _kind_of(scaling.log_gain), places, turned)


def reading_of(kind: Hashable, weight: StoredWeight) -> Reading | None:
    """How such a weight is read out, once it has been checked; None for what is left to the definition."""
    reading = _readings.get(kind)
    if reading is None:
        stored, storage, columns, dtype, scaling, places, turned = weight
        checks.check_stored(stored, storage, columns)
        checks.check_scaling(scaling, stored, columns)
        if places < 1 or columns % places:
            raise UsageError(f"{columns} columns are not channels of {places} places each")
        if not (dtype in checks.FLOATS or writes(dtype, stored.device)) or (turned and places > 1):
            return None
        reading = _readings[kind] = _reading(stored.shape, columns, constants_of(storage), scaling, places, turned)
    return reading


def writes(dtype: torch.dtype, device: torch.device) -> bool:
    """Is this a type of 8 bits that kernels on the device can write (lowprecision.py)? The interpreter can."""
    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    return dtype in LARGEST and (dtype is not FP8 or has_fp8)


def _kind_of(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def unpack_fields(packed: Tensor, width: int, offset: int, columns: int) -> Tensor:
    """Unpack a matrix (levels.unpack_fields): as levels of which none has a bit to spare."""
    if packed.dim() != 2 or packed.dtype is not torch.uint8 or width not in (2, 4, 8):
        return NotImplemented
    if packed.shape[1] != triton.cdiv(columns * width, 8):
        raise UsageError(f"{columns} fields of {width} bits take {triton.cdiv(columns * width, 8)} bytes a row but there "
                         f"are {packed.shape[1]}")
    constants = {"PACKED": True, "WIDTH": width, "LARGEST": offset, "MEMORY_BITS": 0, "SPARE_BITS": 0, "INERTIA": False}
    reading = _reading(packed.shape, columns, constants, PLAIN, 1)
    return _read(packed, torch.int8, reading, PLAIN, (packed.shape, width, offset, columns))


def _reading(shape: torch.Size, columns: int, constants: dict[str, int], scaling: Scaling, places: int,
             turned: bool = False) -> Reading:
    rows_at_once, columns_at_once = TURNED if turned else (ROWS, COLUMNS)
    (rows, bytes_a_row), bytes_at_once = shape, columns_at_once * constants["WIDTH"] // 8
    groups = 1 if scaling.by_group is None else scaling.by_group.shape[1]
    factors = {"GROUPS": scaling.by_group is not None, "GAIN": scaling.log_gain is not None}
    if places > 1:
        channels, up_to = columns // places, triton.next_power_of_2(places)
        at_once = max(1, min(COLUMNS * ROWS // up_to, triton.next_power_of_2(channels)))
        return Reading((rows, *spread(triton.cdiv(channels, at_once))),
                       (rows, columns, bytes_a_row, groups, columns // groups), (rows, columns),
                       {**factors, **constants, "PLACES": places, "UP_TO": up_to, "CHANNELS": at_once})
    return Reading((triton.cdiv(rows, rows_at_once), *spread(triton.cdiv(bytes_a_row, bytes_at_once))),
                   (rows, columns, bytes_a_row, groups, columns // groups), (columns, rows) if turned else (rows, columns),
                   {**factors, **constants, "ROWS": rows_at_once, "BYTES": bytes_at_once, "TURN": turned})


def room_for(stored: Tensor, dtype: torch.dtype, reading: Reading, scaling: Scaling) -> tuple[Tensor, tuple[Any, ...]]:
    """Where the result goes, and what the kernel is given."""
    by_group, log_gain, number, root = scaling
    weight = torch.empty(reading.shape, dtype=dtype, device=stored.device)
    return weight, (stored.contiguous(), weight, weight if by_group is None else by_group.contiguous(),
                    weight if log_gain is None else log_gain, number, root, *reading.sizes)


def _read(stored: Tensor, dtype: torch.dtype, reading: Reading, scaling: Scaling, kind: Hashable) -> Tensor:
    weight, arguments = room_for(stored, dtype, reading, scaling)
    if weight.numel():
        launch = _launch_placed if "PLACES" in reading.constants else _launch_levels
        launch(kind, reading.grid, arguments, reading.constants)
    return weight


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
