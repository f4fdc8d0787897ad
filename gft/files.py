"""Files that are whole or not there: every file that gft writes is written this way."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_atomically(path: str | Path) -> Iterator[Path]:
    """`with written_atomically(path) as unfinished:` write to `unfinished`; it becomes `path` when the block ends.

    The new file lies beside the final name until then, and is flushed to disk before it is renamed: whoever kills the
    process finds either the old file or the new one, whole. If the block raises, the old file stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> Path:
    """Write a whole text file, atomically."""
    with written_atomically(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return Path(path)
