"""Data sets as tensors in memory: found in a folder, or fetched once with a checksum.

    mnist, digits                  flat features         Dataset
    mnist-images, digits-images    the same, as images   Dataset
    imagenette, imagenette-SIZE    photographs           Dataset
    shakespeare, verses            characters            Text
    text:PATH                      any text file         Text
    wiki, wikitext-103, fineweb-edu   tokens             Corpus
    corpus:PATH                    any file or folder    Corpus

`load(name)` gives one, `found(name)` says where it lies, `fetch(name)` downloads it if need be.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gft.errors import shortened
from gft.lab.data.augment import AUGMENT
from gft.lab.data.corpus import NAMED, Corpus, load_corpus
from gft.lab.data.dataset import SPLITS, Dataset
from gft.lab.data.digits import DIGITS_TRAIN, load_digits, load_digits_images
from gft.lab.data.folder import DataError, Source, data_folder
from gft.lab.data.imagenette import IMAGES, fetch_imagenette, find_imagenette, load_imagenette
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
from gft.lab.plain import brief

__all__ = [
    "AUGMENT", "LOADERS", "MNIST_FILES", "MNIST_MEAN", "MNIST_MIRRORS", "MNIST_STD", "MNIST_TRAIN", "SPLITS", "Corpus",
    "DataError", "Dataset", "Entry", "Source", "Text", "_read_idx", "check", "data_folder", "embedded", "fetch",
    "fetch_mnist", "find_mnist", "found", "load", "load_corpus", "load_digits", "load_digits_images",
    "load_imagenette", "load_mnist", "load_mnist_images", "load_shakespeare", "load_text", "load_verses", "names",
    "training_images",
]


@dataclass(frozen=True)
class Entry:
    """One data set."""

    load: Callable[..., Dataset | Text | Corpus]
    find: Callable[[], str | None]  # where it lies; None: not here yet
    fetch: Callable[[bool], object] | None = None  # find or download it; None: there is nothing to download
    is_text: bool = False
    is_corpus: bool = False  # text as tokens, with a vocabulary of its own
    samples: int | None = None  # to train on, where that is known without loading it


def _place_of_mnist() -> str | None:
    files = find_mnist()
    return str(next(iter(files.values())).parent) if files else None


def _path(find: Callable[[], Path | None]) -> Callable[[], str | None]:
    return lambda: str(path) if (path := find()) else None


def _imagenette(size: int) -> Entry:
    return Entry(partial(load_imagenette, size), _path(partial(find_imagenette, size)), partial(fetch_imagenette, size=size),
                 samples=IMAGES["train"])


ENTRIES = {
    "mnist": Entry(load_mnist, _place_of_mnist, fetch_mnist, samples=MNIST_TRAIN),
    "mnist-images": Entry(load_mnist_images, _place_of_mnist, fetch_mnist, samples=MNIST_TRAIN),
    "digits": Entry(load_digits, lambda: "scikit-learn, which brings it", samples=DIGITS_TRAIN),
    "digits-images": Entry(load_digits_images, lambda: "scikit-learn, which brings it", samples=DIGITS_TRAIN),
    "imagenette": _imagenette(224),
    "shakespeare": Entry(load_shakespeare, _path(find_shakespeare), fetch_shakespeare, is_text=True),
    "verses": Entry(load_verses, lambda: "gft, which brings it", is_text=True),
    **{name: Entry(load_it, _path(find), fetch_it, is_text=True, is_corpus=True)
       for name, (load_it, find, fetch_it) in NAMED.items()},
}
LOADERS = {name: entry.load for name, entry in ENTRIES.items()}
names = tuple(ENTRIES)


def _entry(name: str) -> Entry:
    if name in ENTRIES:
        return ENTRIES[name]
    kind, _, size = name.partition("-")
    if kind == "imagenette" and size.isdecimal() and len(size) < 10:
        return _imagenette(int(size))
    kind, _, path = name.partition(":")
    if kind == "text" and path:
        file = _path_of(path)
        return Entry(partial(load_text, file), lambda: str(file) if file.is_file() else None, is_text=True)
    if kind == "corpus" and path:
        place = _path_of(path)
        return Entry(partial(load_corpus, place), lambda: str(place) if place.exists() else None, is_text=True,
                     is_corpus=True)
    raise DataError(f"no data set {shortened(name)}; choose one of {', '.join(names)}, imagenette-SIZE, text:PATH or "
                    "corpus:PATH")


def _path_of(text: str) -> Path:
    """A path that a config names, if a file can have it: not every word is one, and the system would say so anywhere."""
    try:
        path = Path(text).expanduser()
        as_bytes = os.fsencode(path)  # UnicodeEncodeError, of half a character
    except (RuntimeError, ValueError) as error:
        raise DataError(f"{shortened(text)} is no path ({brief(error)}); give one of a file or folder") from error
    if len(as_bytes) > 4095 or any(len(part) > 255 for part in as_bytes.split(b"/")) or set("\0\n\r") & set(text):
        raise DataError(f"{shortened(text)} is no path (too long, or of several lines); give one of a file or folder")
    return path


def check(name: str) -> None:
    """Refuse a name that `load` would not know, without loading anything."""
    _entry(name)


def load(name: str, context: int | None = None, vocabulary: int | None = None) -> Dataset | Text | Corpus:
    """The data set `name`, on the CPU. context: characters, or tokens, in a sample of text, its own default if None;
    vocabulary: tokens that a corpus is cut into."""
    entry = _entry(name)
    if context is not None and not entry.is_text:
        raise DataError(f"context={context} is for text and {name} is none; leave it out")
    if vocabulary is not None and not entry.is_corpus:
        raise DataError(f"vocabulary={vocabulary} is for a corpus of tokens and {name} is none; leave it out")
    asked = {"context": context, "vocabulary": vocabulary}
    return entry.load(**{key: value for key, value in asked.items() if value is not None})


def found(name: str) -> str | None:
    """Where it lies, or None if it must be fetched."""
    return _entry(name).find()


def embedded(name: str) -> bool:
    """Whether it needs no download."""
    return _entry(name).fetch is None


def training_images(name: str) -> int | None:
    """How many samples there are to train on; None of text, and where nobody knows before it is loaded."""
    return _entry(name).samples


def fetch(name: str, progress: bool = True) -> str:
    """Find a data set, or download it with its checksums; where it lies."""
    entry = _entry(name)
    if entry.fetch is not None:
        entry.fetch(progress)
    place = entry.find()
    if place is None:
        raise DataError(f"{name} is not a file, and there is nothing to fetch; give text:PATH or corpus:PATH with the path "
                        "of text")
    return place
