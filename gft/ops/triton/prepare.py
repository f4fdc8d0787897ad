"""A weight read out and x or grad_output rounded, in one launch: neither waits for the other, and the host launches once."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from gft.ops import prepare
from gft.ops.activations import Quantized
from gft.ops.prepare import Preparer, StoredWeight
from gft.ops.triton import activations, levels
from gft.ops.triton.activations import MOST_REGISTERS, WARPS, quantize_block
from gft.ops.triton.grids import MOST
from gft.ops.triton.launch import ALIGNED, Found, Launcher
from gft.ops.triton.levels import read_block, read_placed_block
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
                 BYTES: tl.constexpr, TURN: tl.constexpr):
    """The first `chunks` rows of programs round, the others read."""
    chunk = tl.program_id(1)
    if chunk < chunks:
        quantize_block(tl.program_id(0), chunk, values, factors, out, squares, not_finite, tokens, features, largest_square,
                       seed, step, noise_stream, call, SIGN, COUNT, ALIGNED, BY_EIGHTS, TOP, LANES, RUN, FEATURES)
    else:
        program = (chunk - chunks) * tl.num_programs(0) + tl.program_id(0)
        read_block(program // blocks_across, program % blocks_across, stored, weight, by_group, log_gain, number, root, rows,
                   columns, bytes_a_row, groups, group, GROUPS, GAIN, PACKED, WIDTH, LARGEST, MEMORY_BITS, SPARE_BITS, ROWS,
                   BYTES, TURN)


@triton.jit(do_not_specialize=[*KEY, "chunks"])
def _both_placed_kernel(values, factors, out, squares, not_finite, tokens, features, largest_square, seed, step,
                        noise_stream, call, stored, weight, by_group, log_gain, number, root, rows, columns, bytes_a_row,
                        groups, group, chunks, blocks_across,
                        SIGN: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr, BY_EIGHTS: tl.constexpr,
                        TOP: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, FEATURES: tl.constexpr,
                        GROUPS: tl.constexpr, GAIN: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
                        LARGEST: tl.constexpr, MEMORY_BITS: tl.constexpr, SPARE_BITS: tl.constexpr, INERTIA: tl.constexpr,
                        PLACES: tl.constexpr, UP_TO: tl.constexpr, CHANNELS: tl.constexpr):
    """The same for a weight that is read out in the order of channels_last images."""
    chunk = tl.program_id(1)
    if chunk < chunks:
        quantize_block(tl.program_id(0), chunk, values, factors, out, squares, not_finite, tokens, features, largest_square,
                       seed, step, noise_stream, call, SIGN, COUNT, ALIGNED, BY_EIGHTS, TOP, LANES, RUN, FEATURES)
    else:
        program = (chunk - chunks) * tl.num_programs(0) + tl.program_id(0)
        row = program // blocks_across
        if row < rows:
            read_placed_block(row, program % blocks_across, stored, weight, by_group, log_gain, number, root, columns,
                              bytes_a_row, groups, group, GROUPS, GAIN, PACKED, WIDTH, LARGEST, MEMORY_BITS, SPARE_BITS,
                              PLACES, UP_TO, CHANNELS)


_launch_both, _launch_both_placed = Launcher(_both_kernel), Launcher(_both_placed_kernel)


class _Both(NamedTuple):
    """How one kind of weight and values is prepared."""

    launch: Launcher
    rounding: activations.Rounding
    reading: levels.Reading
    grid: tuple[int, int, int]
    last: tuple[int, int]  # chunks, blocks across
    constants: dict[str, Any]


_both: dict[Hashable, _Both | None] = {}


def read_and_quantize(weight: StoredWeight, values: Tensor, factors: Tensor | None, largest: int, key: NoiseKey,
                      not_finite: Tensor | None = None) -> tuple[Tensor, Quantized]:
    """prepare.read_and_quantize in one launch."""
    kind = levels.kind_of(weight), activations.kind_of(values, factors, largest, not_finite)
    both = _both[kind] if kind in _both else _both_of(kind, weight, values, factors, largest, not_finite)
    if both is None or key.first:
        return NotImplemented
    values = values.contiguous()
    quantized, arguments = activations.room_for(values, factors, both.rounding.runs, key, not_finite)
    read, more = levels.room_for(weight.stored, weight.dtype, both.reading, weight.scaling)
    aligned = not values.data_ptr() & ALIGNED
    constants = both.constants if aligned else {**both.constants, "ALIGNED": False}
    both.launch((kind, aligned, width(key)), both.grid, (*arguments, *more, *both.last), constants, num_warps=WARPS,
                 maxnreg=MOST_REGISTERS)
    return read, quantized


class _Preparer:
    """prepare.preparer by the launch that Triton has found: what does not change is not looked at again. Whatever is not as
    it was the first time goes through `read_and_quantize`, which checks it."""

    def __init__(self, both: _Both, kind: Any, weight: StoredWeight, values: Tensor, factors: Tensor,
                 not_finite: Tensor | None, largest: int) -> None:
        self.kind, self.launch, self.general = kind, both.launch, (weight, factors, largest, not_finite)
        self.shape, self.dtype, self.device = values.shape, values.dtype, values.device
        (tokens, features), runs = values.shape, both.rounding.runs
        self.q, self.squares = ((tokens, features), (1, tokens)), (runs, features)
        self.read = both.reading.shape, weight.dtype
        self.grid = both.grid
        self.sizes = tokens, features, activations.LARGEST_SQUARED**2
        self.last = weight.scaling.number, weight.scaling.root, *both.reading.sizes, *both.last
        self.found: Found | None = None
        self.widths: tuple[int, int, int] | None = None

    def __call__(self, values: Tensor, key: NoiseKey) -> tuple[Tensor, Quantized]:
        (weight, factors, largest, not_finite), widths = self.general, width(key)
        by_group, log_gain, _, _ = weight.scaling
        at, of_factors, stored = values.data_ptr(), factors.data_ptr(), weight.stored.data_ptr()
        of_groups = 0 if by_group is None else by_group.data_ptr()
        of_gain = 0 if log_gain is None else log_gain.data_ptr()
        counter = 0 if not_finite is None else not_finite.data_ptr()
        if (widths != self.widths or (at | of_factors | stored | of_gain | of_groups | counter) & ALIGNED
                or values.shape != self.shape or values.dtype is not self.dtype or values.device != self.device
                or not values.is_contiguous() or not isinstance(key.step, Tensor) or key.first
                or torch.cuda.current_device() != self.device.index):
            result = prepare.read_and_quantize(weight, values, factors, largest, key, not_finite)
            self.found = self.launch.found((self.kind, True, widths), self.device)
            self.widths = None if self.found is None else widths
            return result
        assert self.found is not None
        run, function, metadata, constants = self.found
        q = torch.empty_strided(*self.q, dtype=torch.int8, device=self.device)
        squares = torch.empty(self.squares, dtype=torch.float32, device=self.device)
        read = torch.empty(self.read[0], dtype=self.read[1], device=self.device)
        of_squares, of_read = squares.data_ptr(), read.data_ptr()
        run(*self.grid, driver.active.get_current_stream(self.device.index), function, metadata, None, None, None,
            at, of_factors, q.data_ptr(), of_squares, counter or of_squares, *self.sizes, key.seed, key.step.data_ptr(),
            key.stream, key.call, stored, of_read, of_groups or of_read, of_gain or of_read, *self.last, *constants)
        return read, Quantized(q, squares)


def preparer(weight: StoredWeight, values: Tensor, factors: Tensor | None, largest: int,
             not_finite: Tensor | None = None) -> Preparer:
    """prepare.preparer: see _Preparer."""
    kind = levels.kind_of(weight), activations.kind_of(values, factors, largest, not_finite)
    both = _both[kind] if kind in _both else _both_of(kind, weight, values, factors, largest, not_finite)
    scales = weight.scaling.by_group
    lie_well = all(one is None or one.is_contiguous() for one in (weight.stored, factors, scales))
    if both is None or factors is None or not lie_well:
        return NotImplemented
    return _Preparer(both, kind, weight, values, factors, not_finite, largest)


def _both_of(kind: Any, weight: StoredWeight, values: Tensor, factors: Tensor | None, largest: int,
             not_finite: Tensor | None) -> _Both | None:
    """How they are prepared together; None where one of them is left to its definition, or is too long for it."""
    reading = levels.reading_of(kind[0], weight)
    rounding = activations.rounding_of(kind[1], values, factors, largest, not_finite)
    both = None
    if reading is not None and rounding is not None and weight.stored.numel():
        across = reading.blocks_across
        more = triton.cdiv(reading.grid[0] * across, rounding.grid[0])
        if rounding.grid[2] == 1 and rounding.runs + more <= MOST:
            both = _Both(_launch_both if weight.places == 1 else _launch_both_placed, rounding, reading,
                         (rounding.grid[0], rounding.runs + more, 1), (rounding.runs, across),
                         {**rounding.constants, **reading.constants})
    _both[kind] = both
    return both
