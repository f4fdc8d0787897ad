"""Files that are whole or not there: every file that gft writes is written this way."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gft.errors import UsageError


@contextmanager
def written_atomically(path: str | Path) -> Iterator[Path]:
    """`with written_atomically(path) as unfinished:` write to `unfinished`; it becomes `path` when the block ends.

    The new file lies beside the final name until then, and is flushed to disk before it is renamed: whoever kills the
    process finds either the old file or the new one, whole. If the block raises, the old file stays. A place that cannot be
    written raises a UsageError before the block runs.
    """
    path = Path(path)
    make_folder(path.parent)
    # Of this process and this thread: two may write one path at once, and the last to finish has it.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.unfinished")
    try:
        with _sentence_for(path):
            if path.is_dir():
                raise IsADirectoryError(None, "it is a folder")
            unfinished.touch()
        yield unfinished
        with _sentence_for(path):
            with open(unfinished, "rb") as file:
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> Path:
    """Write a whole text file, atomically."""
    with written_atomically(path) as unfinished, _sentence_for(path):
        unfinished.write_text(text, encoding="utf-8")
    return Path(path)


def make_folder(path: str | Path) -> Path:
    """Make a folder and those above it, or raise a UsageError that says why it cannot be made."""
    with _sentence_for(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


@contextmanager
def _sentence_for(path: str | Path) -> Iterator[None]:
    """Where a file lies is the user's choice, so that it cannot be written is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); give a place where you may write") from error
