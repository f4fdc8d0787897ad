"""y = scale · x · levels^T for a few rows of x, reading each weight once and in its stored form.

Generating text multiplies one row of x, or a few, by every weight, so it takes as long as the weights take to come from
memory: 2 bits a weight instead of 16. At that pace (H200: 18 bytes a clock for each multiprocessor, 70 weights of 2 bits)
fewer than two instructions may be spent on a weight, which rules out shift, mask, convert and multiply. Instead

    a weight     is cut out where it stands, by one AND for two of them, and is a bfloat16 as it is: 16 bits with a field
                 among the low 8 and nothing else read as field · 2^-133, for bfloat16 keeps numbers that small
    the product  is taken by the tensor cores, which add exact products of such numbers in float32
    x            is multiplied by 2^X_UP against the 2^-133, and by a power of two against where the field stands

so that a weight costs half an AND, a sixteenth of a shift (for the fields in the high 8 bits) and its share of an MMA.

Both forms of a weight (storage.py) are fields. Packed: level + I, and what spare bits there are below it are masked off.
Memory: flip a byte's sign bit and add half a unit, and its high bits are level + 128 / 2^m, with no carry into the next
byte since no value reaches beyond ±I levels. The offset comes off the sum: sum x · (code - offset) = sum x · code - offset ·
sum x, where the latter sum is an MMA, too, with a constant.

    a unit       is 16 bits as they are stored (8 in rows of odd length), PLACES fields: column = unit · PLACES + place
    a tile       of a step is (PARTS, ROWS, UNITS): a part is the share of a warp, which has columns of its own

Field p of every unit together is a matrix whose columns are p, p + PLACES, …: x is taken apart the same way, so nothing is
ever interleaved. One row of x is not even taken apart: the tensor cores multiply by 8 columns anyway, so all of its places
are multiplied by each place's weights, and what belongs together is picked out of the product.

What comes out: products are exact, float16 and float32 being taken as the 2 and 3 bfloat16 numbers that add up to them.
Sums are float32's, in a fixed order (no atomics), and miss the definition by about 1e-6 of |x| · |weight row|; then y is
rounded to x's type. This holds for |x| from 1e-15 to 1e20. An infinity or NaN in a row of x makes that row of y NaN.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.ops import checks
from gft.ops.levels import PLAIN, Scaling
from gft.ops.products import FEW_ROWS
from gft.storage import Storage

X_UP = 60
LIMBS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


class Tile(NamedTuple):
    """What a program reads of the weight in one step."""

    parts: int  # also its warps
    rows: int  # a multiple of 16. More: x is read less often, and more registers are used
    units: int  # a multiple of 16
    stages: int  # steps that are on their way or at work at once


TILES = {1: Tile(2, 16, 128, 3), 8: Tile(4, 32, 32, 3), 16: Tile(4, 64, 32, 2)}  # by the most rows of x they are for
PROGRAMS = 0.9  # a multiprocessor has at least so many, else columns are split among more of them
MOST_SPLITS = 8
SUM_BLOCK = 1024


@triton.jit
def _in_pairs(INSTRUCTION: tl.constexpr, a, b):
    """One instruction for two 16-bit numbers: Triton would take them one by one. The rest of the code does without."""
    return tl.inline_asm_elementwise(INSTRUCTION, "=r,r,r", [a, b], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def _read(bits, GPU: tl.constexpr):
    """16 bits as the bfloat16 they are. Triton's interpreter misreads small ones: it gets the float32 with the same bits."""
    if GPU:
        return bits.to(tl.bfloat16, bitcast=True)
    else:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _fields(bits, start: tl.constexpr, stand: tl.constexpr, MASK: tl.constexpr, GPU: tl.constexpr):
    """The bfloat16 field · 2^-133 · 2^stand, of the field that starts at a bit."""
    if GPU and start % 8 == stand:
        if start >= 8:  # what comes down from the other number of the pair is masked off
            bits = _in_pairs("shr.b32 $0, $1, 8;", bits, bits)
        return _read(_in_pairs("and.b32 $0, $1, $2;", bits, tl.full([], MASK << stand, tl.int16)), GPU)
    else:
        return _read(((bits >> start << stand) & (MASK << stand)).to(tl.int16), GPU)


@triton.jit
def _limb(x, up: tl.constexpr, limb: tl.constexpr, LIMBS: tl.constexpr, GPU: tl.constexpr):
    """One of the bfloat16 numbers that add up to x · up."""
    if GPU and LIMBS == 1:  # x · up + -0, for GPUs before Hopper have no multiplication of pairs
        product = _in_pairs("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }", x,
                            tl.full([], up, tl.bfloat16))
        return _read(product, GPU)
    else:
        rest = x.to(tl.float32) * up
        for _ in tl.static_range(limb):
            rest -= rest.to(tl.bfloat16).to(tl.float32)
        return rest.to(tl.bfloat16) if GPU else rest.to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _kernel(x, w, out, tokens, rows, columns, units, units_a_split, scale,
            TYPE: tl.constexpr, LIMBS: tl.constexpr, PACK: tl.constexpr,  # of x: numbers that one load holds
            PLACES: tl.constexpr, WIDTH: tl.constexpr, STANDS: tl.constexpr, MASK: tl.constexpr, FLIP: tl.constexpr,
            ADD: tl.constexpr, OFFSET: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr, GPU: tl.constexpr,
            FINE: tl.constexpr, ONE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
            UNITS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    first = split * units_a_split
    last = tl.minimum(first + units_a_split, units)
    token = tl.arange(0, TOKENS)  # or place, of one row
    total = tl.zeros((PARTS, ROWS, TOKENS), tl.float32)
    offset = tl.zeros((PARTS, 16, TOKENS), tl.float32)  # the same 16 times, for an MMA has so many rows
    for start in range(first, last, PARTS * UNITS):
        unit = start + tl.arange(0, PARTS)[:, None] * UNITS + tl.arange(0, UNITS)[None, :]
        bits = tl.load(w + row.to(tl.int64)[None, :, None] * units + unit[:, None, :],
                       mask=(unit < units)[:, None, :] & (row < rows)[None, :, None], other=0).to(tl.int16)
        if FLIP != 0:
            bits = (bits ^ FLIP).to(tl.int16) + ADD
        # In a long sum the tensor cores' rounding would show in float32: they cut off.
        step = tl.zeros_like(total) if FINE else total
        step_offset = tl.zeros_like(offset) if FINE else offset
        for place in tl.static_range(PLACES):
            if not ONE and place % PACK == 0:
                # One column of units, not parts × units: so Triton lays it out in shared memory without bank conflicts.
                at = (start + tl.arange(0, PARTS * UNITS))[:, None] * (PLACES // PACK) + place // PACK
                loaded = tl.load(x + token[None, :] * (columns // PACK) + at, other=0,
                                 mask=(token < tokens)[None, :] & (at * PACK < columns))
                loaded = tl.reshape(loaded, (PARTS, UNITS, TOKENS))
            elif ONE and place == 0:
                # In fours, not eights: those Triton would not copy to shared memory ahead of time.
                column = unit[:, :, None] * PLACES + tl.max_contiguous(token, 4)[None, None, :]
                loaded = tl.load(x + column, mask=(token < PLACES)[None, None, :] & (column < columns), other=0)
            number = loaded if PACK == 1 else (loaded >> 16 * (place % PACK)).to(tl.int16).to(TYPE, bitcast=True)
            field = _fields(bits, place * WIDTH, STANDS[place], MASK, GPU)
            constant = _read(tl.full((PARTS, 16, UNITS), OFFSET << STANDS[place], tl.int16), GPU)
            for limb in tl.static_range(LIMBS):
                limbs = _limb(number, UP / 2 ** STANDS[0 if ONE else place], limb, LIMBS, GPU)
                if ONE:
                    mine = tl.where(token == place, 2.0 ** (STANDS[0] - STANDS[place]), 0.0)
                    step += tl.dot(field, limbs) * mine[None, None, :]
                else:
                    step = tl.dot(field, limbs, step)
                if not ONE or place == 0:
                    step_offset = tl.dot(constant, limbs, step_offset)
        total = total + step if FINE else step
        offset = offset + step_offset if FINE else step_offset
    sums = (tl.sum(total, 0) - (tl.sum(tl.sum(offset, 1), 0) / 16)[None, :]) * DOWN
    if ONE:
        sums, token = tl.sum(sums, 1)[:, None], tl.arange(0, 1)
    place = (split * tokens + token).to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(out + place, (sums * scale).to(out.dtype.element_ty),
             mask=(token < tokens)[None, :] & (row < rows)[:, None])


@triton.jit
def _sum_kernel(parts, out, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * count + at, mask=at < count, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


@cache
def _multiprocessors(device: torch.device) -> int:
    """The interpreter, on the CPU, counts as one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _splits(blocks: int, steps: int, processors: int) -> int:
    """Into how many parts the columns are split, so that no multiprocessor is without work."""
    splits = 1
    while blocks * splits < PROGRAMS * processors and splits < MOST_SPLITS:
        splits *= 2
    return min(splits, steps)


@cache
def _has_bfloat16_cores(device: torch.device) -> bool:
    """Tensor cores that take bfloat16 came with compute capability 8. The interpreter, on the CPU, needs none."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def linear(x: Tensor, stored: Tensor, storage: Storage, scaling: Scaling = PLAIN) -> Tensor:
    """products.linear for so few rows of x that reading the weight is all the work."""
    checks.check_matrix("x", x)
    if not 0 < x.shape[0] <= FEW_ROWS or not stored.numel() or x.dtype not in LIMBS or not _has_bfloat16_cores(x.device):
        return NotImplemented
    checks.check_stored(stored, storage, x.shape[1])
    if stored.device != x.device:
        raise UsageError(f"x is on {x.device} but the stored weight on {stored.device}")
    checks.check_scaling(scaling, stored, x.shape[1])
    if scaling.by_group is not None and scaling.by_group.shape[1] > 1:
        return NotImplemented  # what is added up must have been multiplied by
    y = product(x, stored, storage, scaling.number)
    if scaling.log_gain is None and scaling.by_group is None:
        return y
    factors = scaling._replace(number=1.0).factors()
    assert isinstance(factors, Tensor)
    return (y.float() * (factors if factors.dim() == 0 else factors.t())).to(y.dtype)


def product(x: Tensor,  # (n, columns) float32, bfloat16 or float16, n from 1 to 16
            stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8
            storage: Storage,
            scale: float,
            tile: Tile | None = None,
            splits: int | None = None) -> Tensor:  # (n, rows) of x's type
    """scale · x · levels^T, for what `linear` has checked."""
    x, stored = x.contiguous(), stored.contiguous()
    tokens, columns = x.shape
    rows, row_bytes = stored.shape
    width, below = storage.field_bits, storage.low_bits
    wide = row_bytes % 2 == 0 and stored.data_ptr() % 2 == 0
    units = row_bytes // 2 if wide else row_bytes
    weights = stored.view(-1).view(torch.int16 if wide else torch.uint8)
    ones = 0x0101 if wide else 1
    flip, add = (0, 0) if not storage.memory else (ones * 128, ones * ((1 << below) // 2))
    places = (16 if wide else 8) // width
    pack = 4 if x.element_size() == 2 and places % 4 == columns % 4 == x.data_ptr() % 8 == 0 and tokens > 1 else 1
    numbers = x.view(-1).view(torch.int64) if pack == 4 else x
    # Before they add, tensor cores cut products off some 25 bits below the largest exponent, and all small numbers have the
    # same exponent: a field is the more precise the higher in its byte. For float32 it is shifted up there, which costs.
    fine = x.dtype is torch.float32
    stands = tuple(8 - width if fine else place * width % 8 for place in range(places))

    tile = tile or TILES[min(most for most in TILES if tokens <= most)]
    blocks, steps = triton.cdiv(rows, tile.rows), triton.cdiv(units, tile.parts * tile.units)
    splits = min(splits or _splits(blocks, steps, _multiprocessors(x.device)), steps)
    steps_a_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, steps_a_split)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    sums = out if splits == 1 else torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _kernel[(blocks, splits)](
            numbers, weights, sums, tokens, rows, columns, units, steps_a_split * tile.parts * tile.units, scale,
            TYPE=getattr(tl, str(x.dtype).removeprefix("torch.")), LIMBS=LIMBS[x.dtype], PACK=pack, PLACES=places,
            WIDTH=width, STANDS=stands, MASK=(1 << width) - (1 << below), FLIP=flip - (flip >> 15 << 16),  # as an int16
            ADD=add, OFFSET=128 if storage.memory else storage.largest << below, UP=2.0**X_UP,
            DOWN=2.0 ** (133 - X_UP - below), GPU=x.is_cuda, FINE=fine, ONE=tokens == 1, TOKENS=8 if tokens <= 8 else 16,
            PARTS=tile.parts, ROWS=tile.rows, UNITS=tile.units, num_warps=tile.parts, num_stages=tile.stages)
        if splits > 1:
            _sum_kernel[(triton.cdiv(out.numel(), SUM_BLOCK),)](sums, out, out.numel(), SPLITS=splits, BLOCK=SUM_BLOCK)
    return out
