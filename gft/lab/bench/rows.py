"""A benchmark's rows: how times are taken, and where the rows are kept."""

import csv
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gft.files import make_folder, sentence_for
from gft.lab.baselines import tensors_in
from gft.lab.provenance import commit, device_name

ROUNDS = 7
REPEATS = 10  # of something short in one timing, so that waiting for the last does not count


@dataclass(frozen=True)
class Row:
    bench: str
    case: str
    ours: float
    peer: float
    unit: str
    peer_is: str
    ratio: float  # ours / peer
    bar: str  # what the ratio, or ours, is held to
    met: bool


# ---------------------------------------------------------------------------------------------------- measuring


def say(text: str) -> None:
    """Print at once how far a long benchmark has come."""
    print(text, flush=True)


def wait(device: torch.device) -> None:
    """For the device to have done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(*functions: Callable[[], Any], device: torch.device, rounds: int = ROUNDS, settle: int = 0) -> list[float]:
    """Median seconds of a call of each, taking turns. settle: calls before each that is timed, for what has to find its
    place again after another has used the memory."""
    taken: list[list[float]] = [[] for _ in functions]
    for turn in range(rounds + 2):  # the first two turns compile, allocate and warm up
        for function, times in zip(functions, taken, strict=True):
            repeat(function, settle)
            wait(device)
            start = time.perf_counter()
            function()
            wait(device)
            if turn >= 2:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def captured(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The function as one CUDA graph; on a CPU as it is."""
    if device.type != "cuda":
        return function
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # compiles kernels and lets libraries make their choices
                function()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
    return partial(_replay, graph, function)


def _replay(graph: torch.cuda.CUDAGraph, function: Callable[[], object]) -> None:
    """`function` is held on to for the tensors it owns, which the graph writes to."""
    graph.replay()


def repeat(function: Callable[[], object], times: int = REPEATS) -> None:
    for _ in range(times):
        function()


def allocated(device: torch.device) -> int:
    """Bytes of a GPU that tensors hold now. torch counts none on a CPU: 0 there."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    """The most bytes that tensors held since `forget_peak`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def forget_peak(device: torch.device) -> None:
    """Free what nobody holds, and count the peak from here. A CPU has none to count."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def stored(values: Any) -> int:
    """Bytes of memory that the tensors in a nest of lists and dicts keep: those of their storages, each once, and whole if
    only a view of it is kept."""
    storages = (tensor.untyped_storage() for tensor in tensors_in(values))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# ---------------------------------------------------------------------------------------------------- keeping


def append(rows: Sequence[Row], file: Path, device: torch.device) -> None:
    """Add the rows to a CSV file, each with commit, device and versions."""
    about = {"commit": commit(), "device": device_name(device), "torch": torch.__version__,
             "date": time.strftime("%Y-%m-%d")}
    make_folder(file.parent)
    is_new = not file.exists()
    with sentence_for(file), open(file, "a", newline="") as out:
        writer = csv.DictWriter(out, [field.name for field in fields(Row)] + list(about))
        if is_new:
            writer.writeheader()
        writer.writerows({**asdict(row), **about} for row in rows)
