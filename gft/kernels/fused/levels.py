"""Packed numbers: stored weights made float for a product, activations packed for backward and unpacked there."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _levels_kernel(stored, levels, rows, columns, bytes_a_row,
                   PACKED: tl.constexpr, WIDTH: tl.constexpr, TOP_LEVEL: tl.constexpr, MEMORY_BITS: tl.constexpr,
                   SPARE_BITS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = (row < rows)[:, None] & (byte < bytes_a_row)[None, :]
    raw = tl.load(stored + row[:, None] * bytes_a_row + byte[None, :], mask=inside, other=0).to(tl.int32)
    if PACKED:
        PER_BYTE: tl.constexpr = 8 // WIDTH
        shift = WIDTH * tl.arange(0, PER_BYTE)[None, None, :]
        field = tl.reshape((raw[:, :, None] >> shift) & ((1 << WIDTH) - 1), (ROWS, BYTES * PER_BYTE))
        level = (field >> SPARE_BITS) - TOP_LEVEL
    else:
        PER_BYTE: tl.constexpr = 1
        level = (raw + ((1 << MEMORY_BITS) >> 1)) >> MEMORY_BITS
    column = tl.program_id(1) * BYTES * PER_BYTE + tl.arange(0, BYTES * PER_BYTE)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(levels + row[:, None] * columns + column[None, :], level.to(tl.float32).to(levels.dtype.element_ty), mask=live)


def float_levels(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8
                 columns: int, dtype: torch.dtype, *, packed_width: int, top_level: int,
                 memory_bits: int, spare_bits: int = 0) -> Tensor:  # (rows, columns) of `dtype`
    """grid.Grid.levels as floats, in one pass: the scratch a product reads. Or as int8: grid.unpack."""
    stored = stored.contiguous()
    levels = torch.empty(stored.shape[0], columns, dtype=dtype, device=stored.device)
    rows, bytes_a_row = stored.shape
    if levels.numel():
        bytes_at_once = 512 * (packed_width or 8) // 8
        with torch.cuda.device_of(stored):
            _levels_kernel[(triton.cdiv(rows, 4), triton.cdiv(bytes_a_row, bytes_at_once))](
                stored, levels, rows, columns, bytes_a_row, PACKED=packed_width > 0, WIDTH=packed_width or 8,
                TOP_LEVEL=top_level, MEMORY_BITS=memory_bits, SPARE_BITS=spare_bits, ROWS=4, BYTES=bytes_at_once)
    return levels


@triton.jit
def _pack_kernel(levels, packed, rows, columns, bytes_a_row,
                 WIDTH: tl.constexpr, TOP_LEVEL: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    PER_BYTE: tl.constexpr = 8 // WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    column = tl.program_id(1) * BYTES * PER_BYTE + tl.arange(0, BYTES * PER_BYTE)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    level = tl.load(levels + row[:, None] * columns + column[None, :], mask=live, other=-TOP_LEVEL).to(tl.int32)
    shift = WIDTH * tl.arange(0, PER_BYTE)[None, None, :]
    code = tl.reshape(level + TOP_LEVEL, (ROWS, BYTES, PER_BYTE)) << shift
    inside = (row < rows)[:, None] & (byte < bytes_a_row)[None, :]
    tl.store(packed + row[:, None] * bytes_a_row + byte[None, :], tl.sum(code, 2).to(tl.uint8), mask=inside)


def pack(levels: Tensor,  # (rows, columns) int8
         packed_width: int, top_level: int) -> Tensor:  # (rows, bytes) uint8
    """grid.pack."""
    levels = levels.contiguous()
    rows, columns = levels.shape
    bytes_a_row, bytes_at_once = triton.cdiv(columns * packed_width, 8), 512 * packed_width // 8
    packed = torch.empty(rows, bytes_a_row, dtype=torch.uint8, device=levels.device)
    if packed.numel():
        with torch.cuda.device_of(levels):
            _pack_kernel[(triton.cdiv(rows, 4), triton.cdiv(bytes_a_row, bytes_at_once))](
                levels, packed, rows, columns, bytes_a_row, WIDTH=packed_width, TOP_LEVEL=top_level, ROWS=4,
                BYTES=bytes_at_once)
    return packed
