"""Running benchmarks by name, keeping each row as soon as it is measured."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gft.errors import UsageError
from gft.files import make_folder
from gft.lab import bench
from gft.lab.bench import steps
from gft.lab.bench.rows import Row, append, say
from gft.lab.bench.works import works


class Finished(NamedTuple):
    """One benchmark that ran."""

    name: str
    rows: list[Row]
    plots: list[Path]


def run(names: Sequence[str], file: Path, device: torch.device, small: bool = False,
        cases: Sequence[str] = ()) -> Iterator[Finished]:
    """Run benchmarks, all but the long ones if none is named, and append their rows to a CSV file. `cases`: only those rows
    of `step` whose names have all parts, between commas, of one of these texts."""
    unknown = [name for name in names if name not in bench.BENCHMARKS]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: choose one of {', '.join(bench.BENCHMARKS)}")
    make_folder(file.parent)
    if file.is_dir():
        raise UsageError(f"--out {file} is a folder; give the path of a CSV file, to which rows are appended")
    if cases and list(names) != ["step"]:
        raise UsageError("--case chooses among the rows of step; name that one alone, with --only step")
    for text in cases:
        if not any(has_parts(name, text) for name in steps.names(device, small)):
            networks = "; ".join(work.name for work in works(device, small))
            raise UsageError(f"--case {text!r} is in no row's name; choose from {networks}; first step; with ', 2 bit' or "
                             "', eager' behind it for fewer")
    return _run(names or [name for name in bench.BENCHMARKS if name not in bench.LONG], file, device, small, cases)


def has_parts(name: str, text: str) -> bool:
    """Is each part of the text, between commas, somewhere in the name? An x may stand for ×."""
    name, text = (words.lower().replace("×", "x") for words in (name, text))
    return all(part.strip() in name for part in text.split(","))


def _run(names: Sequence[str], file: Path, device: torch.device, small: bool, cases: Sequence[str]) -> Iterator[Finished]:
    for name in names:
        say(f"{name} …")
        plots = [file.with_name(f"{name}.{kind}") for kind in ("png", "svg")] if name == "growth" else []
        options: dict[str, Any] = {"files": plots} if plots else {}
        if cases:
            options["wanted"] = lambda row: any(has_parts(row, text) for text in cases)
        rows = []
        for row in bench.BENCHMARKS[name](device, small=small, **options):
            append([row], file, device)  # at once: a benchmark that is stopped has not been in vain
            rows.append(row)
        yield Finished(name, rows, plots)
