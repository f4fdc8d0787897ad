"""MNIST, flat or as images. A folder torchvision made (MNIST/raw/…, unpacked or not) is used as it is."""

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gft.lab.data.dataset import Dataset
from gft.lab.data.folder import DataError, Source, content_of, data_folder, retrieve

MNIST_FILES = (
    Source("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    Source("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    Source("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    Source("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
)
MNIST_MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
MNIST_TRAIN = 50_000  # the paper trains on 50,000 of the 60,000 and validates on the other 10,000
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081


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
    found = find_mnist()
    if found is not None:
        return found
    folder = data_folder() / "mnist"
    mend = (f"put the four *-ubyte.gz files into {folder}, or set GFT_DATA to a folder that has mnist/ or torchvision's "
            "MNIST/raw/")
    return {file.name: retrieve("MNIST", file, MNIST_MIRRORS, folder, progress, mend) for file in MNIST_FILES}


def _read_idx(path: Path, md5: str) -> np.ndarray:
    import pooch

    if path.suffix == ".gz" and pooch.file_hash(str(path), alg="md5") != md5:
        raise DataError(f"{path} is damaged (its checksum is not MNIST's); delete it and run: gft data fetch mnist")
    return parse_idx(gzip.decompress(content_of(path)) if path.suffix == ".gz" else content_of(path), path)


def parse_idx(raw: bytes, path: Path) -> np.ndarray:
    """idx: two zeros, the type (8: bytes), the number of dimensions, each size as four bytes, the values."""
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise DataError(f"{path} is not an idx file of bytes; delete it and run: gft data fetch mnist")
    start = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[place : place + 4], "big") for place in range(4, start, 4)]  # exact: no product overflows
    if not 1 <= len(shape) <= 3 or len(raw) - start != math.prod(shape):
        raise DataError(f"{path} is cut short or damaged (it says {len(shape)} dimensions, and has {len(raw)} bytes); "
                        "delete it and run: gft data fetch mnist")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _arrays() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (60,000, 28, 28) uint8, their labels, the test's."""
    files = fetch_mnist()
    x, y, test_x, test_y = (torch.from_numpy(_read_idx(files[file.name], file.md5).copy()) for file in MNIST_FILES)
    for images, labels, least, file in ((x, y, MNIST_TRAIN + 1, MNIST_FILES[0]), (test_x, test_y, 1, MNIST_FILES[2])):
        mend = "delete it and its labels and run: gft data fetch mnist"
        of_one = images.shape[1:]
        if images.dim() != 3 or of_one != x.shape[1:] or not of_one.numel() or labels.shape != (len(images),):
            raise DataError(f"{files[file.name]} has images of {tuple(images.shape)} and labels of {tuple(labels.shape)}; "
                            f"{mend}")
        if len(images) < least:
            raise DataError(f"{files[file.name]} has {len(images)} images and at least {least} are needed; {mend}")
        if int(labels.max()) > 9:
            raise DataError(f"{files[file.name]} has an image labelled {int(labels.max())}, and digits end at 9; {mend}")
    return x, y.long(), test_x, test_y.long()


def load_mnist() -> Dataset:
    """(n, 784) floats, normalised."""
    x, y, test_x, test_y = _arrays()

    def features(images: Tensor) -> Tensor:
        return (images.flatten(1).float() / 255 - MNIST_MEAN) / MNIST_STD

    x = features(x)
    return Dataset((x[:MNIST_TRAIN], y[:MNIST_TRAIN]), (x[MNIST_TRAIN:], y[MNIST_TRAIN:]), (features(test_x), test_y))


def load_mnist_images() -> Dataset:
    """(n, 1, 28, 28) bytes, normalised batch by batch; the same split."""
    x, y, test_x, test_y = _arrays()
    x, test_x = x.unsqueeze(1), test_x.unsqueeze(1)
    return Dataset((x[:MNIST_TRAIN], y[:MNIST_TRAIN]), (x[MNIST_TRAIN:], y[MNIST_TRAIN:]), (test_x, test_y),
                   mean=(MNIST_MEAN,), std=(MNIST_STD,))
