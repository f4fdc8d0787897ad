"""Data to classify: features and labels of three splits, and the batches made of them.

Features are floats, ready for use, or images as bytes. A batch of bytes becomes floats, normalised and perhaps augmented,
on the device where the bytes lie: a whole batch at once, which is cheaper than any pool of loader processes.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gft.lab.data.augment import AUGMENT, Changes, changed, random_changes
from gft.lab.data.folder import DataError

SPLITS = ("train", "val", "test")


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

    def batches(self, batch: int, seed: int, first_step: int = 0, augment: str = "none",
                compiled: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless training batches. Epoch e is shuffled by (seed, e) alone and step s augmented by (seed, s) alone, so
        batch `first_step` is found without having drawn those before it. The last batch of an epoch is as short as it
        falls.

        augment: "none", or one of those that augment.py describes. "strong" and "blended" mix images, and yield
        shares of each class, (n, classes), for labels.
        compiled: make whole batches by a few fused kernels, which takes some seconds at first.
        """
        if augment not in AUGMENT:
            raise DataError(f"augment={augment!r}: choose one of {', '.join(AUGMENT)}")
        if augment != "none" and len(self.shape) != 3:
            raise DataError(f"augment={augment!r} needs images and these are flat features; choose augment=none")
        return self._batches(batch, seed, first_step, augment, torch.compile(self.seen) if compiled else self.seen)

    def _batches(self, batch: int, seed: int, step: int, augment: str,
                 whole: Callable[..., tuple[Tensor, Tensor]],  # `seen`, for batches that are not short
                 ) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.train
        while True:
            epoch, start = divmod(step, self.per_epoch(batch))
            generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
            order = torch.randperm(len(x), generator=generator).to(x.device)
            for some in order.split(batch)[start:]:
                changes = Changes()
                if augment != "none":
                    _, height, width = self.shape
                    changes = random_changes(augment, len(some), height, width, self.flips, seeded("augment", seed, step))
                yield (whole if len(some) == batch else self.seen)(x[some], y[some], changes.to(x.device))
                step += 1

    def seen(self, x: Tensor, y: Tensor, changes: Changes) -> tuple[Tensor, Tensor]:
        """Some stored images and labels as a training step sees them."""
        return changed(self.normalised(x), y, changes, self.classes)

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
