"""What is shown: progress of one run or many, tables, and sheets of numbers.

On a terminal progress is bars that move. Elsewhere, in a file or a pipe, it is lines with the time that is left, and tables
are as wide as their cells: nothing is cut off or wrapped. Brackets in a path are no markup, and what would steer a terminal
is written out (`printable`): names and texts come out of files.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from gft.lab import train
from gft.lab.energy.sheets import Sheet
from gft.lab.plain import printable

SECONDS_BETWEEN_LINES = 10.0

console = Console(markup=False, highlight=False)


def say(text: str) -> None:
    """Print a sentence. It may hold paths, which a reader wants to copy: no line is broken."""
    console.print(printable(text), soft_wrap=True)


def show(table: Table) -> None:
    """Print a table: in its frame on a terminal, else as plain columns."""
    table.title, table.caption = (_plain(text) for text in (table.title, table.caption))
    for column in table.columns:
        column.header, column._cells = _plain(column.header), [_plain(cell) for cell in column._cells]
    if console.is_terminal:
        return console.print(table)
    table.box, table.padding, table.pad_edge = None, (0, 2, 0, 0), False
    table.title_justify = table.caption_justify = "left"
    for column in table.columns:
        column.no_wrap = True
    natural = Measurement.get(console, console.options.update(width=10_000), table).maximum
    Console(markup=False, highlight=False, width=max(natural, 80)).print(table)


def _plain(cell: Any) -> Any:
    return printable(cell) if isinstance(cell, str) else cell


def show_sheets(*sheets: Sheet) -> None:
    """Print tables of plain cells, the first column on the left."""
    for sheet in sheets:
        table = Table(title=sheet.title, box=None, padding=(0, 1, 0, 0), caption=sheet.note or None)
        for place, column in enumerate(sheet.columns):
            table.add_column(column, justify="left" if place == 0 else "right", no_wrap=place == 0)
        for row in sheet.rows:
            table.add_row(*row)
        show(table)
        say("")


def watch(name: str, run: Iterable[train.Progress]) -> dict[str, Any]:
    """Train to the end and show how far it has come; the run's result."""
    result = None
    with watching() as shown:
        for progress in run:
            shown.show(name, progress)
            result = progress.result
    assert result is not None
    return result


# ---------------------------------------------------------------------------------------------------- progress


def watching() -> "Bars | Lines":
    """Bars on a terminal, else lines. Use as a context manager."""
    return Bars() if console.is_terminal else Lines()


class Bars:
    """One bar a run, with its latest loss and validation value."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<34}", markup=False), BarColumn(bar_width=None),
            TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[loss]:>12}", markup=False), TextColumn("{task.fields[val]:>10}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True), console=console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def add(self, name: str, total: int, done: int = 0) -> None:
        self._tasks[name] = self._progress.add_task(printable(name), total=total, completed=done, loss="", val="")

    def show(self, name: str, progress: train.Progress) -> None:
        if name not in self._tasks:
            self.add(name, progress.steps)
        fields = {}
        if progress.loss is not None:
            fields["loss"] = f"loss {progress.loss:.4f}"
        if progress.val is not None:
            fields["val"] = f"val {progress.val:.4g}"
        self._progress.update(self._tasks[name], completed=progress.step, **fields)

    def done(self, name: str) -> None:
        """Take a finished run's bar away, to make room for the next."""
        if name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))

    def advance(self, name: str) -> None:
        self._progress.advance(self._tasks[name])


@dataclass
class _Seen:
    """What `Lines` knows of one run."""

    start: float  # on the clock, when it was first seen
    first: int  # the step it had reached by then: a resumed run has others behind it
    said: float = float("-inf")  # when its last line was written
    loss: str = ""
    val: str = ""


class Lines:
    """A line a run, every ten seconds and at its end: step, loss, validation value, time passed, time left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, write: Callable[[str], None] = say) -> None:
        self._clock, self._write = clock, write
        self._seen: dict[str, _Seen] = {}
        self._counts: dict[str, tuple[int, int]] = {}  # of `add` and `advance`: done, total

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def add(self, name: str, total: int, done: int = 0) -> None:
        self._counts[name] = done, total
        self._seen[name] = _Seen(self._clock(), done)

    def show(self, name: str, progress: train.Progress) -> None:
        seen = self._seen.setdefault(name, _Seen(self._clock(), progress.step))
        if progress.loss is not None:
            seen.loss = f"  loss {progress.loss:.4f}"
        if progress.val is not None:
            seen.val = f"  val {progress.val:.4g}"
        if progress.result is not None or (seen.loss and self._due(seen)):
            self._line(name, progress.step, progress.steps)

    def done(self, name: str) -> None:
        """Its last line has been written."""

    def advance(self, name: str) -> None:
        done, total = self._counts[name]
        self._counts[name] = done + 1, total
        if self._due(self._seen[name]) or done + 1 == total:
            self._line(name, done + 1, total)

    def _due(self, seen: _Seen) -> bool:
        return self._clock() - seen.said >= SECONDS_BETWEEN_LINES

    def _line(self, name: str, step: int, steps: int) -> None:
        seen = self._seen[name]
        seen.said = self._clock()
        elapsed, taken = seen.said - seen.start, step - seen.first
        left = f"  ETA {_clock_time(elapsed / taken * (steps - step))}" if taken and step < steps else ""
        self._write(f"{name}  {step}/{steps}{seen.loss}{seen.val}  elapsed {_clock_time(elapsed)}{left}")


def _clock_time(seconds: float) -> str:
    """75.4 -> 0:01:15."""
    return str(timedelta(seconds=round(seconds)))
