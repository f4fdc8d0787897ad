"""What is shown on the terminal: progress of one run or many, and sheets of numbers."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gft.lab import train
from gft.lab.energy.sheets import Sheet

console = Console()


def show(*sheets: Sheet) -> None:
    """Print tables of plain cells, the first column on the left."""
    for sheet in sheets:
        table = Table(title=sheet.title, box=None, padding=(0, 1, 0, 0), caption=sheet.note or None)
        for place, column in enumerate(sheet.columns):
            table.add_column(column, justify="left" if place == 0 else "right", no_wrap=place == 0)
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table, "")


def watch(name: str, run: Iterable[train.Progress]) -> dict[str, Any]:
    """Train to the end with a progress bar; the run's result."""
    result = None
    with Bars() as bars:
        for progress in run:
            bars.show(name, progress)
            result = progress.result
    assert result is not None
    return result


class Bars:
    """One bar a run, with its latest loss and validation value. Use as a context manager."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<34}"), BarColumn(bar_width=None),
            TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
            TextColumn("loss {task.fields[loss]:>7}"), TextColumn("val {task.fields[val]:>6}"),
            TimeElapsedColumn(), console=console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def add(self, name: str, total: int) -> None:
        self._tasks[name] = self._progress.add_task(name, total=total, loss="", val="")

    def show(self, name: str, progress: train.Progress) -> None:
        if name not in self._tasks:
            self.add(name, progress.steps)
        fields = {}
        if progress.loss is not None:
            fields["loss"] = f"{progress.loss:.4f}"
        if progress.val is not None:
            fields["val"] = f"{progress.val:.4g}"
        self._progress.update(self._tasks[name], completed=progress.step, **fields)

    def done(self, name: str) -> None:
        """Take a finished run's bar away, to make room for the next."""
        if name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))

    def advance(self, name: str, by: int = 1) -> None:
        self._progress.advance(self._tasks[name], by)
