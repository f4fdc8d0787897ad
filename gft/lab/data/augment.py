"""Augmentation: images that look a little different at each step, a whole batch at once, on the device where it lies.

    light     cropped at random and, if they may be, mirrored: photographs
    strong    the same, in other colours, and every second one with a rectangle of another pasted in: photographs of which
              there are few for a large network
    blended   the same, and every second one with another shining through: where they are learnt by heart even so
    jitter    turned, zoomed and shifted a little: what fills its frame, such as digits
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

AUGMENT = ("none", "light", "strong", "blended", "jitter")
LEAST_AREA = 0.35  # of the image, that a crop keeps
MOST_ASPECT = 4 / 3
MOST_COLOUR = 0.4  # of brightness in deviations, of contrast and of saturation: by how much they may change
PASTED = 0.5  # share of the images that get a piece of another
BLENDED = 0.5  # share of the images that another shines through
MOST_TURN, MOST_ZOOM, MOST_SHIFT = math.radians(12), 0.12, 0.1  # a jitter's: radians, share of the size, likewise


class Changes(NamedTuple):
    """What is to be done to a batch of n images: drawn on the CPU, a few numbers an image. None: nothing of the kind."""

    maps: Tensor | None = None  # (n, 2, 3): resample
    colours: Tensor | None = None  # (3, n): recoloured
    boxes: Tensor | None = None  # (n, 4): mixed
    kept: Tensor | None = None  # (n,): blended

    def to(self, device: torch.device) -> "Changes":
        return Changes(*(None if one is None else one.to(device) for one in self))


def random_changes(how: str, n: int, height: int, width: int,
                   flips: bool,  # whether a mirrored image is still of its class
                   generator: torch.Generator) -> Changes:  # of the CPU
    maps = random_jitters(n, generator) if how == "jitter" else random_crops(n, flips, generator)
    if how not in ("strong", "blended"):
        return Changes(maps)
    colours = 2 * torch.rand(3, n, generator=generator) - 1
    boxes = random_boxes(n, height, width, generator)
    return Changes(maps, colours, boxes, random_blends(n, generator) if how == "blended" else None)


def changed(images: Tensor,  # (n, channels, height, width) float, normalised
            labels: Tensor,  # (n,) int64
            changes: Changes,  # on the same device
            classes: int) -> tuple[Tensor, Tensor]:
    """Images and labels as one step sees them. Where images are mixed, labels become shares of each class, (n, classes)."""
    if changes.maps is not None:
        images = resample(images, changes.maps)
    if changes.colours is not None:
        images = recoloured(images, changes.colours)
    if changes.boxes is not None:
        images, labels = mixed(images, F.one_hot(labels, classes).float(), changes.boxes)
    if changes.kept is not None:
        images, labels = blended(images, labels, changes.kept)
    return images, labels


# ---------------------------------------------------------------------------------------------------- places


def random_crops(n: int, flips: bool, generator: torch.Generator) -> Tensor:
    """(n, 2, 3) affine maps, each from the whole output onto a random rectangle inside the input, [-1, 1] x [-1, 1].

    Its area is uniform between 0.35 and 1 of the image's and its aspect log-uniform between 3/4 and 4/3; a side that
    would be longer than the image's is cut to it. With `flips`, every second one on average is mirrored.
    """
    area, aspect, across, down, mirror = torch.rand(5, n, generator=generator)
    area = LEAST_AREA + (1 - LEAST_AREA) * area
    root = MOST_ASPECT ** (aspect - 0.5)  # sqrt of the aspect
    width, height = (area.sqrt() * root).clamp(max=1), (area.sqrt() / root).clamp(max=1)
    maps = torch.zeros(n, 2, 3)
    maps[:, 0, 0] = torch.where(mirror < 0.5, -width, width) if flips else width
    maps[:, 0, 2] = (2 * across - 1) * (1 - width)
    maps[:, 1, 1] = height
    maps[:, 1, 2] = (2 * down - 1) * (1 - height)
    return maps


def random_jitters(n: int, generator: torch.Generator) -> Tensor:
    """(n, 2, 3) affine maps near the identity: each turns, zooms and shifts by a uniform share of the most it may."""
    turn, zoom, across, down = 2 * torch.rand(4, n, generator=generator) - 1
    turn, zoom = turn * MOST_TURN, 1 + zoom * MOST_ZOOM
    maps = torch.zeros(n, 2, 3)
    maps[:, 0, 0], maps[:, 0, 1] = zoom * turn.cos(), -zoom * turn.sin()
    maps[:, 1, 0], maps[:, 1, 1] = zoom * turn.sin(), zoom * turn.cos()
    maps[:, 0, 2], maps[:, 1, 2] = 2 * MOST_SHIFT * across, 2 * MOST_SHIFT * down  # the image is 2 wide
    return maps


def resample(images: Tensor,  # (n, channels, height, width) float
             maps: Tensor,    # (n, 2, 3)
             ) -> Tensor:
    """Each image seen through its map, at the same size."""
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def middle(images: Tensor,  # (n, channels, height, width) float
           share: float,  # of each side
           ) -> Tensor:
    """The middle of each image at the size of the whole: what is evaluated where training sees crops."""
    maps = torch.tensor([[share, 0, 0], [0, share, 0]], device=images.device)
    return resample(images, maps.expand(len(images), 2, 3))


# ---------------------------------------------------------------------------------------------------- colours


def recoloured(images: Tensor,   # (n, channels, height, width) float, of mean 0 and deviation 1 per channel
               changes: Tensor,  # (3, n) from -1 to 1: brightness, contrast, saturation
               ) -> Tensor:
    """Colour jitter: brightness, contrast (distance from the image's mean) and saturation (distance from grey)."""
    brightness, contrast, saturation = (MOST_COLOUR * changes)[:, :, None, None, None]
    mean = images.mean((1, 2, 3), keepdim=True)
    images = mean + (1 + contrast) * (images - mean) + brightness
    grey = images.mean(1, keepdim=True)
    return grey + (1 + saturation) * (images - grey)


# ---------------------------------------------------------------------------------------------------- pieces of others


def random_boxes(n: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """(n, 4) int64: top, bottom, left and right of a rectangle in each image, empty in half of them on average.

    A share of the area uniform between 0 and 1, of the image's aspect, its middle anywhere, what sticks out cut off: CutMix
    (Yun et al. 2019) for each image by itself.
    """
    pasted, area, down, across = torch.rand(4, n, generator=generator)
    side = torch.where(pasted < PASTED, area.sqrt(), 0)
    ends = [(middle + sign * side / 2).clamp(0, 1) * size for middle, size in ((down, height), (across, width))
            for sign in (-1, 1)]
    return torch.stack(ends, 1).round().long()


def mixed(images: Tensor,  # (n, channels, height, width)
          shares: Tensor,  # (n, classes) of each class in each image
          boxes: Tensor,   # (n, 4)
          ) -> tuple[Tensor, Tensor]:
    """CutMix: in its box each image shows the one before it in the batch, and its labels are mixed as their areas are."""
    top, bottom, left, right = boxes.t()[:, :, None]
    y, x = (torch.arange(size, device=images.device) for size in images.shape[2:])
    inside = ((top <= y) & (y < bottom))[:, :, None] & ((left <= x) & (x < right))[:, None, :]
    taken = inside.float().mean((1, 2))[:, None]
    return (torch.where(inside[:, None], images.roll(1, 0), images),
            torch.lerp(shares, shares.roll(1, 0), taken))


def random_blends(n: int, generator: torch.Generator) -> Tensor:
    """(n,) how much of itself each image keeps: all of it in half of them on average, else from half to all."""
    blend, kept = torch.rand(2, n, generator=generator)
    return torch.where(blend < BLENDED, (1 + kept) / 2, 1)


def blended(images: Tensor,  # (n, channels, height, width)
            shares: Tensor,  # (n, classes) of each class in each image
            kept: Tensor,    # (n,)
            ) -> tuple[Tensor, Tensor]:
    """Mixup (Zhang et al. 2018): each image and its labels are blended with those two before it in the batch. The one before
    it may have a piece in it already."""
    return (torch.lerp(images.roll(2, 0), images, kept[:, None, None, None]),
            torch.lerp(shares.roll(2, 0), shares, kept[:, None]))
