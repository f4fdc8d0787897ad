"""y = scale · x · levels^T for a few rows of x, reading each weight once and in its stored form.

Generating text multiplies one row of x, or a few, by every weight, so it takes as long as the weights take to come from
memory: 2 bits a weight instead of 16. At that pace (H200: 17 bytes a clock for each multiprocessor, 69 weights of 2 bits)
fewer than two instructions may be spent on a weight, which rules out shift, mask, convert and multiply. So weights are read
as 32-bit words, and

    a word     holds `PLACES` fields; field p of every word together is a matrix whose columns are p, p + PLACES, …
    x          is taken apart the same way, so nothing is ever interleaved
    a field    is cut out where it stands, by one AND, and never shifted down: a power of two is undone elsewhere

Both forms of a weight (grid.py) are fields. Packed: level + I. Memory: flip a byte's sign bit and add half a unit, and its
high bits are level + 128 / 2^m, with no carry into the next byte since no value reaches beyond ±I levels.

One row of x: the bits of the field, read as a float, are the number field · 2^-149 (float32 keeps such small numbers), and
    sum x · (code - offset) = sum x · code - offset · sum x
leaves one AND and one multiply-add a weight. Several rows: tensor cores multiply, and a weight costs an AND, an exact
multiply-add (2^23 + field -> level) and half a conversion to x's type.

Every sum is taken in float32 and in a fixed order: no atomics.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 16  # of x
# A product with up to this many rows of x is a plain reduction for each; more go through tensor cores, unless x is float32,
# which they would round.
PLAIN_ROWS = 1
# Rows of the weight a program works on, words it reads of each at once, and its warps. 32 words are a warp's width, so the
# rows of the plain reduction never leave their warp.
PLAIN_TILE, PLAIN_WARPS = (64, 32), 4
DOT_TILE, DOT_WARPS = (64, 32), 4
PROGRAMS = 1.9  # a multiprocessor has at least so many, else columns are split among more of them
BUSY = 0.9  # and at least this share of them is at work when the last ones run
MOST_SPLITS = 16
SUM_BLOCK = 1024

X_UP = 60  # x is multiplied by 2^60 against the 2^-149: in full precision for any |x| from 1e-11 to 1e20


@triton.jit
def _words(w, row, start, last, rows, stride, FLIP: tl.constexpr, ADD: tl.constexpr, WORDS: tl.constexpr):
    """(ROWS, WORDS) int32: the words of some rows from `start` on; from `last` on they are none of the matrix's, and are
    finite, which is enough, since x is 0 there."""
    word = start + tl.arange(0, WORDS)
    live = (row < rows)[:, None] & (word < last)[None, :]
    bits = tl.load(w + row.to(tl.int64)[:, None] * stride + word[None, :], mask=live, other=0).to(tl.int32)
    return (bits ^ FLIP) + ADD


@triton.jit
def _x_part(bits, part: tl.constexpr, TYPE: tl.constexpr, PARTS: tl.constexpr):
    """One of the numbers that one load of x holds."""
    if PARTS == 1:
        return bits
    else:
        return (bits >> (16 * part)).to(tl.int16).to(TYPE, bitcast=True)


@triton.jit
def _add_product(total, number, bits, high, place: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr,
                 UP: tl.constexpr):
    """total + number · field, times 2^(X_UP - 149): where the field stands is undone on the number's side."""
    shift: tl.constexpr = place * WIDTH % 16
    half = bits if place * WIDTH < 16 else high
    tiny = (half & (MASK << shift)).to(tl.float32, bitcast=True)
    return tl.fma(tiny, (number * (UP / (1 << shift)))[None, :], total)


@triton.jit
def _level(bits, high, place: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, MEMORY: tl.constexpr,
           OFFSET: tl.constexpr):
    """The level itself, in float32: below the bits of 2^e, a field that stands at bit 23 - e adds its own value."""
    shift: tl.constexpr = place * WIDTH % 16
    e: tl.constexpr = 23 - shift - MEMORY
    half = bits if place * WIDTH < 16 else high
    above = ((half & (MASK << shift)) | ((127 + e) << 23)).to(tl.float32, bitcast=True)
    return above - ((1 << e) + OFFSET)


# With a stride that may be odd for all Triton knows, a thread reads one word of a row, not four: then it needs 16 numbers of
# x (at 2 bits) instead of 64, and uses each for many rows.
@triton.jit(do_not_specialize=["stride"])
def _plain_kernel(x, w, out, rows, columns, words, stride, words_a_split, scale,
                  TYPE: tl.constexpr, PARTS: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr,
                  FLIP: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr, DOWN: tl.constexpr, UP: tl.constexpr,
                  ROWS: tl.constexpr, WORDS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split, token = tl.program_id(1), tl.program_id(2)
    first = split * words_a_split
    last = tl.minimum(first + words_a_split, words)
    x += token.to(tl.int64) * (columns // PARTS)
    lane = tl.arange(0, WORDS)
    total = tl.zeros((ROWS, WORDS), tl.float32)
    x_total = tl.zeros((WORDS,), tl.float32)
    coming = _words(w, row, first, last, rows, stride, FLIP, ADD, WORDS)
    for start in range(first, last, WORDS):
        bits = coming
        # Asked for before this tile is worked on, so that memory is never waited for twice.
        coming = _words(w, row, start + WORDS, last, rows, stride, FLIP, ADD, WORDS)
        high = bits >> 16
        for load in tl.static_range(PLACES // PARTS):
            at = (start + lane) * (PLACES // PARTS) + load
            live = (start + lane < last) & (at * PARTS < columns)
            loaded = tl.load(x + at, mask=live, other=0)
            for part in tl.static_range(PARTS):
                number = _x_part(loaded, part, TYPE, PARTS).to(tl.float32)
                total = _add_product(total, number, bits, high, load * PARTS + part, WIDTH, MASK, UP)
                x_total += number
    sums = tl.sum(total, 1) * DOWN - OFFSET * tl.sum(x_total, 0)
    place = (split * tl.num_programs(2) + token).to(tl.int64) * rows + row
    tl.store(out + place, (sums * scale).to(out.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=["tokens"])
def _dot_kernel(x, w, out, tokens, rows, columns, words, stride, words_a_split, scale,
                TYPE: tl.constexpr, PARTS: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr,
                FLIP: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr, MEMORY: tl.constexpr,
                DOT: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    first = split * words_a_split
    last = tl.minimum(first + words_a_split, words)
    token, lane = tl.arange(0, TOKENS), tl.arange(0, WORDS)
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(first, last, WORDS):
        bits = _words(w, row, start, last, rows, stride, FLIP, ADD, WORDS)
        high = bits >> 16
        for load in tl.static_range(PLACES // PARTS):
            at = (start + lane) * (PLACES // PARTS) + load
            live = (token < tokens)[:, None] & ((start + lane < last) & (at * PARTS < columns))[None, :]
            loaded = tl.load(x + token[:, None] * (columns // PARTS) + at[None, :], mask=live, other=0)
            for part in tl.static_range(PARTS):
                number = _x_part(loaded, part, TYPE, PARTS)
                level = _level(bits, high, load * PARTS + part, WIDTH, MASK, MEMORY, OFFSET)
                total = tl.dot(number.to(DOT), tl.trans(level.to(DOT)), total)
    place = (split * tokens + token).to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(out + place, (total * scale).to(out.dtype.element_ty),
             mask=(token < tokens)[:, None] & (row < rows)[None, :])


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
    """Into how many parts the columns are split, so that few multiprocessors wait while others work."""
    splits = 1
    while splits < min(MOST_SPLITS, steps):
        programs = blocks * splits
        if programs >= PROGRAMS * processors and programs >= BUSY * processors * triton.cdiv(programs, processors):
            break
        splits *= 2
    return min(splits, steps)


def product(x: Tensor,  # (n, columns) float32, bfloat16 or float16, n from 1 to 16
            stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8
            scale: float,
            *,
            packed_width: int,  # bits of a packed level, 0 if stored with memory
            top_level: int,
            memory_bits: int,
            splits: int | None = None) -> Tensor:  # (n, rows) of x's type
    """scale · x · levels^T."""
    x, stored = x.contiguous(), stored.contiguous()
    tokens, columns = x.shape
    rows, row_bytes = stored.shape
    assert 0 < tokens <= MOST_ROWS
    if not stored.numel():
        return x.new_zeros(tokens, rows)
    width, memory = packed_width or 8, 0 if packed_width else memory_bits
    # A row whose bytes make no whole words is read byte by byte, and then x number by number.
    wide = row_bytes % 4 == 0 and stored.data_ptr() % 4 == 0
    bytes_a_word = 4 if wide else 1
    words = row_bytes // bytes_a_word
    parts = 4 if wide and x.element_size() == 2 and columns % 4 == 0 and x.data_ptr() % 8 == 0 else 1
    ones = 0x01010101 if wide else 1
    flip, add = (0, 0) if packed_width else (ones * 128, ones * ((1 << memory) // 2))
    kind = getattr(tl, str(x.dtype).removeprefix("torch."))
    field = {"TYPE": kind, "PARTS": parts, "PLACES": 8 * bytes_a_word // width, "WIDTH": width,
             "MASK": (1 << width) - (1 << memory), "FLIP": flip - (flip >> 31 << 32),  # as an int32
             "ADD": add, "OFFSET": top_level if packed_width else 128 >> memory}
    plain = tokens <= PLAIN_ROWS or x.dtype is torch.float32
    (tile_rows, tile_words), warps = (PLAIN_TILE, PLAIN_WARPS) if plain else (DOT_TILE, DOT_WARPS)
    blocks, steps = triton.cdiv(rows, tile_rows), triton.cdiv(words, tile_words)
    splits = min(splits or _splits(blocks * (tokens if plain else 1), steps, _multiprocessors(x.device)), steps)
    steps_a_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, steps_a_split)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    sums = out if splits == 1 else torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    # Flat, for torch finds strides in the way of a view even where there is but one row.
    numbers = x.view(-1).view(torch.int64) if parts == 4 else x
    weights = stored.view(-1).view(torch.int32 if wide else torch.uint8)
    shape = rows, columns, words, words, steps_a_split * tile_words, scale
    with torch.cuda.device_of(x):
        if plain:
            _plain_kernel[(blocks, splits, tokens)](
                numbers, weights, sums, *shape, **field, UP=2.0**X_UP, DOWN=2.0 ** (149 - X_UP - memory), ROWS=tile_rows,
                WORDS=tile_words, num_warps=warps)
        else:
            # Triton's interpreter knows no product of bfloat16.
            _dot_kernel[(blocks, splits)](
                numbers, weights, sums, tokens, *shape, **field, MEMORY=memory, DOT=kind if x.is_cuda else tl.float32,
                TOKENS=MOST_ROWS, ROWS=tile_rows, WORDS=tile_words, num_warps=warps)
        if splits > 1:
            _sum_kernel[(triton.cdiv(out.numel(), SUM_BLOCK),)](sums, out, out.numel(), SPLITS=splits, BLOCK=SUM_BLOCK)
    return out
