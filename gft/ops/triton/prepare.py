"""A weight read out and x or grad_output rounded, in one launch: neither waits for the other, and the host launches once."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gft.ops.activations import Quantized
from gft.ops.prepare import StoredWeight
from gft.ops.triton import activations, levels
from gft.ops.triton.activations import MOST_REGISTERS, WARPS, quantize_block
from gft.ops.triton.grids import MOST
from gft.ops.triton.launch import ALIGNED, Launcher
from gft.ops.triton.levels import read_block
from gft.ops.triton.noise import KEY, width
from gft.philox import NoiseKey


@triton.jit(do_not_specialize=[*KEY, "chunks"])
def _both_kernel(values, factors, out, squares, not_finite, tokens, features, largest_square, seed, step, noise_stream, call,
                 stored, weight, by_group, log_gain, number, root, rows, columns, bytes_a_row, groups, group,
                 chunks, blocks_across,
                 SIGN: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr, BY_EIGHTS: tl.constexpr, TOP: tl.constexpr,
                 LANES: tl.constexpr, RUN: tl.constexpr, FEATURES: tl.constexpr,
                 GROUPS: tl.constexpr, GAIN: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr,
                 MEMORY_BITS: tl.constexpr, SPARE_BITS: tl.constexpr, INERTIA: tl.constexpr, ROWS: tl.constexpr,
                 BYTES: tl.constexpr):
    """The first `chunks` rows of programs round, the others read."""
    chunk = tl.program_id(1)
    if chunk < chunks:
        quantize_block(tl.program_id(0), chunk, values, factors, out, squares, not_finite, tokens, features, largest_square,
                       seed, step, noise_stream, call, SIGN, COUNT, ALIGNED, BY_EIGHTS, TOP, LANES, RUN, FEATURES)
    else:
        program = (chunk - chunks) * tl.num_programs(0) + tl.program_id(0)
        read_block(program // blocks_across, program % blocks_across, stored, weight, by_group, log_gain, number, root, rows,
                   columns, bytes_a_row, groups, group, GROUPS, GAIN, PACKED, WIDTH, LARGEST, MEMORY_BITS, SPARE_BITS, ROWS,
                   BYTES)


_launch_both = Launcher(_both_kernel)


class _Both(NamedTuple):
    """How one kind of weight and values is prepared."""

    rounding: activations.Rounding
    reading: levels.Reading
    grid: tuple[int, int, int]
    last: tuple[int, int]  # chunks, blocks across
    constants: dict[str, Any]


_both: dict[Hashable, _Both | None] = {}


def read_and_quantize(weight: StoredWeight, values: Tensor, factors: Tensor | None, largest: int, key: NoiseKey,
                      not_finite: Tensor | None = None) -> tuple[Tensor, Quantized]:
    """prepare.read_and_quantize in one launch."""
    kind = levels.kind_of(*weight), activations.kind_of(values, factors, largest, not_finite)
    both = _both[kind] if kind in _both else _both_of(kind, weight, values, factors, largest, not_finite)
    if both is None or key.first:
        return NotImplemented
    values = values.contiguous()
    quantized, arguments = activations.room_for(values, factors, both.rounding.runs, key, not_finite)
    read, more = levels.room_for(weight.stored, weight.dtype, both.reading, weight.scaling)
    aligned = not values.data_ptr() & ALIGNED
    constants = both.constants if aligned else {**both.constants, "ALIGNED": False}
    _launch_both((kind, aligned, width(key)), both.grid, (*arguments, *more, *both.last), constants, num_warps=WARPS,
                 maxnreg=MOST_REGISTERS)
    return read, quantized


def _both_of(kind: Any, weight: StoredWeight, values: Tensor, factors: Tensor | None, largest: int,
             not_finite: Tensor | None) -> _Both | None:
    """How they are prepared together; None where one of them is left to its definition, is too long for it, or is read in
    another order."""
    reading = levels.reading_of(kind[0], *weight)
    rounding = activations.rounding_of(kind[1], values, factors, largest, not_finite)
    both = None
    if reading is not None and rounding is not None and weight.stored.numel() and weight.places == 1:
        across = triton.cdiv(reading.sizes[2], reading.constants["BYTES"])
        more = triton.cdiv(reading.grid[0] * across, rounding.grid[0])
        if rounding.grid[2] == 1 and rounding.runs + more <= MOST:
            both = _Both(rounding, reading, (rounding.grid[0], rounding.runs + more, 1), (rounding.runs, across),
                         {**rounding.constants, **reading.constants})
    _both[kind] = both
    return both
