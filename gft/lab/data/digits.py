"""scikit-learn's 1,797 digits of 8x8, which come with the package: 1,200 to train, 297 to validate, 300 to test."""

import torch
from torch import Tensor

from gft.lab.data.dataset import Dataset

MEAN, STD = 4.9, 6.0  # of its values from 0 to 16
DIGITS_TRAIN = 1200


def _arrays() -> tuple[Tensor, Tensor]:
    """(1797, 8, 8) floats from 0 to 16, and labels, shuffled once and for all."""
    from sklearn.datasets import load_digits as sklearn_digits

    digits = sklearn_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))  # type: ignore[attr-defined]
    x = torch.from_numpy(digits.images).float()[order]  # type: ignore[attr-defined]
    return x, torch.from_numpy(digits.target).long()[order]  # type: ignore[attr-defined]


def _dataset(x: Tensor, y: Tensor, mean: tuple[float] | None = None, std: tuple[float] | None = None) -> Dataset:
    train, val, test = slice(DIGITS_TRAIN), slice(DIGITS_TRAIN, 1497), slice(1497, None)
    return Dataset((x[train], y[train]), (x[val], y[val]), (x[test], y[test]), mean=mean, std=std)


def load_digits() -> Dataset:
    """(n, 64) floats, normalised."""
    x, y = _arrays()
    return _dataset((x.flatten(1) - MEAN) / STD, y)


def load_digits_images() -> Dataset:
    """(n, 1, 8, 8) bytes, normalised batch by batch; the same split."""
    x, y = _arrays()
    return _dataset((x * (255 / 16)).round().byte().unsqueeze(1), y, mean=(MEAN / 16,), std=(STD / 16,))
