"""How a step grows with the network: time a token and peak memory of a DNN, from narrow to wide, packed at 2 bits.

Every layer is width × width and integer. Time a token should grow as the weights do, and no faster; memory too, at a quarter
of a byte each and one layer's scratch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gft.lab import figures
from gft.lab.bench.rows import Row, allocated, forget_peak, peak, repeat, say, seconds
from gft.lab.bench.side import STEPS, Side
from gft.lab.bench.works import Ours, Work
from gft.lab.models import DNN

DEPTH = 4
STRAIGHT = "linear in weights from the width before"


@dataclass(frozen=True)
class Point:
    """One width."""

    width: int
    seconds: float  # a token and step
    bytes: int  # at the peak; 0 on a CPU

    @property
    def weights(self) -> int:
        return DEPTH * self.width**2


def points(device: torch.device, widths: Sequence[int], tokens: int) -> Iterator[Point]:
    for width in widths:
        work = Work(f"DNN {DEPTH}×{width}", lambda width=width: DNN(width, width, width, DEPTH), lambda module, name: True,
                    lambda on, width=width: (torch.randn(tokens, width, device=on),
                                             torch.randint(width, (tokens,), device=on)), {}, bias=False)
        forget_peak(device)
        others = allocated(device)
        side = Side(work, device, Ours(2), "bf16" if device.type == "cuda" else "fp32", memory=False, in_backward=True)
        forget_peak(device)  # of the floats it was drawn in; steps before the graph's recording count, its replays cannot
        step = partial(repeat, side.steps(compiled=False, captured=True), STEPS)
        (took,) = seconds(step, device=device, rounds=5)
        point = Point(width, took / STEPS / tokens, peak(device) - others)
        say(f"  width {width}: {point.seconds * 1e9:.4g} ns a token"
             + (f", peak {point.bytes / 1e9:.3g} GB" if point.bytes else ""))
        del step, side
        yield point


def growth(device: torch.device, small: bool = False, files: Sequence[Path] = ()) -> Iterator[Row]:
    """Time a token and peak memory against the width, beside what they would be if they grew as the weights do from one
    width to the next. Drawn to `files` at the end."""
    widths, tokens = ((32, 64, 128), 64) if small else ((1024, 2048, 4096, 8192, 16384), 4096)
    measured: list[Point] = []
    for point in points(device, widths, tokens):
        before = measured[-1] if measured else point
        measured.append(point)
        times = point.weights / before.weights
        case = f"DNN {DEPTH}×{point.width}, {tokens} tokens, packed 2 bit"
        linear = before.seconds * times
        yield Row("growth", f"{case}: time a token", point.seconds * 1e9, linear * 1e9, "ns", STRAIGHT,
                  point.seconds / linear, "at most 1.1", point.seconds <= 1.1 * linear)
        if device.type == "cuda":
            linear = before.bytes * times
            yield Row("growth", f"{case}: peak memory", point.bytes / 1e9, linear / 1e9, "GB", STRAIGHT,
                      point.bytes / linear, "at most 1.1", point.bytes <= 1.1 * linear)
    plot(measured, tokens, files)


def plot(measured: Sequence[Point], tokens: int, files: Sequence[Path]) -> None:
    """Time a token, and memory where it was measured, against the weights; a line each for growth as the weights grow."""
    if not files:
        return
    plt = figures.pyplot()
    curves = {"time a token, ns": [point.seconds * 1e9 for point in measured]}
    if all(point.bytes for point in measured):
        curves["peak memory, GB"] = [point.bytes / 1e9 for point in measured]
    weights = [point.weights for point in measured]
    figure, axes = plt.subplots(1, len(curves), figsize=(4.6 * len(curves), 3.8), squeeze=False, layout="constrained")
    for one, (name, values) in zip(axes[0], curves.items(), strict=True):
        one.plot(weights, [values[-1] * count / weights[-1] for count in weights], color="#999999", linestyle="--",
                 linewidth=1.2, label="linear in weights")
        one.plot(weights, values, color="#D55E00", marker="o", markersize=4, linewidth=1.6, label="measured")
        for point, value in zip(measured, values, strict=True):
            one.annotate(str(point.width), (point.weights, value), (5, -10), textcoords="offset points", fontsize=8)
        one.set(xscale="log", yscale="log", xlabel="weights (points: the width)", ylabel=name)
        one.margins(x=0.12)
        one.grid(alpha=0.25, which="both")
        one.legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(f"DNN of {DEPTH} layers, packed 2 bit, {tokens} tokens a step", fontsize=10)
    figures.save(figure, files)
