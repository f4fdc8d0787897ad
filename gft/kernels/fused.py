"""One launch where the torch definition takes dozens: stochastic rounding, and the step, with Philox inside.

No autotuning: `_move_kernel` writes its input, and a tuner would apply the step once per candidate. Integer arithmetic
throughout; the float products are followed by no addition, so no multiply-add can be fused into them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

QUANTIZE_BLOCK = 1024
MOVE_BLOCK = 1024


@triton.jit
def _noise16(element, seed, step, stream, call):
    """philox.noise16 of each element: the half-word (element % 8) of counter element // 8."""
    # Each element draws the whole counter and keeps an eighth of it: arithmetic is cheaper here than a shuffle.
    c0 = (element // 8).to(tl.uint32)
    zero = c0 * 0
    w0, w1, w2, w3 = tl.philox(seed, c0, zero + call.to(tl.uint32), zero + step.to(tl.uint32), zero + stream.to(tl.uint32))
    lane = (element % 8).to(tl.int32)
    place = lane // 2
    word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
    return tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16).to(tl.int32)


# Never specialised on their values: they change from step to step, and 1 would become a constant without a type.
STREAM = ["seed", "step", "stream", "call"]


@triton.jit(do_not_specialize=STREAM)
def _quantize_kernel(values, factor, out, count, features, top, seed, step, stream, call, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = element < count
    value = tl.load(values + element, mask=live, other=0.0).to(tl.float32)
    finite = (value == value) & (tl.abs(value) != float("inf"))
    scale = tl.load(factor + element % features, mask=live, other=0.0)
    fixed = tl.where(finite, value, 0.0) * scale
    fixed = tl.minimum(tl.maximum(fixed, -top), top).to(tl.int32)
    q = (fixed + _noise16(element, seed, step, stream, call)) >> 16
    tl.store(out + element, q.to(tl.int8), mask=live)


def quantize(values: Tensor,  # (n, features) float, contiguous
             factor: Tensor,  # (features,) float32: what one unit of a value is worth in 1/65536 of q
             largest: int, *, seed: int, step: int, stream: int, call: int) -> Tensor:  # (n, features) int8
    """vote.quantize with the noise of philox.noise16."""
    values = values.contiguous()
    out = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    count = values.numel()
    if count:
        with torch.cuda.device_of(values):  # Triton launches on the current device, not on the tensor's
            _quantize_kernel[(triton.cdiv(count, QUANTIZE_BLOCK),)](
                values, factor, out, count, values.shape[-1], float(largest * 65536), seed, step, stream, call,
                BLOCK=QUANTIZE_BLOCK)
    return out


@triton.jit(do_not_specialize=[*STREAM, "cap", "p_min"])
def _move_kernel(stored, votes, row_factor, column_factor, least, largest, flips, count, columns, bytes_a_row, cap, p_min,
                 seed, step, stream, call,
                 TOPK: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, TOP_LEVEL: tl.constexpr,
                 MEMORY_BITS: tl.constexpr, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < count
    row, byte_column = byte // bytes_a_row, byte % bytes_a_row
    raw = tl.load(stored + byte, mask=inside, other=0).to(tl.int32)
    result = tl.zeros((BLOCK,), tl.int32)
    changed = tl.zeros((BLOCK,), tl.int32)
    PER_BYTE: tl.constexpr = 8 // WIDTH
    UNIT: tl.constexpr = 1 << MEMORY_BITS
    HALF: tl.constexpr = UNIT // 2
    for place in tl.static_range(PER_BYTE):
        column = byte_column * PER_BYTE + place
        live = inside & (column < columns)
        element = row * columns + column
        if PACKED:  # noqa: SIM108  (a constexpr branch)
            old = ((raw >> (WIDTH * place)) & ((1 << WIDTH) - 1)) - TOP_LEVEL
        else:
            old = raw
        vote = tl.load(votes + element, mask=live, other=0)
        noise = _noise16(element, seed, step, stream, call)
        if TOPK:
            least_size, span = tl.load(least), tl.load(largest) - tl.load(least)
            size = tl.abs(vote.to(tl.int64))
            chance = tl.where(span > 0, (size - least_size) * 65536 // tl.maximum(span, 1), 65536)
            chance = tl.minimum(tl.maximum(chance, p_min), 65536)
            moves = (size >= least_size) & (size > 0) & (noise < chance)
            move = tl.where(moves, tl.where(vote > 0, UNIT, -UNIT), 0)
        else:
            share = vote.to(tl.float32) * tl.load(row_factor + row, mask=live, other=0.0)
            share = share * tl.load(column_factor + column, mask=live, other=0.0)
            move = (tl.minimum(tl.maximum(share, -cap), cap).to(tl.int32) + noise) >> 16
        new = tl.minimum(tl.maximum(old - move, -TOP_LEVEL * UNIT), TOP_LEVEL * UNIT)
        changed += (live & (((new + HALF) >> MEMORY_BITS) != ((old + HALF) >> MEMORY_BITS))).to(tl.int32)
        if PACKED:
            result |= tl.where(live, new + TOP_LEVEL, 0) << (WIDTH * place)
        else:
            result = new
    if PACKED:
        tl.store(stored + byte, result.to(tl.uint8), mask=inside)
    else:
        tl.store(stored + byte, result.to(tl.int8), mask=inside)
    tl.atomic_add(flips, tl.sum(changed, 0).to(tl.int64))


def move(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8, changed in place
         votes: Tensor,  # (rows, columns) int32 or int64
         columns: int,
         *,
         packed_width: int,  # bits of a packed level, 0 if stored with memory
         top_level: int,
         memory_bits: int,
         seed: int, step: int, stream: int, call: int,
         row: Tensor | None = None, column: Tensor | None = None, cap: float = 0.0,  # step.Rounding
         least: Tensor | None = None, largest: Tensor | None = None, p_min: int = 0) -> Tensor:  # step.TopK
    """step.rounding or step.topk on a whole stored matrix, in place. Returns how many levels changed."""
    flips = torch.zeros((), dtype=torch.int64, device=stored.device)
    votes = votes.contiguous()
    unused = flips
    count = stored.numel()
    if count:
        with torch.cuda.device_of(stored):
            _move_kernel[(triton.cdiv(count, MOVE_BLOCK),)](
                stored, votes, *(unused if one is None else one.contiguous() for one in (row, column, least, largest)),
                flips, count, columns, stored.shape[1], cap, p_min, seed, step, stream, call,
                TOPK=least is not None, PACKED=packed_width > 0, WIDTH=packed_width or 8, TOP_LEVEL=top_level,
                MEMORY_BITS=memory_bits, BLOCK=MOVE_BLOCK)
        torch.autograd.graph.increment_version(stored)  # autograd does not see what a kernel writes
    return flips
