"""Live progress on the terminal, for one run or many."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gft.lab import train

console = Console()


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

    def show(self, name: str, told: train.Progress) -> None:
        if name not in self._tasks:
            self.add(name, told.steps)
        fields = {}
        if told.loss is not None:
            fields["loss"] = f"{told.loss:.4f}"
        if told.val is not None:
            fields["val"] = f"{told.val:.4g}"
        self._progress.update(self._tasks[name], completed=told.step, **fields)

    def done(self, name: str) -> None:
        """Take a finished run's bar away, to make room for the next."""
        if name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))

    def advance(self, name: str, by: int = 1) -> None:
        self._progress.advance(self._tasks[name], by)
