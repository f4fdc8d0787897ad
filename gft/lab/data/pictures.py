"""Folders of pictures -> arrays of bytes, decoded once and kept.

    imagenette2-160/train/n01440764/*.JPEG      a folder, or a .zip or .tgz with this layout inside
                    val/n01440764/*.JPEG

A kept file is one split: an .npy of bytes, the images one after another and then one byte per label. It is mapped into
memory, not read, so that opening it takes no time. Its name carries what it was made of; when the source changes, the
name does, and what the old one held is deleted.
"""

import gzip
import hashlib
import io
import os
import re
import shutil
import struct
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gft.errors import install_hint
from gft.files import written_atomically
from gft.lab.data.folder import DataError, cache_folders, check_md5, content_of, writable_cache
from gft.lab.plain import brief, printable

# A name that begins with a dot is no picture but what some systems leave beside one.
PICTURE = re.compile(r"(?:^|/)(?P<split>train|val)/n\d+/[^/.][^/]*\.(?i:jpe?g|png|webp)$")
SECONDS_BETWEEN_REPORTS = 10.0
# Whatever an archive or a picture says of itself, no more than this is unpacked of it. The largest picture of Imagenette has
# 13 million pixels and less than 10 MB.
MOST_BYTES = 2**25  # of one packed picture
MOST_PIXELS = 2**25  # of one decoded: 100 MB
MOST_WAITING = 2**26  # bytes of packed pictures that wait to be decoded
RATIO = 1032  # to 1 is the most that deflate, zip's and gzip's compression, can do
FEWEST_BYTES = 64  # of an archive for each file in it: no picture is smaller, however well it is packed
MOST_HEADER = 2**20  # bytes of a .tgz that only name a file or tell of it
Splits = dict[str, tuple[Tensor, Tensor]]  # "train" and "val" -> images (n, 3, size, size) uint8, labels (n,) int64


def load_pictures(source: Path, size: int, md5: str | None = None) -> Splits:
    """The pictures of `source` squeezed to size x size, from the cache if they are there. md5: the publisher's checksum of
    an archive, if it is known."""
    any_state, this_state = _stems(source, size)
    files = {split: f"{this_state}-{split}.npy" for split in ("train", "val")}
    kept = (folder for folder in cache_folders() if all((folder / file).exists() for file in files.values()))
    folder = next(kept, None)
    if folder is None:
        folder = writable_cache()
        check_md5(source, md5)
        _make(source, size, {split: folder / file for split, file in files.items()})
        for old in folder.glob(f"{any_state}-*.npy"):
            if old.name not in files.values():
                old.unlink()
    return {split: _open(folder / file, size) for split, file in files.items()}


def picture_names(source: Path) -> dict[str, list[str]]:
    """"train" and "val" -> the sorted paths of their pictures inside `source`."""
    if source.is_dir():
        names = [path.relative_to(source).as_posix() for path in source.glob("*/*/*")]
    else:
        names = [name for name, _ in _archive(source)]
    found: dict[str, list[str]] = {"train": [], "val": []}
    for name in sorted(set(names)):
        if match := PICTURE.search(name):
            found[match["split"]].append(name)
    for split, some in found.items():
        if not some:
            raise DataError(f"{source} has no pictures {split}/n…/*.JPEG; unpack or fetch it again")
    return found


def decode(content: bytes, size: int) -> np.ndarray:
    """A picture file -> (3, size, size) bytes. The whole picture, squeezed; a side that shrinks is averaged over."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        if image.width * image.height > MOST_PIXELS:  # known before a pixel is decoded
            raise ValueError(f"{image.width}×{image.height} pixels")
        small = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(small).transpose(2, 0, 1)


# ---------------------------------------------------------------------------------------------------- the kept files


def _stems(source: Path, size: int) -> tuple[str, str]:
    """What kept files of any state of `source` begin with, and those of its present state."""
    if source.is_dir():  # its own date tells nothing of the files inside it
        states = [path.stat() for path in source.glob("*/*/*")]
        state = (len(states), sum(one.st_size for one in states), max((one.st_mtime_ns for one in states), default=0))
    else:
        state = (source.stat().st_size, source.stat().st_mtime_ns)
    where, when = (hashlib.sha256(repr(key).encode()).hexdigest()[:10] for key in (str(source.resolve()), state))
    any_state = f"{source.stem}-{size}px-{where}"
    return any_state, f"{any_state}-{when}"


def _open(path: Path, size: int) -> tuple[Tensor, Tensor]:
    # "c": written pages would be copies, so torch has the writable array it wants and the file stays as it is.
    try:
        flat = np.load(path, mmap_mode="c")
    except (ValueError, OSError, EOFError, SyntaxError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}); delete it, and it is made anew") from error
    n, rest = divmod(flat.size, 3 * size * size + 1)
    if flat.ndim != 1 or flat.dtype != np.uint8 or rest or not n:
        raise DataError(f"{path} does not hold images of {size}×{size}; delete it, and it is made anew")
    flat = torch.from_numpy(flat)
    return flat[:-n].view(n, 3, size, size), flat[-n:].long()


def _make(source: Path, size: int, files: dict[str, Path]) -> None:
    """Decode both splits in one pass over `source` and write their files, whole or not at all."""
    names = picture_names(source)
    labels = _labels(source, names)
    folder = files["train"].parent
    total = sum(map(len, names.values()))
    needed = total * (3 * size * size + 1)
    if shutil.disk_usage(folder).free < needed * 1.05:  # writing to a map on a full disk would kill the process, not raise
        raise DataError(f"{folder} has no room for {needed / 1e9:.1f} GB of decoded images; free some, or set GFT_DATA to a "
                        "folder on another disk")
    said = f"Decoding {total:,} images of {source} to {size}×{size}, once; kept in {folder} ({needed / 1e9:.2f} GB)"
    print(printable(said, lines=False), file=sys.stderr)
    with ExitStack() as both:
        rows: dict[str, np.ndarray] = {}
        for split, some in names.items():
            unfinished = both.enter_context(written_atomically(files[split]))
            flat = np.lib.format.open_memmap(unfinished, "w+", np.uint8, (len(some) * (3 * size * size + 1),))
            flat[-len(some) :] = labels[split]
            rows |= zip(some, flat[: -len(some)].reshape(-1, 3, size, size), strict=True)
            del flat  # only the rows hold the map open now
        _decode_all(source, rows, size)
        rows.clear()


def _labels(source: Path, names: dict[str, list[str]]) -> dict[str, list[int]]:
    """Classes are numbered in the order of their folders' names, those of the training split."""
    folders = {split: [name.split("/")[-2] for name in some] for split, some in names.items()}
    numbers = {folder: number for number, folder in enumerate(sorted(set(folders["train"])))}
    strange = next((folder for folder in folders["val"] if folder not in numbers), None)
    if strange is not None or len(numbers) > 256:
        raise DataError(f"{source} has a class in val/ that train/ has not, {strange}; unpack or fetch it again"
                        if strange else f"{source} has {len(numbers)} classes; at most 256 can be kept")
    return {split: [numbers[folder] for folder in some] for split, some in folders.items()}


def _decode_all(source: Path, rows: dict[str, np.ndarray], size: int) -> None:
    """Fill rows[name] with the picture of that name. Pillow frees the interpreter while it decodes, so threads help."""
    workers = os.cpu_count() or 1

    def fill(item: tuple[str, bytes]) -> None:
        name, content = item
        try:
            rows[name][:] = decode(content, size)
        except ModuleNotFoundError:
            raise DataError(f"images need Pillow; install it with: {install_hint('lab')}") from None
        except Exception as error:  # Pillow raises of many kinds, by format
            raise DataError(f"{_inside(source, name)} is not a readable image ({type(error).__name__}); unpack or fetch "
                            "the set again") from error

    pictures = _read(source, rows)
    done, reported = 0, time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        while some := _some(pictures, 16 * workers):
            done += len(list(pool.map(fill, some)))
            if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                print(f"  {done:,} of {len(rows):,}", file=sys.stderr)
    assert done >= len(rows)  # more, if an archive holds a name twice


def _some(pictures: Iterator[tuple[str, bytes]], most: int) -> list[tuple[str, bytes]]:
    """The next few: no more than this wait in memory."""
    some: list[tuple[str, bytes]] = []
    while len(some) < most and sum(len(content) for _, content in some) < MOST_WAITING:
        item = next(pictures, None)
        if item is None:
            break
        some.append(item)
    return some


def _read(source: Path, wanted: dict[str, np.ndarray]) -> Iterator[tuple[str, bytes]]:
    if source.is_dir():
        yield from ((name, _content_of(source / name)) for name in wanted)
    else:
        yield from (item for item in _archive(source, wanted) if item[0] in wanted)


def _content_of(path: Path) -> bytes:
    _refuse_large(str(path), path.stat().st_size if path.exists() else 0)
    return content_of(path)


def _inside(source: Path, name: str) -> str:
    """A file of an archive for a message: its name may be long, and hold line breaks."""
    name = printable(name, lines=False)
    return f"{source}/{name if len(name) <= 100 else f'...{name[-97:]}'}" if name else str(source)


def _refuse_large(name: str, size: int) -> None:
    if size > MOST_BYTES:
        raise DataError(f"{name} would take {size:,} bytes, and a picture has at most {MOST_BYTES:,}; unpack or fetch "
                        "the set again")


# ---------------------------------------------------------------------------------------------------- archives


def _archive(source: Path, wanted: Container[str] = ()) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each file in a .zip or .tgz, in the archive's order: a .tgz can only be read from end to end. The
    content is that of `wanted` files; others are empty."""
    name = ""
    try:
        for name, size, read in _zip(source) if source.suffix == ".zip" else _tgz(source):
            if name in wanted:
                _refuse_large(_inside(source, name), size)
            yield name, read() if name in wanted else b""
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, RuntimeError, ValueError, OverflowError,
            IndexError, KeyError, struct.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{_inside(source, name)} cannot be read ({brief(error)}); delete {source.name} and fetch it again"
                        ) from error


Members = Iterator[tuple[str, int, Callable[[], bytes]]]  # of an archive: name, size, and what reads it


def _zip(source: Path) -> Members:
    with zipfile.ZipFile(source) as archive:
        members, held = archive.infolist(), source.stat().st_size
        # Both are believed when memory is taken: what it is to become, and what of it is to be read at once.
        if sum(member.file_size for member in members) > RATIO * held or any(one.compress_size > held for one in members):
            raise zipfile.BadZipFile("it says it would unpack to more than it can hold")
        for member in members:
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile("it is packed in an unusual way")
            yield member.filename, member.file_size, partial(archive.read, member)


def _tgz(source: Path) -> Members:
    with gzip.open(source) as unpacked:
        with tarfile.open(fileobj=_InSmallPieces(unpacked), mode="r:", tarinfo=_Member) as archive:
            most = 1000 + source.stat().st_size // FEWEST_BYTES
            for number, member in enumerate(archive):
                if number >= most:
                    raise tarfile.ReadError("it lists more files than it can hold")
                file = archive.extractfile(member) if member.isreg() else None
                yield member.name, member.size if file else 0, file.read if file else bytes
        # tar ends before gzip does; only at the very end does gzip compare its checksum.
        while unpacked.read(2**20):
            pass


class _Member(tarfile.TarInfo):
    """A header that refuses to go on for megabytes: tarfile takes all of it to pieces, a dict of the smallest of them."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> "_Member":
        member = super().frombuf(buf, encoding, errors)
        if member.size > MOST_HEADER and not (member.isreg() or member.isdir()):
            raise tarfile.ReadError(f"a header says it has {member.size:,} bytes")
        return member


class _InSmallPieces(io.RawIOBase):
    """A stream that refuses to be read in one large piece: tarfile believes a header that says how long another one is."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MOST_BYTES:
            raise tarfile.ReadError(f"a header says it has {size:,} bytes")
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()
