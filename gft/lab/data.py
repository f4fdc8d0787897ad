"""Data sets as tensors in memory: found in a folder, or fetched once with a checksum.

Looked for under $GFT_DATA, or the user's cache folder if that is not set. A folder torchvision made (MNIST/raw/…,
unpacked or not) is used as it is.
"""

import gzip
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """One file of a data set, as its publisher names it."""

    name: str
    md5: str


MNIST_FILES = (
    Source("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    Source("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    Source("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    Source("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
)
MNIST_MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
MNIST_TRAIN = 50_000  # the paper trains on 50,000 of the 60,000 and validates on the other 10,000
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081


class DataError(ValueError):
    """A data set that is missing or damaged, and what to do."""


@dataclass(frozen=True)
class Dataset:
    """Features (n, inputs) and labels (n,) of each split."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int = 10

    @property
    def inputs(self) -> int:
        return self.train[0].shape[1]

    def to(self, device: torch.device) -> "Dataset":
        def move(split: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return split[0].to(device), split[1].to(device)

        return Dataset(move(self.train), move(self.val), move(self.test), self.classes)

    def batches(self, batch: int, seed: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless training batches. Epoch e is shuffled by (seed, e) alone, so batch `first_step` is found without
        having drawn those before it. The last batch of an epoch is as short as it falls."""
        x, y = self.train
        per_epoch = -(-len(x) // batch)
        step = first_step
        while True:
            epoch, start = divmod(step, per_epoch)
            generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
            order = torch.randperm(len(x), generator=generator).to(x.device)
            for some in order.split(batch)[start:]:
                yield x[some], y[some]
                step += 1


# ---------------------------------------------------------------------------------------------------- where files are


def data_folder() -> Path:
    if os.environ.get("GFT_DATA"):
        return Path(os.environ["GFT_DATA"]).expanduser()
    import pooch

    return Path(pooch.os_cache("gft"))


def find_mnist(folder: Path | None = None) -> dict[str, Path] | None:
    """Publisher's file name -> where it lies, packed or unpacked; None unless all four are there."""
    folder = folder or data_folder()
    found = {}
    for source in MNIST_FILES:
        names = (source.name, source.name.removesuffix(".gz"))
        places = (folder / sub / name for sub in ("mnist", "MNIST/raw") for name in names)
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            return None
        found[source.name] = place
    return found


def fetch_mnist(progress: bool = True) -> dict[str, Path]:
    """Find MNIST or download it into the data folder, checksums checked."""
    import pooch

    found = find_mnist()
    if found is not None:
        return found
    folder = data_folder() / "mnist"
    files = {}
    for source in MNIST_FILES:
        why = ""
        for mirror in MNIST_MIRRORS:
            try:
                files[source.name] = Path(pooch.retrieve(mirror + source.name, f"md5:{source.md5}", source.name, folder,
                                                         progressbar=progress))
                break
            except OSError as error:  # the network's errors are of this kind; the next mirror may be up
                why = f"{type(error).__name__}: is there a network?"
            except ValueError as error:  # pooch's own: a wrong checksum
                why = str(error).splitlines()[0]
        else:
            raise DataError(f"MNIST is not in {data_folder()} and could not be fetched ({why}); put the "
                            f"four *-ubyte.gz files into {folder}, or set GFT_DATA to a folder that has mnist/ or "
                            "torchvision's MNIST/raw/")
    return files


def _read_idx(path: Path, md5: str) -> np.ndarray:
    import pooch

    if path.suffix == ".gz" and pooch.file_hash(str(path), alg="md5") != md5:
        raise DataError(f"{path} is damaged (its checksum is not MNIST's); delete it and run: gft data fetch mnist")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[2] != 8:
        raise DataError(f"{path} is not an idx file of bytes; delete it and run: gft data fetch mnist")
    shape = np.frombuffer(raw, ">i4", raw[3], 4)
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])
    if values.size != shape.prod():
        raise DataError(f"{path} is cut short; delete it and run: gft data fetch mnist")
    return values.reshape(shape)


def load_mnist() -> Dataset:
    files = fetch_mnist()
    arrays = [torch.from_numpy(_read_idx(files[source.name], source.md5).copy()) for source in MNIST_FILES]

    def features(images: Tensor) -> Tensor:
        return (images.flatten(1).float() / 255 - MNIST_MEAN) / MNIST_STD

    x, y, test_x, test_y = features(arrays[0]), arrays[1].long(), features(arrays[2]), arrays[3].long()
    return Dataset((x[:MNIST_TRAIN], y[:MNIST_TRAIN]), (x[MNIST_TRAIN:], y[MNIST_TRAIN:]), (test_x, test_y))


def load_digits() -> Dataset:
    """scikit-learn's 1,797 digits of 8x8, which come with the package: 1,200 to train, 297 to validate, 300 to test."""
    from sklearn.datasets import load_digits as sklearn_digits

    digits = sklearn_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))  # type: ignore[attr-defined]
    x = (torch.from_numpy(digits.data).float()[order] - 4.9) / 6.0  # type: ignore[attr-defined]
    y = torch.from_numpy(digits.target).long()[order]  # type: ignore[attr-defined]
    return Dataset((x[:1200], y[:1200]), (x[1200:1497], y[1200:1497]), (x[1497:], y[1497:]))


LOADERS = {"mnist": load_mnist, "digits": load_digits}


def load(name: str) -> Dataset:
    if name not in LOADERS:
        raise DataError(f"data={name!r}: choose one of {', '.join(LOADERS)}")
    return LOADERS[name]()
