"""What the kernel of a convolution looks at: patches of quantized images, which the votes' product takes as its x.

A patch is what one position of the output saw, (channels · kernel) integers. So patches repeat each input as often as the
kernel has places; they are made for some images at a time. On a GPU most are made along the width alone, where a kernel of
3 × 3 repeats an input three times: its rows look at the same patches, one or two rows of them further on (`RowPatches`).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product as every
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gft.ops.activations import MeanSquare
from gft.ops.operation import operation
from gft.ops.products import grouped_votes_product, votes_product

ALIGNED = 16  # bytes: images are split where a copy of so many may begin
UNFOLDED_AT_ONCE = 1 << 25  # elements of patches: the scratch of `depthwise_votes`
POSITIONS_A_STEP = 64  # of one image, that a product along rows takes at once
COLUMNS_A_LOAD = 8  # that lie together wherever such a step begins


class Window(NamedTuple):
    """How a kernel moves over an image: a number for each of its one to three dimensions."""

    sizes: tuple[int, ...]  # of the image
    positions: tuple[int, ...]  # at how many the kernel stops
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def places(self) -> int:
        """In the kernel."""
        return math.prod(self.kernel)

    @property
    def sees_one_place(self) -> bool:
        """Does each position see itself and nothing else? Images are their own patches then."""
        return self.places == 1 and not any(self.padding) and max(self.stride) == 1 and self.sizes == self.positions

    def by_rows(self) -> "Window | None":
        """The window that sees one row of the kernel, at each row of the image and of its edge that any of them sees. None
        where the kernel has one row or stops at every other one, or where rows and images of the output are not whole steps
        of the product that reads such patches (triton/votes.py)."""
        if len(self.sizes) != 2 or self.kernel[0] == 1 or self.stride[0] > 1:
            return None
        (height, width), (down, across) = self.positions, self.kernel
        if height * width % POSITIONS_A_STEP or width % COLUMNS_A_LOAD:
            return None
        rows = height + (down - 1) * self.dilation[0]
        return self._replace(positions=(rows, width), kernel=(1, across), dilation=(1, self.dilation[1]))

    def in_three_dimensions(self) -> "Window":
        """The same with a depth, and a height, of 1 where there is none."""
        missing = 3 - len(self.sizes)
        one, nothing = (1,) * missing, (0,) * missing
        return Window(one + self.sizes, one + self.positions, one + self.kernel, one + self.stride, nothing + self.padding,
                      one + self.dilation)

    def split(self, images: Tensor,  # (n · sizes, channels)
              single: Tensor,  # (n · positions, features)
              most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Some images at a time, and what belongs to them: equal parts, whose patches have about `most` elements each."""
        seen, positions = math.prod(self.sizes), math.prod(self.positions)
        count = len(images) // seen
        parts = -(-count * images.shape[1] * self.places * positions // most)
        aligned = ALIGNED // math.gcd(ALIGNED, seen, positions)
        at_once = -(-count // max(parts, 1))
        at_once = -(-at_once // aligned) * aligned if at_once >= aligned else max(at_once, 1)
        if at_once >= count:
            return iter(((images, single),) if count else ())
        return zip(images.split(at_once * seen), single.split(at_once * positions), strict=True)


class Unfolded(NamedTuple):
    """Patches of images that are not made yet, as a depthwise convolution may not need them: a channel is a group."""

    images: Tensor  # (n · sizes, channels) int8
    window: Window

    @property
    def groups(self) -> int:
        return self.images.shape[1]

    def by_group(self, single: Tensor) -> tuple[Tensor, Tensor]:
        """(groups, n · positions, kernel), and likewise what meets them, (n · positions, rows)."""
        made = patches(self.images, self.window).unflatten(1, (self.groups, self.window.places)).transpose(0, 1)
        return made, single.unflatten(1, (self.groups, single.shape[1] // self.groups)).transpose(0, 1)


class RowPatches(NamedTuple):
    """Patches that are made along the width alone."""

    made: Tensor  # (n · rows, with those of the edge · positions of a row, channels · kernel's width) int8
    window: Window  # the whole one

    def whole(self) -> Tensor:  # (n · positions, channels · kernel) int8
        """The patches that they stand for."""
        (height, width), (down, across), further = self.window.positions, self.window.kernel, self.window.dilation[0]
        rows = self.made.unflatten(0, (-1, height + (down - 1) * further, width)).unflatten(3, (-1, across))
        by_row = [rows[:, row * further : row * further + height] for row in range(down)]
        return torch.stack(by_row, 4).flatten(0, 2).flatten(1)


@operation
def patches(images: Tensor,  # (n · sizes, channels) int8
            window: Window) -> Tensor:  # (n · positions, channels · kernel) int8
    """What each position looked at; zeros where it looked beyond the edge."""
    images = images.reshape(-1, *window.sizes, images.shape[1])
    if any(window.padding):
        images = F.pad(images, (0, 0, *(pad for one in reversed(window.padding) for pad in (one, one))))
    found = images.new_empty(len(images), *window.positions, images.shape[-1], window.places)
    for number, place in enumerate(every(*(range(size) for size in window.kernel))):
        seen = tuple(slice(at * d, at * d + (n - 1) * s + 1, s)
                     for at, d, n, s in zip(place, window.dilation, window.positions, window.stride, strict=True))
        found[..., number] = images[(slice(None), *seen)]
    return found.view(-1, images.shape[-1] * window.places)


@operation
def depthwise_votes(single: Tensor,  # (n · positions, rows) int8
                    images: Tensor,  # (n · sizes, channels) int8; a channel has as many rows as any other
                    window: Window,
                    into: Tensor) -> Tensor:  # (rows, kernel) int32 or int64 -> itself
    """Add the votes of a convolution whose every group is one channel: single^T · patches of the row's own channel."""
    for some_images, some in window.split(images, single, UNFOLDED_AT_ONCE):
        x, rows = Unfolded(some_images, window).by_group(some)
        into += grouped_votes_product(rows, x, into.dtype).flatten(0, 1)
    return into


@operation
def row_votes(single: Tensor,  # (n · positions, rows) int8
              made: Tensor,  # RowPatches.made
              window: Window,
              into: Tensor,  # (rows, channels · kernel) int32 or int64 -> itself
              means: Sequence[MeanSquare] = ()) -> Tensor:  # taken in passing
    """Add the votes of a convolution, single^T · patches, from patches that are made along the width alone."""
    return votes_product(single, RowPatches(made, window).whole(), into, means)
