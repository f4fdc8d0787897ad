"""Figures as files: matplotlib without a window, the same bytes for the same data."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gft.errors import UsageError, install_hint
from gft.files import written_atomically


def pyplot() -> Any:
    """matplotlib's pyplot, imported when the first figure is drawn: it takes a second that most commands need not wait."""
    try:
        import matplotlib
    except ModuleNotFoundError as missing:
        raise UsageError("the plot needs matplotlib, which is not installed; install it with: "
                         f"{install_hint('lab')}") from missing
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gft"  # or every SVG would name its parts by random numbers
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, files: Iterable[Path]) -> None:
    """Write a figure in the formats that the files' names end in, and close it."""
    for file in files:
        kind = file.suffix.removeprefix(".")
        with written_atomically(file) as unfinished:
            figure.savefig(unfinished, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    pyplot().close(figure)
