"""JSON files of runs and tables: written whole, and read with a sentence where one is damaged or holds something else."""

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gft.errors import UsageError, shortened
from gft.files import read_whole, write_text
from gft.saved import is_number

Kinds = Mapping[str, str]  # field -> one of TESTS; with " or none" if it may be null, with " if any" if missing, too

# What a run's result says, and a line of runs.jsonl.
RESULT: Kinds = {
    "recipe": "text", "seed": "integer", "row": "text", "table": "text", "metric": "text", "value": "number",
    "paper": "number or none", "steps": "integer", "fp32_params": "integer", "quantized_params": "integer",
    "bits": "integer", "bits_total": "number", "bytes_per_weight": "number", "training_bytes_per_weight": "number if any",
    "updates_estimated": "number or none", "updates_actual": "number", "energy_estimate_j": "number or none",
    "wall_s": "number", "commit": "text", "device": "text", "torch": "text", "split": "text if any",
    "config": "object if any", "curve": "list if any",
}
METRICS = ("accuracy", "loss")


# ---------------------------------------------------------------------------------------------------- writing


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """JSON Lines: a value a line."""
    write_text(path, "".join(json.dumps(value) + "\n" for value in values))


# ---------------------------------------------------------------------------------------------------- reading


def parsed(text: bytes) -> Any:
    """JSON in UTF-8; whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_lines(path: Path, cut_last: bool = False) -> Iterator[Any]:
    """cut_last: half a line at the end, as a kill leaves it, is passed over."""
    lines = _content_of(path).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield parsed(line)
        except ValueError:
            if cut_last and number == len(lines):
                return
            raise UsageError(f"{path}, line {number}: not JSON; mend or delete it") from None


def read_json(path: Path) -> Any:
    try:
        return parsed(_content_of(path))
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{path} cannot be read ({error}); restore it, or use another folder") from error


def read_object(path: Path, kinds: Kinds | None = None) -> dict[str, Any]:
    """A JSON file that holds an object with fields of these kinds, and perhaps others."""
    return checked(read_json(path), str(path), kinds or {})


def read_result(path: Path) -> dict[str, Any]:
    """What a finished run came to."""
    return checked_result(read_object(path), str(path))


def read_chosen(path: Path, sizes: Container[str]) -> dict[str, dict[str, Any]]:
    """row -> size -> {"settings": {"dense.lr": …}, "steps": …}, as `gft tune` wrote it into a table's folder, if it did."""
    if not path.exists():
        return {}
    chosen = read_object(path, {"chosen": "object"})["chosen"]
    for row in chosen:
        for size, one in checked(chosen[row], f"{path}, {shortened(row)}", {}).items():
            name = f"{path}, {shortened(row)} at {shortened(size)}"
            settings = checked(one, name, {"settings": "object", "steps": "integer"})["settings"]
            wrong = next((key for key, value in settings.items() if len(key) > 60 or not (
                is_number(value) or (isinstance(value, (str, bool)) and not key.endswith("lr")))), None)
            if size not in sizes or wrong is not None:
                what = f"{shortened(wrong)} is no setting with its value" if size in sizes else "there is no such size"
                raise UsageError(f"{name}: {what}; mend or delete it")
    return chosen


def _content_of(path: Path) -> bytes:
    try:
        return read_whole(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); allow reading it, or use another folder") from error


# ---------------------------------------------------------------------------------------------------- what a file may hold


TESTS = {
    "text": lambda value: isinstance(value, str),
    "number": is_number,
    "integer": lambda value: isinstance(value, int) and is_number(value),
    "truth": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "list": lambda value: isinstance(value, list),
}


def checked(value: Any, name: str, kinds: Kinds) -> dict[str, Any]:
    """`value`, if it is an object whose fields are of these kinds; `name` says in the error what was read."""
    if not isinstance(value, dict):
        raise UsageError(f"{name} holds a {type(value).__name__} where an object with fields should be; mend or delete it")
    for field, kind in kinds.items():
        what, _, otherwise = kind.partition(" ")
        if field not in value and otherwise == "if any":
            continue
        if not (field in value and (TESTS[what](value[field]) or (otherwise and value[field] is None))):
            raise UsageError(f"{name}: {field} should be {kind} and is {shortened(value.get(field))}; mend or delete it")
    return value


def checked_result(value: Any, name: str) -> dict[str, Any]:
    """A run's result with all that tables are made of."""
    result = checked(value, name, RESULT)
    if result["metric"] not in METRICS:
        raise UsageError(f"{name}: metric is {shortened(result['metric'])}; it should be one of {', '.join(METRICS)}")
    if not all(isinstance(point, list) and len(point) == 2 and all(map(is_number, point)) for point in
               result.get("curve") or ()):
        raise UsageError(f"{name}: curve should list pairs of a step and a value; mend or delete it")
    return result
