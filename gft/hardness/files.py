"""Writing a file whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path | str, content: bytes) -> None:
    """Write beside the file and put it in place at once: a reader, or a stopped program, never leaves half a file."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into; make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the path of a file to write")
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
