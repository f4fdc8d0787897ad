"""Data sets as tensors in memory: found in a folder, or fetched once with a checksum.

    mnist, digits                  flat features         Dataset
    mnist-images, digits-images    the same, as images   Dataset
    imagenette, imagenette-SIZE    photographs           Dataset
    shakespeare, verses            characters            Text
    text:PATH                      any text file         Text

`load(name)` gives one, `found(name)` says where it lies, `fetch(name)` downloads it if need be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gft.errors import shortened
from gft.lab.data.augment import AUGMENT
from gft.lab.data.dataset import SPLITS, Dataset
from gft.lab.data.digits import load_digits, load_digits_images
from gft.lab.data.folder import DataError, Source, data_folder
from gft.lab.data.imagenette import fetch_imagenette, find_imagenette, load_imagenette
from gft.lab.data.mnist import (
    MNIST_FILES,
    MNIST_MEAN,
    MNIST_MIRRORS,
    MNIST_STD,
    MNIST_TRAIN,
    _read_idx,
    fetch_mnist,
    find_mnist,
    load_mnist,
    load_mnist_images,
)
from gft.lab.data.text import Text, fetch_shakespeare, find_shakespeare, load_shakespeare, load_text, load_verses

__all__ = [
    "AUGMENT", "LOADERS", "MNIST_FILES", "MNIST_MEAN", "MNIST_MIRRORS", "MNIST_STD", "MNIST_TRAIN", "SPLITS", "DataError",
    "Dataset", "Entry", "Source", "Text", "_read_idx", "check", "data_folder", "embedded", "fetch", "fetch_mnist",
    "find_mnist", "found", "load", "load_digits", "load_digits_images", "load_imagenette", "load_mnist", "load_mnist_images",
    "load_shakespeare", "load_text", "load_verses", "names",
]


@dataclass(frozen=True)
class Entry:
    """One data set."""

    load: Callable[..., Dataset | Text]
    find: Callable[[], str | None]  # where it lies; None: not here yet
    fetch: Callable[[bool], object] | None = None  # find or download it; None: there is nothing to download
    is_text: bool = False


def _place_of_mnist() -> str | None:
    files = find_mnist()
    return str(next(iter(files.values())).parent) if files else None


def _path(find: Callable[[], Path | None]) -> Callable[[], str | None]:
    return lambda: str(path) if (path := find()) else None


def _imagenette(size: int) -> Entry:
    return Entry(partial(load_imagenette, size), _path(partial(find_imagenette, size)), partial(fetch_imagenette, size=size))


ENTRIES = {
    "mnist": Entry(load_mnist, _place_of_mnist, fetch_mnist),
    "mnist-images": Entry(load_mnist_images, _place_of_mnist, fetch_mnist),
    "digits": Entry(load_digits, lambda: "scikit-learn, which brings it"),
    "digits-images": Entry(load_digits_images, lambda: "scikit-learn, which brings it"),
    "imagenette": _imagenette(224),
    "shakespeare": Entry(load_shakespeare, _path(find_shakespeare), fetch_shakespeare, is_text=True),
    "verses": Entry(load_verses, lambda: "gft, which brings it", is_text=True),
}
LOADERS = {name: entry.load for name, entry in ENTRIES.items()}
names = tuple(ENTRIES)


def _entry(name: str) -> Entry:
    if name in ENTRIES:
        return ENTRIES[name]
    kind, _, size = name.partition("-")
    if kind == "imagenette" and size.isdecimal():
        return _imagenette(int(size))
    kind, _, path = name.partition(":")
    if kind == "text" and path:
        file = Path(path).expanduser()
        return Entry(partial(load_text, file), lambda: str(file) if file.is_file() else None, is_text=True)
    raise DataError(f"no data set {shortened(name)}; choose one of {', '.join(names)}, imagenette-SIZE or text:PATH")


def check(name: str) -> None:
    """Refuse a name that `load` would not know, without loading anything."""
    _entry(name)


def load(name: str, context: int | None = None) -> Dataset | Text:
    """The data set `name`, on the CPU. context: characters in a sample of text, its own default if None."""
    entry = _entry(name)
    if context is None:
        return entry.load()
    if not entry.is_text:
        raise DataError(f"context={context} is for text and {name} is none; leave it out")
    return entry.load(context=context)


def found(name: str) -> str | None:
    """Where it lies, or None if it must be fetched."""
    return _entry(name).find()


def embedded(name: str) -> bool:
    """Whether it needs no download."""
    return _entry(name).fetch is None


def fetch(name: str, progress: bool = True) -> str:
    """Find a data set, or download it with its checksums; where it lies."""
    entry = _entry(name)
    if entry.fetch is not None:
        entry.fetch(progress)
    place = entry.find()
    if place is None:
        raise DataError(f"{name} is not a file, and there is nothing to fetch; give text:PATH with the path of a text file")
    return place
