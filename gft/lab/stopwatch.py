"""What the steps of a run take, and nothing else: evaluation, checkpoints and whoever watches are left out.

    watch = Stopwatch(counters_of(device))
    watch.start(0)
    ...steps...; watch.mark(20)              # step 20 is done, and the host has waited for it
    watch.stop(); evaluate(); watch.start(20)
    watch.seconds, watch.joules, watch.step_ms

Joules are the machine's own counters' (energy/meter.py), gross; None where it has none, or where this process trains beside
others, whose joules could not be told from its own.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from gft.lab.energy.meter import Counter, NotMeasurable, find_counters, wait_for_gpu


def is_alone() -> bool:
    """Has this run its machine to itself, as far as `gft reproduce --jobs` and `gft tune --jobs` know?"""
    return multiprocessing.parent_process() is None


def counters_of(device: torch.device) -> list[Counter]:
    if not is_alone():
        return []
    try:
        return find_counters(device)[0]
    except NotMeasurable:
        return []


class Stopwatch:
    def __init__(self, counters: Sequence[Counter], seconds: float = 0.0, joules: float | None = 0.0,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """seconds, joules: of the steps before, where a run is resumed; None: not known."""
        self._counters, self._clock = counters, clock
        self.seconds, self.joules = seconds, joules if counters else None
        self._since = self._marked = 0.0
        self._step = 0  # at the last start or mark
        self._first: list[float] = []
        self._stretches: list[tuple[int, float]] = []  # steps between a start or mark and the next mark, milliseconds of one

    def start(self, step: int) -> None:
        wait_for_gpu()
        self._first = [counter.joules() for counter in self._counters]
        self._since, self._marked, self._step = self._clock(), self._clock(), step

    def mark(self, step: int) -> None:
        now, steps = self._clock(), step - self._step
        if steps:
            self._stretches.append((steps, 1e3 * (now - self._marked) / steps))
        self._marked, self._step = now, step

    def stop(self) -> None:
        wait_for_gpu()
        self.seconds += self._clock() - self._since
        if self.joules is not None:
            last = [counter.joules() for counter in self._counters]
            self.joules += sum(after - before for after, before in zip(last, self._first, strict=True))

    @property
    def step_ms(self) -> float | None:
        """The usual time of a step: the median of the longer stretches, without the first, which compiles and records."""
        stretches = self._stretches[1:] or self._stretches
        longest = max((steps for steps, _ in stretches), default=0)
        return statistics.median(ms for steps, ms in stretches if 2 * steps >= longest) if stretches else None
