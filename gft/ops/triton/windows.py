"""Patches of quantized images, laid out as the votes' product reads them, and the votes of depthwise convolutions without.

Neighbouring threads have neighbouring positions, or neighbouring words of four: what a warp loads and stores lies together,
whether or not a shifted row begins where a wider load could.
"""

import math
from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.ops import checks
from gft.ops.triton.grids import spread, spread_block
from gft.ops.triton.launch import Launcher
from gft.ops.triton.votes import features_first
from gft.ops.windows import ALIGNED, Window

BLOCK, WARPS = 1024, 4  # positions, or words of them, of a program

MOST_POSITIONS = 2**31 - 2**20  # that a kernel counts in 32 bits, with room for an edge

# Not one compiled kernel for each size of an image.
SIZES = ["positions", "depth", "height", "width", "depth_out", "height_out", "width_out", "stride_d", "stride_h", "stride_w",
         "padding_d", "padding_h", "padding_w", "dilation_d", "dilation_h", "dilation_w"]


@triton.jit
def _corner(position, depth, height, width, depth_out, height_out, width_out, stride_d, stride_h, stride_w,
            padding_d, padding_h, padding_w, VOLUME: tl.constexpr):
    """Where the first place of the kernel lies when it is at a position: its depth, row and column in the image, which may
    be before the edge, and how far it is from the first image's first byte."""
    line = position // width_out
    column = (position - line * width_out) * stride_w - padding_w
    image = line // height_out
    row = (line - image * height_out) * stride_h - padding_h
    plane, z = image, 0
    if VOLUME:
        image = plane // depth_out
        z = (plane - image * depth_out) * stride_d - padding_d
        plane = image * depth + z
    return z, row, column, (plane * height + row) * width + column


@triton.jit
def _between(number, end):
    """0 <= number < end, in one comparison."""
    return number.to(tl.uint32) < end.to(tl.uint32)


@triton.jit(do_not_specialize=[*SIZES, "channel_stride", "out_stride", "kernel_d", "kernel_h"])
def _patches_kernel(images, out, channel_stride, out_stride, positions, depth, height, width,
                    depth_out, height_out, width_out, stride_d, stride_h, stride_w, padding_d, padding_h, padding_w,
                    dilation_d, dilation_h, dilation_w, kernel_d, kernel_h,
                    KERNEL_W: tl.constexpr, WORDS: tl.constexpr, VOLUME: tl.constexpr, BLOCK: tl.constexpr):
    """All places of the kernel for a run of positions and one channel: where they are is found out once. WORDS: so many
    positions at a time, 4 or 8, in images and patches whose rows are whole words: then all of a row's words are shifted
    alike."""
    channel = tl.program_id(0).to(tl.int64)
    unit = spread_block() * BLOCK + tl.arange(0, BLOCK)
    inside = unit < out_stride // WORDS
    images += channel * channel_stride
    target = out + channel * (kernel_d * kernel_h * KERNEL_W) * out_stride
    padding = padding_w
    if WORDS > 1:
        WORD: tl.constexpr = tl.uint64 if WORDS == 8 else tl.uint32
        images = images.to(tl.pointer_type(WORD), bitcast=True)
        target = target.to(tl.pointer_type(WORD), bitcast=True)
        # Columns are counted in words, from the position's own on.
        width, width_out, padding = width // WORDS, width_out // WORDS, 0
    target += unit
    z, row, column, at = _corner(unit, depth, height, width, depth_out, height_out, width_out, stride_d, stride_h, stride_w,
                                 padding_d, padding_h, padding, VOLUME)
    source, live = images + at, unit < positions // WORDS
    for i in range(kernel_d):
        for j in range(kernel_h):
            deep, down = i * dilation_d, j * dilation_h
            further = (deep * height + down) * width
            ok = live & _between(row + down, height)
            if VOLUME:
                ok &= _between(z + deep, depth)
            for k in tl.static_range(KERNEL_W):
                right = k * dilation_w
                if WORDS > 1:
                    # No load may begin inside a word: of two words the bytes between.
                    words = (right - padding_w) >> (3 if WORDS == 8 else 2)
                    bits = (((right - padding_w) & (WORDS - 1)) * 8).to(WORD)
                    low = tl.load(source + (further + words), mask=ok & _between(column + words, width), other=0)
                    more = ok & _between(column + (words + 1), tl.where(bits > 0, width, 0))
                    high = tl.load(source + (further + words) + 1, mask=more, other=0)
                    tl.store(target, (low >> bits) | ((high << (8 * WORDS - 1 - bits)) << 1), mask=inside)
                else:
                    one = tl.load(source + (further + right), mask=ok & _between(column + right, width), other=0)
                    tl.store(target, one, mask=inside)
                target += out_stride // WORDS


_launch_patches = Launcher(_patches_kernel)


@cache
def _arguments(window: Window) -> tuple[tuple[int, ...], dict[str, int]]:
    """A window in a kernel's words: its numbers, in the kernels' order, and its constants."""
    *kernel, kernel_w = window.kernel
    numbers = (*window.sizes, *window.positions, *window.stride, *window.padding, *window.dilation, *kernel)
    return numbers, {"KERNEL_W": kernel_w,
                     "VOLUME": window.sizes[0] > 1 or window.positions[0] > 1 or window.kernel[0] > 1}


def _check(images: Tensor, window: Window) -> int:
    """How many images there are; refuse what is not whole images."""
    checks.check_matrix("the images", images)
    seen = math.prod(window.sizes)
    if seen < 1 or images.shape[0] % seen:
        raise UsageError(f"{images.shape[0]} positions are not images of {' × '.join(map(str, window.sizes))}")
    return images.shape[0] // seen


class _Patches(NamedTuple):
    """How patches of one kind of images are made."""

    columns: int
    positions: int
    stride: int  # from a column's patches to the next one's
    key: Hashable
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


_plans: dict[Hashable, _Patches | None] = {}


def patches(images: Tensor, window: Window) -> Tensor:
    """Unfold images (windows.patches); the positions of a patch's element lie side by side, as tensor cores want them."""
    checks.check_matrix("the images", images)
    by_channel = features_first(images)
    channel_stride, in_words = by_channel.stride(0), math.gcd(by_channel.data_ptr(), 8)
    kind = images.shape, images.dtype, window, channel_stride, in_words
    plan = _plans[kind] if kind in _plans else _plan_of(kind, images, window, channel_stride, in_words)
    if plan is None:
        return NotImplemented
    out = torch.empty(plan.columns, plan.stride, dtype=torch.int8, device=images.device)
    _launch_patches(plan.key, plan.grid, (by_channel, out, *plan.numbers), plan.constants, num_warps=WARPS)
    return out[:, : plan.positions].t()


def _plan_of(kind: Hashable, images: Tensor, window: Window, channel_stride: int, in_words: int) -> _Patches | None:
    """How such images are unfolded, once they have been checked; None for what is left to the definition."""
    count = _check(images, window)
    positions, columns = count * math.prod(window.positions), images.shape[1] * window.places
    plan = None
    if checks.are_int8(images) and positions and columns and max(positions, len(images)) < MOST_POSITIONS:
        window = window.in_three_dimensions()
        stride = triton.cdiv(positions, ALIGNED) * ALIGNED  # so that each begins where a wide load can
        words = math.gcd(in_words, window.sizes[2], window.positions[2], channel_stride) if window.stride[2] == 1 else 1
        words = words if words >= 4 else 1
        numbers, of_window = _arguments(window)
        constants = {"KERNEL_W": of_window["KERNEL_W"], "WORDS": words, "VOLUME": of_window["VOLUME"], "BLOCK": BLOCK}
        plan = _Patches(columns, positions, stride, (*constants.values(), _wide(positions, stride, channel_stride)),
                        (images.shape[1], *spread(triton.cdiv(stride // words, BLOCK))),
                        (channel_stride, stride, positions, *numbers), constants)
    _plans[kind] = plan
    return plan


def _wide(*numbers: int) -> tuple[bool, ...]:
    """Which of them are 64-bit numbers to a kernel: a part of a launch's key."""
    return tuple(number >= 1 << 31 for number in numbers)


@triton.jit(do_not_specialize=[*SIZES, "channel_stride", "single_stride", "rows_a_channel", "kernel_d", "kernel_h"])
def _depthwise_kernel(single, images, votes, single_stride, channel_stride, rows_a_channel, positions, depth, height, width,
                      depth_out, height_out, width_out, stride_d, stride_h, stride_w, padding_d, padding_h, padding_w,
                      dilation_d, dilation_h, dilation_w, kernel_d, kernel_h,
                      KERNEL_W: tl.constexpr, VOLUME: tl.constexpr, BLOCK: tl.constexpr):
    """What one run of positions adds to a row's votes."""
    row_number = tl.program_id(0).to(tl.int64)
    single += row_number * single_stride
    images += row_number // rows_a_channel * channel_stride
    votes += row_number * (kernel_d * kernel_h * KERNEL_W)
    position = spread_block() * BLOCK + tl.arange(0, BLOCK)
    live = position < positions
    grad = tl.load(single + position, mask=live, other=0).to(tl.int32)
    z, row, column, at = _corner(position, depth, height, width, depth_out, height_out, width_out, stride_d, stride_h,
                                 stride_w, padding_d, padding_h, padding_w, VOLUME)
    source = images + at
    for i in range(kernel_d):
        for j in range(kernel_h):
            deep, down = i * dilation_d, j * dilation_h
            further = (deep * height + down) * width
            ok = live & _between(row + down, height)
            if VOLUME:
                ok &= _between(z + deep, depth)
            for k in tl.static_range(KERNEL_W):
                right = k * dilation_w
                seen = tl.load(source + (further + right), mask=ok & _between(column + right, width), other=0)
                product = grad * seen.to(tl.int32)
                tl.atomic_add(votes, tl.sum(product).to(votes.dtype.element_ty), sem="relaxed")
                votes += 1


def depthwise_votes(single: Tensor, images: Tensor, window: Window, into: Tensor) -> Tensor:
    """Add the votes of a depthwise convolution (windows.depthwise_votes); no patch is ever written."""
    count = _check(images, window)
    checks.check_matrix("what meets the patches", single)
    positions, (rows, channels) = count * math.prod(window.positions), (single.shape[1], images.shape[1])
    if single.shape[0] != positions or channels < 1 or rows % channels or single.device != images.device:
        raise UsageError(f"{rows} rows of {single.shape[0]} positions on {single.device} do not belong to {channels} "
                         f"channels of {positions} on {images.device}")
    checks.check_tensor("the votes", into, (rows, window.places), into.dtype, images.device)
    if (not checks.are_int8(single, images) or into.dtype not in checks.VOTES or not into.is_contiguous() or not positions
            or max(positions, len(images)) >= MOST_POSITIONS):
        return NotImplemented
    window = window.in_three_dimensions()
    by_row, by_channel = features_first(single), features_first(images)
    numbers, constants = _arguments(window)
    _launch_depthwise((into.dtype, BLOCK, *constants.values(), _wide(by_row.stride(0), by_channel.stride(0))),
                      (rows, *spread(triton.cdiv(positions, BLOCK))),
                      (by_row, by_channel, into, by_row.stride(0), by_channel.stride(0), rows // channels, positions,
                       *numbers), {**constants, "BLOCK": BLOCK}, num_warps=WARPS)
    return into


_launch_depthwise = Launcher(_depthwise_kernel)
