"""How fast and how small: our step beside its peers, measured side by side in one run.

Each benchmark yields rows with a ratio, ours over the peer's or over the limit's, and the bar it is held to. Times are
medians of rounds in which ours and the peer take turns, so that whatever else the machine does falls on both. What each
measures, and why its bar is where it is: docs/benchmarks.md, docs/kernels.md.
"""

from collections.abc import Callable, Iterator

from gft.lab.bench import decode, growth, memory, scale
from gft.lab.bench.kernels import update, votes
from gft.lab.bench.rows import ROUNDS, Row, append, seconds
from gft.lab.bench.side import WAYS, Side
from gft.lab.bench.steps import step
from gft.lab.bench.works import Ours, Work, works

# Name -> benchmark, of (device, small) and more of its own.
BENCHMARKS: dict[str, Callable[..., Iterator[Row]]] = {
    "update": update, "votes": votes, "step": step, "memory": memory.memory, "decode": decode.decode,
    "growth": growth.growth, "scale": scale.scale}
LONG = ("growth", "scale")  # run only when they are named

__all__ = ["BENCHMARKS", "LONG", "ROUNDS", "WAYS", "Ours", "Row", "Side", "Work", "append", "decode", "growth", "memory",
           "scale", "seconds", "step", "update", "votes", "works"]
