"""Documents of a text corpus: read from files one after another, and which split each belongs to.

    .txt, .tokens, .md     documents are separated by three newlines; a file without any is one document
    .txt.xz, .txt.gz       the same, packed; .txt.zst with the package zstandard
    .zip                   every text file in it
    .parquet               a document a row, in its column "text"; with the package pyarrow

A folder is all such files in it. Files whose names say train, val (or valid, validation) and test are these splits. Of
other files, a document goes to val or test by a hash of its text, one in 200 each, wherever it stands; where documents are
few, the last tenth of the text is cut off, half of it for each.

Packed files are unpacked as a stream, and no further than a text can have been packed.
"""

import gzip
import hashlib
import io
import lzma
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from gft.lab.data.dataset import SPLITS
from gft.lab.data.folder import DataError
from gft.lab.plain import brief, printable

SEPARATOR = "\n\n\n"
PIECE = 1 << 22  # characters read at once
HELD_BACK = 200  # a document in so many goes to val, and another to test
FEW = 20 * HELD_BACK  # documents; with fewer, a text is cut instead
RATIO = 200  # to 1: no text that somebody wrote can be packed so well (4 or 5 to 1 is usual, a log's 20)
ALWAYS = 1 << 26  # bytes that a packed file may become, however small it is
TEXTS = (".txt", ".tokens", ".md", ".raw")
PACKED = (".xz", ".gz", ".zst")
KINDS = (*TEXTS, *PACKED, ".zip", ".parquet")
_SPLIT = re.compile(r"(?:^|[^a-z])(train|val|valid|validation|test)(?:[^a-z]|$)")


@dataclass(frozen=True)
class Files:
    """The files of a corpus, by split; those of no split, if any, are shared out among the three."""

    by_split: dict[str, list[Path]]  # train, val, test; empty: all are in `shared`
    shared: list[Path]

    @property
    def all(self) -> list[Path]:
        return [*self.shared, *(file for files in self.by_split.values() for file in files)]

    def of(self, split: str) -> Iterator[str]:
        """The documents of a split, in order."""
        if self.by_split:
            return documents(self.by_split[split])
        return (document for document, its in shared_out(self.shared) if its == split)


def files_of(path: Path) -> Files:
    """A file, or all files of a folder, sorted by name."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")
                       and file.suffix.lower() in KINDS and "cache" not in file.relative_to(path).parts[:-1])
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise DataError(f"{path} is not a text corpus; give a file or folder of {', '.join(KINDS)}")
    strange = next((file for file in files if file.suffix.lower() not in KINDS), None)
    if strange is not None:
        raise DataError(f"{strange} is of no kind that can be read; give {', '.join(KINDS)}")
    named = {file: split_named(file.name) for file in files}
    by_split = {split: [file for file in files if named[file] == split] for split in SPLITS}
    if all(by_split.values()):
        return Files(by_split, [])
    if len(files) == 1 and files[0].suffix.lower() == ".zip":
        members = {files[0] / name: split_named(name) for name in _members(files[0])}
        if set(SPLITS) <= set(members.values()):
            return Files({split: [path for path, its in members.items() if its == split] for split in SPLITS}, [])
    return Files({}, files)


def split_named(name: str) -> str | None:
    """wiki-train.txt.xz -> train; wiki.valid.tokens -> val."""
    found = _SPLIT.search(name.rsplit("/", 1)[-1].lower())
    return None if found is None else "val" if found[1].startswith("val") else found[1]


# ---------------------------------------------------------------------------------------------------- reading


def documents(files: Sequence[Path]) -> Iterator[str]:
    """The documents of files, in order; empty ones are left out."""
    for file in files:
        rows = _rows(file) if file.suffix.lower() == ".parquet" else _separated(file)
        yield from (document for document in rows if document)


def _separated(file: Path) -> Iterator[str]:
    with _sentences_for(file):
        for stream in _opened(file):
            parts, tail = [], ""  # of a document that has not ended; a whole text may be one
            while piece := stream.read(PIECE):
                *others, tail = (tail + piece).split(SEPARATOR)
                for end in others:
                    yield "".join((*parts, end))
                    parts = []
                # A separator may begin in one piece and end in the next.
                parts.append(tail[: 1 - len(SEPARATOR)])
                tail = tail[1 - len(SEPARATOR) :]
            yield "".join((*parts, tail))


def _opened(file: Path) -> Iterator[IO[str]]:
    """A text file, packed or in a .zip (its path goes on inside), as characters; of a .zip, one text after the other."""
    archive = next((place for place in (file, *file.parents) if place.suffix.lower() == ".zip" and place.is_file()), None)
    if archive is not None:
        names = _members(archive) if archive == file else [file.relative_to(archive).as_posix()]
        with zipfile.ZipFile(archive) as whole:
            left = _most_of(archive)
            for name in names:
                with whole.open(name) as raw:
                    bounded = _Bounded(raw, left)
                    yield _characters(bounded)
                    left = bounded.left
        return
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".zst": _zstandard(file)}
    with openers.get(file.suffix.lower(), open)(file, "rb") as raw:
        yield _characters(_Bounded(raw, _most_of(file)))


def _characters(raw: io.RawIOBase) -> IO[str]:
    return io.TextIOWrapper(io.BufferedReader(raw, 1 << 16), "utf-8-sig", newline="")


def _most_of(file: Path) -> int:
    return max(RATIO * file.stat().st_size, ALWAYS)


class _Bounded(io.RawIOBase):
    """A stream that ends with an error where it is longer than it may be."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self.left = stream, most

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        piece = self._stream.read(len(into))
        self.left -= len(piece)
        if self.left < 0:
            raise ValueError(f"it unpacks to more than {RATIO} times its size, as no text does")
        into[: len(piece)] = piece
        return len(piece)


def _members(archive: Path) -> list[str]:
    """The names of an archive's texts. One that is no path inside it ("/etc/a.txt") would lead elsewhere when it is joined
    to the archive's."""
    with _sentences_for(archive), zipfile.ZipFile(archive) as whole:
        names = sorted({name for name in whole.namelist() if Path(name).suffix.lower() in TEXTS})
        for name in names:
            if PurePosixPath(name).is_absolute() or str(PurePosixPath(name)) != name:
                raise ValueError(f"it names a file {printable(name[:40], lines=False)}, which is no path inside it")
        return names


def _zstandard(file: Path) -> Callable[..., Any]:
    if file.suffix.lower() != ".zst":
        return open
    try:
        import zstandard  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        raise DataError(f"{file} is read by the package zstandard, which is not installed; pip install zstandard, or unpack "
                        "the file") from None
    return zstandard.open


def _rows(file: Path) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        raise DataError(f"{file} is read by the package pyarrow, which is not installed; pip install pyarrow, or give text "
                        "files") from None
    with _sentences_for(file):
        table = parquet.ParquetFile(file)
        if "text" not in table.schema_arrow.names:
            raise DataError(f"{file} has no column text; give files whose documents are in a column of that name")
        for batch in table.iter_batches(columns=["text"], batch_size=1024):
            texts = [text for text in batch.column(0).to_pylist() if text]
            if not all(isinstance(text, str) for text in texts):
                raise DataError(f"{file} has other values than text in its column text; give files of documents")
            yield from texts


@contextmanager
def _sentences_for(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 (byte {error.start} of a piece); save it in that encoding") from error
    except DataError:
        raise
    except Exception as error:  # of many kinds, by format and package; only what reads is inside
        raise DataError(f"{file} cannot be read ({brief(error)}); fetch or unpack it again") from error


# ---------------------------------------------------------------------------------------------------- splits


def shared_out(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(document, split) of files that say nothing of splits."""
    first: list[str] = []
    rest = documents(files)
    for document in rest:
        first.append(document)
        if len(first) == FEW:
            break
    else:
        yield from _cut(SEPARATOR.join(first), files)
        return
    for document in first:
        yield document, _split_of(document)
    for document in rest:
        yield document, _split_of(document)


def _split_of(document: str) -> str:
    number = int.from_bytes(hashlib.sha256(document.encode()).digest()[:4], "little") % HELD_BACK
    return {0: "val", 1: "test"}.get(number, "train")


def _cut(text: str, files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """A short text: nine tenths to train, a twentieth to val, the last twentieth to test."""
    if len(text) < HELD_BACK:
        raise DataError(f"{files[0].parent} has {len(text)} characters of text; give more")
    ends = [len(text) * 18 // 20, len(text) * 19 // 20, len(text)]
    for split, start, end in zip(SPLITS, [0, *ends], ends, strict=False):
        yield from ((document, split) for document in text[start:end].split(SEPARATOR) if document)
