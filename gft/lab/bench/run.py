"""Running benchmarks by name, keeping each row as soon as it is measured."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gft.errors import UsageError
from gft.files import make_folder
from gft.lab import bench
from gft.lab.bench.rows import Row, append, say


class Finished(NamedTuple):
    """One benchmark that ran."""

    name: str
    rows: list[Row]
    plots: list[Path]


def run(names: Sequence[str], file: Path, device: torch.device, small: bool = False) -> Iterator[Finished]:
    """Run benchmarks, all but the long ones if none is named, and append their rows to a CSV file."""
    unknown = [name for name in names if name not in bench.BENCHMARKS]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: choose one of {', '.join(bench.BENCHMARKS)}")
    make_folder(file.parent)
    if file.is_dir():
        raise UsageError(f"--out {file} is a folder; give the path of a CSV file, to which rows are appended")
    return _run(names or [name for name in bench.BENCHMARKS if name not in bench.LONG], file, device, small)


def _run(names: Sequence[str], file: Path, device: torch.device, small: bool) -> Iterator[Finished]:
    for name in names:
        say(f"{name} …")
        plots = [file.with_name(f"{name}.{kind}") for kind in ("png", "svg")] if name == "growth" else []
        rows = []
        for row in bench.BENCHMARKS[name](device, small=small, **({"files": plots} if plots else {})):
            append([row], file, device)  # at once: a benchmark that is stopped has not been in vain
            rows.append(row)
        yield Finished(name, rows, plots)
