"""Joules as the machine's own counters have them, in windows around training.

    counters, missing = energy.find_counters(device)         # NVML for a GPU, RAPL for the CPU; why one is missing
    idle = energy.idle_power(counters)                       # watts while nothing runs
    with energy.measure(counters, idle=idle) as window:
        ...
    window.reading.gross, window.reading.net                 # joules; net: without what idling would have taken

A counter is anything with a `name` and a rising `joules()`; all functions take counters as arguments. The GPU's is
NVML's total energy (Volta and newer), read through nvidia-ml-py: one call at each end of a window, and the call that zeus
makes as well, whose monitor would bring pandas, scikit-learn and more along. It ticks some ten times a
second, so a window should last seconds. The CPU's is RAPL's package domain in /sys/class/powercap.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from gft.errors import UsageError, install_hint

POWERCAP = Path("/sys/class/powercap")
SHORT_WINDOW = 2.0  # seconds; in less, a tick of the GPU's counter is more than a few % of the window
SECONDS_BETWEEN_LOOKS = 60.0  # RAPL's register starts anew after some quarter of an hour at full load


class NotMeasurable(UsageError):
    """There is no counter to read here, and why."""


class Counter(Protocol):
    """Joules since some moment: only differences mean anything."""

    name: str
    about: str

    def joules(self) -> float: ...


# ---------------------------------------------------------------------------------------------------- counters


class GpuCounter:
    """A whole GPU's energy by NVML, everything that runs on it included. `nvml` is the module pynvml, or its like."""

    name = "gpu"

    def __init__(self, uuid: str, nvml: Any) -> None:
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.joules()
            self.about = f"NVML, {nvml.nvmlDeviceGetName(self._handle)}, driver {nvml.nvmlSystemGetDriverVersion()}"
        except nvml.NVMLError as error:
            raise NotMeasurable(f"the GPU's energy is not measurable here: NVML says {str(error)!r}; it needs the driver's "
                                "library and a whole GPU, Volta or newer") from None

    def joules(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000


class RaplCounter:
    """One CPU package, by a folder of powercap."""

    def __init__(self, folder: Path) -> None:
        self.name = f"cpu {(folder / 'name').read_text().strip()}"
        self.about = f"RAPL, {folder.name}"
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last, self._total = self._read(), 0

    def _read(self) -> int:
        return int(self._file.read_text())

    def joules(self) -> float:
        """Counts on where the register has started anew, if it was read since it last did."""
        now = self._read()
        self._total += now - self._last + (self._range if now < self._last else 0)
        self._last = now
        return self._total / 1e6


def gpu_counter(device: torch.device) -> GpuCounter:
    """The counter of a CUDA device of torch, found by its UUID: NVML numbers GPUs without CUDA_VISIBLE_DEVICES."""
    try:
        import pynvml
    except ModuleNotFoundError:
        raise NotMeasurable("the GPU's energy is not measurable here: NVML is read through nvidia-ml-py, which is not "
                            f"installed; {install_hint('energy')}") from None
    return GpuCounter(f"GPU-{torch.cuda.get_device_properties(device).uuid}", pynvml)


def cpu_counters(powercap: Path = POWERCAP) -> list[RaplCounter]:
    """One counter a CPU package."""
    folders = [folder for folder in sorted(powercap.glob("intel-rapl:*"))
               if (folder / "name").is_file() and (folder / "name").read_text().startswith("package")]
    if not folders:
        raise NotMeasurable(f"the CPU's energy is not measurable here: {powercap} has no RAPL package; it takes an Intel or "
                            "AMD machine whose kernel shows it, which virtual machines and containers seldom do")
    try:
        return [RaplCounter(folder) for folder in folders]
    except PermissionError:
        raise NotMeasurable(f"the CPU's energy is not measurable here: only root may read {folders[0]}/energy_uj; allow it "
                            f"with sudo chmod a+r {powercap}/intel-rapl:*/energy_uj") from None


def find_counters(device: torch.device | str, powercap: Path = POWERCAP,
                  gpu: Callable[[torch.device], Counter] = gpu_counter) -> tuple[list[Counter], list[str]]:
    """The counters for training on `device`, and a sentence for each kind that is not there.

    On a GPU its own counter is a must and the CPU's a welcome addition; on a CPU there is only the CPU's. What is a must
    and missing raises NotMeasurable.
    """
    device = torch.device(device)
    counters: list[Counter] = []
    if device.type == "cuda":
        counters.append(gpu(device))
    elif device.type != "cpu":
        raise NotMeasurable(f"the energy of a device of type {device.type} is not measurable here; train on cuda or cpu")
    try:
        return [*counters, *cpu_counters(powercap)], []
    except NotMeasurable as reason:
        if not counters:
            raise
        return counters, [str(reason)]


# ---------------------------------------------------------------------------------------------------- windows


@dataclass(frozen=True)
class Reading:
    """What a window came to."""

    seconds: float
    joules: dict[str, float]  # of each counter, gross
    idle_watts: dict[str, float]

    @property
    def gross(self) -> float:
        return sum(self.joules.values())

    @property
    def net(self) -> float:
        """Without what the same machine takes when idle for as long."""
        return self.gross - self.seconds * sum(self.idle_watts.get(name, 0.0) for name in self.joules)


class Window:
    """A window while it is open: `look()` now and then in a long one. `reading` is there once it is closed."""

    def __init__(self, counters: Sequence[Counter], clock: Callable[[], float]) -> None:
        self._counters, self._clock = counters, clock
        self._start = self._looked_at = clock()
        self._first = [counter.joules() for counter in counters]
        self._reading: Reading | None = None

    def look(self) -> None:
        """Read the counters if that was a minute ago, lest one start anew unseen."""
        if self._clock() - self._looked_at > SECONDS_BETWEEN_LOOKS:
            self._looked_at = self._clock()
            for counter in self._counters:
                counter.joules()

    def close(self, idle: Mapping[str, float]) -> None:
        last = [counter.joules() for counter in self._counters]
        spent = {counter.name: after - before
                 for counter, before, after in zip(self._counters, self._first, last, strict=True)}
        self._reading = Reading(self._clock() - self._start, spent, dict(idle))

    @property
    def reading(self) -> Reading:
        if self._reading is None:
            raise UsageError("this window has no reading yet; leave its with block first")
        return self._reading


def wait_for_gpu() -> None:
    """Kernels run on after the call that starts them has returned; a window must not end before they do."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def measure(counters: Sequence[Counter], *, idle: Mapping[str, float] | None = None, wait: Callable[[], None] = wait_for_gpu,
            clock: Callable[[], float] = time.perf_counter) -> Iterator[Window]:
    """A window: the joules between its begin and its end, from each of `counters`.

    idle: watts of each counter while nothing runs (`idle_power`), which `reading.net` leaves out; without it net is gross.
    """
    if not counters:
        raise NotMeasurable("there is no counter to measure with; energy.find_counters(device) gives those of this machine")
    wait()
    window = Window(counters, clock)
    yield window
    wait()
    window.close(idle or {})


def idle_power(counters: Sequence[Counter], seconds: float = 5.0, *, sleep: Callable[[float], None] = time.sleep,
               clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Watts of each counter while this process sleeps. Others on the machine should sleep, too."""
    with measure(counters, clock=clock) as window:
        sleep(seconds)
    return {name: joules / window.reading.seconds for name, joules in window.reading.joules.items()}


def measure_steps(runs: Mapping[str, Iterator[Any]], counters: Sequence[Counter], *, steps: int, repeats: int = 1,
                  warmup: int = 0, idle: Mapping[str, float] | None = None, wait: Callable[[], None] = wait_for_gpu,
                  clock: Callable[[], float] = time.perf_counter) -> Iterator[tuple[str, Reading]]:
    """`repeats` windows of `steps` steps for each of several runs, each an iterator that takes a step a `next`.

    Each run takes `warmup` steps first, unmeasured. Then the runs take turns, a window each, so that a chip that grows
    warm, or a neighbour that wakes up, falls on all of them alike. Gives (run's name, reading) after each window.
    """
    for name, run in runs.items():
        take(run, warmup, name)
    for _ in range(repeats):
        for name, run in runs.items():
            with measure(counters, idle=idle, wait=wait, clock=clock) as window:
                take(run, steps, name, window)
            yield name, window.reading


def take(run: Iterator[Any], steps: int, name: str = "the run", window: Window | None = None) -> None:
    """`steps` steps of a run."""
    taken = 0
    for _ in islice(run, steps):
        taken += 1
        if window is not None:
            window.look()
    if taken < steps:
        raise UsageError(f"{name} ended {steps - taken} steps before the window did; give it more steps, or measure fewer")


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation, 0 of a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
