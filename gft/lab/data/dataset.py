"""Data to classify: features and labels of three splits, and the batches made of them.

Features are floats, ready for use, or images as bytes. A batch of bytes becomes floats, normalised and perhaps augmented,
on the device where the bytes lie: a whole batch at once, which is cheaper than any pool of loader processes.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gft.lab.data.folder import DataError

AUGMENT = ("none", "light", "jitter")
SPLITS = ("train", "val", "test")
LEAST_AREA = 0.35  # of the image, that a crop keeps
MOST_ASPECT = 4 / 3
MOST_TURN, MOST_ZOOM, MOST_SHIFT = math.radians(12), 0.12, 0.1  # a jitter's: radians, share of the size, likewise


@dataclass(frozen=True)
class Dataset:
    """Features (n, inputs) float, or (n, channels, height, width) uint8, and labels (n,) of each split."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int = 10
    mean: tuple[float, ...] | None = None  # per channel, of values from 0 to 1; None: features are used as they are
    std: tuple[float, ...] | None = None
    flips: bool = False  # whether a mirrored image is still of its class: a dog is, a digit is not

    def __post_init__(self) -> None:
        if self.train[0].dtype == torch.uint8 and (self.mean is None or self.std is None):
            raise DataError("uint8 images need a mean and a std per channel; give Dataset(…, mean=…, std=…)")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample: (inputs,) or (channels, height, width)."""
        return tuple(self.train[0].shape[1:])

    @property
    def inputs(self) -> int:
        """Numbers in one sample."""
        return math.prod(self.shape)

    def to(self, device: torch.device | str) -> "Dataset":
        moved: dict[int, Tensor] = {}  # a split that serves twice is moved once

        def move(split: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, y = (moved.setdefault(id(part), part.to(device)) for part in split)
            return x, y

        return dataclasses.replace(self, train=move(self.train), val=move(self.val), test=move(self.test))

    def per_epoch(self, batch: int) -> int:
        """Training batches that make one pass; the last may be short."""
        return -(-len(self.train[0]) // batch)

    def batches(self, batch: int, seed: int, first_step: int = 0, augment: str = "none") -> Iterator[tuple[Tensor, Tensor]]:
        """Endless training batches. Epoch e is shuffled by (seed, e) alone and step s augmented by (seed, s) alone, so
        batch `first_step` is found without having drawn those before it. The last batch of an epoch is as short as it
        falls.

        augment: "none"; "light": images are cropped at random and, if they may be (`flips`), mirrored, as suits photographs;
        "jitter": turned, zoomed and shifted a little, as suits what fills its frame, such as digits.
        """
        if augment not in AUGMENT:
            raise DataError(f"augment={augment!r}: choose one of {', '.join(AUGMENT)}")
        if augment != "none" and len(self.shape) != 3:
            raise DataError(f"augment={augment!r} needs images and these are flat features; choose augment=none")
        return self._batches(batch, seed, first_step, augment)

    def _batches(self, batch: int, seed: int, step: int, augment: str) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.train
        while True:
            epoch, start = divmod(step, self.per_epoch(batch))
            generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
            order = torch.randperm(len(x), generator=generator).to(x.device)
            for some in order.split(batch)[start:]:
                features = self.normalised(x[some])
                if augment != "none":
                    generator = seeded("augment", seed, step)
                    maps = random_crops(len(some), self.flips, generator) if augment == "light" else \
                        random_jitters(len(some), generator)
                    features = resample(features, maps)
                yield features, y[some]
                step += 1

    def evaluation_batches(self, split: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over "train", "val" or "test", in order, never augmented."""
        x, y = named_split(self, split)
        for some_x, some_y in zip(x.split(batch), y.split(batch), strict=True):
            yield self.normalised(some_x), some_y

    def normalised(self, x: Tensor) -> Tensor:
        """Bytes -> floats of mean 0 and deviation 1 per channel; floats as they are."""
        if self.mean is None or self.std is None:
            return x
        mean, std = (torch.tensor(values, device=x.device).view(-1, 1, 1) for values in (self.mean, self.std))
        return x.float().div_(255).sub_(mean).div_(std)


def named_split(data: object, split: str):
    if split not in SPLITS:
        raise DataError(f"split={split!r}: choose one of {', '.join(SPLITS)}")
    return getattr(data, split)


def seeded(*key: str | int) -> torch.Generator:
    """A generator of the CPU that depends on `key` alone. Hashed, because torch's seeds it from 32 bits only, so that
    sums of multiples would meet."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "little"))


# ---------------------------------------------------------------------------------------------------- augmentation


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
    grid = F.affine_grid(maps.to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
