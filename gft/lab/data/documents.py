"""Documents of a text corpus: read from files one after another, and which split each belongs to.

    .txt, .tokens, .md     documents are separated by three newlines; a file without any is one document
    .txt.xz, .txt.gz       the same, packed; .txt.zst with the package zstandard
    .zip                   every text file in it
    .parquet               a document a row, in its column "text"; with the package pyarrow

A folder is all such files in it. Files whose names say train, val (or valid, validation) and test are these splits. Of
other files, a document goes to val or test by a hash of its text, one in 200 each, wherever it stands; where documents are
few, the last tenth of the text is cut off, half of it for each.
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
from pathlib import Path
from typing import IO, Any

from gft.lab.data.dataset import SPLITS
from gft.lab.data.folder import DataError

SEPARATOR = "\n\n\n"
PIECE = 1 << 22  # characters read at once
HELD_BACK = 200  # a document in so many goes to val, and another to test
FEW = 20 * HELD_BACK  # documents; with fewer, a text is cut instead
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
        members = {name: split_named(name) for name in _members(files[0])}
        if set(SPLITS) <= set(members.values()):
            return Files({split: [files[0] / name for name, its in members.items() if its == split] for split in SPLITS}, [])
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
    with _sentences_for(file), _opened(file) as stream:
        rest = ""
        while piece := stream.read(PIECE):
            *whole, rest = (rest + piece).split(SEPARATOR)
            yield from whole
        yield rest


@contextmanager
def _opened(file: Path) -> Iterator[IO[str]]:
    """A text file, packed or in a .zip (its path goes on inside), as characters."""
    archive = next((parent for parent in file.parents if parent.suffix.lower() == ".zip" and parent.is_file()), None)
    if archive is None and file.suffix.lower() == ".zip":
        with zipfile.ZipFile(file) as whole:
            contents = SEPARATOR.join(whole.read(name).decode("utf-8-sig") for name in _members(file))
        yield io.StringIO(contents)
        return
    if archive is not None:
        with zipfile.ZipFile(archive) as whole, whole.open(file.relative_to(archive).as_posix()) as raw:
            yield io.TextIOWrapper(raw, "utf-8-sig", newline="")
        return
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".zst": _zstandard(file)}
    with openers.get(file.suffix.lower(), open)(file, "rb") as raw:
        yield io.TextIOWrapper(raw, "utf-8-sig", newline="")


def _members(archive: Path) -> list[str]:
    with _sentences_for(archive), zipfile.ZipFile(archive) as whole:
        return sorted(name for name in whole.namelist() if Path(name).suffix.lower() in TEXTS)


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
            yield from (text for text in batch.column(0).to_pylist() if text)


@contextmanager
def _sentences_for(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 (byte {error.start} of a piece); save it in that encoding") from error
    except (OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} cannot be read ({error}); fetch or unpack it again") from error


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
