"""JSON files of runs and tables: written whole, and read with a sentence where one is damaged."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gft.errors import UsageError
from gft.files import write_text


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """JSON Lines: a value a line."""
    write_text(path, "".join(json.dumps(value) + "\n" for value in values))


def read_json_lines(path: Path) -> Iterator[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); allow reading it, or use another folder") from error
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            raise UsageError(f"{path}, line {number}: not JSON; mend or delete it") from None


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); restore it, or use another folder") from error
