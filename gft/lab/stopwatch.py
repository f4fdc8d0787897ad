"""What the steps of a run take, and nothing else: evaluation, checkpoints and whoever watches are left out.

    watch = Stopwatch(device)
    watch.start()
    ...steps...; watch.mark(20)          # twenty more steps are done, and the host has waited for them
    watch.stop(); evaluate(); watch.start()
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


def counters_of(device: torch.device) -> list[Counter]:
    if multiprocessing.parent_process() is not None:  # one of several runs side by side
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
        self._first: list[float] = []
        self._steps: list[float] = []  # milliseconds of one, in each stretch between two marks

    def start(self) -> None:
        wait_for_gpu()
        self._first = [counter.joules() for counter in self._counters]
        self._since = self._marked = self._clock()

    def mark(self, steps: int) -> None:
        now = self._clock()
        self._steps.append(1e3 * (now - self._marked) / steps)
        self._marked = now

    def stop(self) -> None:
        wait_for_gpu()
        self.seconds += self._clock() - self._since
        if self.joules is not None:
            last = [counter.joules() for counter in self._counters]
            self.joules += sum(after - before for after, before in zip(last, self._first, strict=True))

    @property
    def step_ms(self) -> float | None:
        """The usual time of a step: the median stretch, without the first and its compiling and recording."""
        stretches = self._steps[1:] or self._steps
        return statistics.median(stretches) if stretches else None
