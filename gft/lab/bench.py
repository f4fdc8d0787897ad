"""How fast and how small: our step beside its peers, measured side by side in one run.

Each benchmark yields rows with a ratio, ours over the peer's or over the limit's, and the bar it is held to. Times are
medians of rounds in which ours and the peer take turns, so that whatever else the machine does falls on both.
"""

import csv
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gft
from gft.lab.models import DNN, GPT, ViT
from gft.lab.runs import commit, device_name
from gft.optimizer import move
from gft.vote import tally

ROUNDS = 7


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


def seconds(*functions: Callable[[], Any], device: torch.device, rounds: int = ROUNDS) -> list[float]:
    """Median seconds of a call of each, taking turns."""
    taken: list[list[float]] = [[] for _ in functions]
    for turn in range(rounds + 2):  # the first two turns compile, allocate and warm up
        for function, times in zip(functions, taken, strict=True):
            _wait(device)
            start = time.perf_counter()
            function()
            _wait(device)
            if turn >= 2:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------------------- the kernels


def update(device: torch.device, sizes: Sequence[int] = (4096, 16384)) -> Iterator[Row]:
    """The step's last pass, which reads votes and weights and writes weights, against a copy of as many bytes."""
    for size in sizes:
        for bits, memory in ((2, False), (4, False), (4, True)):
            layer = gft.QuantLinear(size, size, bits, memory=memory, device=device)
            gft.GFT(gft.quantized(layer), seed=1)
            ballot: Any = layer.ballot
            ballot.votes = torch.randint(-99, 100, (size, size), dtype=torch.int32, device=device)
            ballot.tokens = 1
            moved = ballot.votes.numel() * 4 + 2 * layer.weight.numel()
            source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            weight = layer.weight.detach()
            weight.grid, weight.read_scale = layer.grid, layer.scale_number  # type: ignore[attr-defined]

            def ours(weight: Tensor = weight, ballot: Any = ballot) -> None:
                move(weight, ballot, 0, lr=0.1, rule="rounding", p_min=0.0, inertia=0.9)

            def peer(source: Tensor = source, target: Tensor = target) -> None:
                target.copy_(source)

            mine, copy = (moved / took / 1e9 for took in seconds(ours, peer, device=device))
            form = "with memory" if memory else "packed"
            yield Row("update", f"{size}×{size}, {bits} bit, {form}", mine, copy, "GB/s", "a copy", mine / copy,
                      "at least 0.8", mine >= 0.8 * copy)


def votes(device: torch.device, sizes: Sequence[int] = (4096,)) -> Iterator[Row]:
    """The exact int8 product of votes against the float product that a weight gradient would be (bf16 on a GPU)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for size in sizes:
        # As the kernel leaves them: token by token side by side.
        x, delta = (torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device).t() for _ in range(2))
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        mine, peer = seconds(lambda x=x, delta=delta: tally(x, delta, 127), lambda a=a, b=b: a.t() @ b, device=device)
        operations = 2 * size**3 / 1e12
        yield Row("votes", f"{size}³", operations / mine, operations / peer, "Top/s", f"{str(dtype)[6:]} product",
                  peer / mine, "at least 1.5", peer >= 1.5 * mine)


# ---------------------------------------------------------------------------------------------------- whole steps


@dataclass(frozen=True)
class Work:
    """A network and what it is fed."""

    name: str
    build: Callable[[], nn.Module]
    filter_fn: Callable[[nn.Module, str], bool]
    batch: Callable[[torch.device], tuple[Tensor, Tensor]]
    bar: float  # of the time of AdamW in bf16


def _labels(*shape: int, classes: int = 10) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.randint(classes, shape, device=device)


def works(small: bool = False) -> list[Work]:
    """The paper's networks; `small` ones of the same kind for a try."""
    width, shallow = (64, 2) if small else (4096, 5)

    def dnn(batch: int) -> Work:
        return Work(f"DNN {shallow}×{width}, batch {batch}", lambda: DNN(784, 10, width, shallow), lambda module, name: True,
                    lambda device: (torch.randn(batch, 784, device=device), _labels(batch)(device)), 1.0)

    context, wide = (16, 32) if small else (256, 384)
    sequences, images = (2, 2) if small else (128, 256)
    characters = _labels(sequences, context, classes=65)
    return [
        dnn(256), *([] if small else [dnn(8192)]),
        Work("nanoGPT, Hybrid-2", lambda: GPT(65, context, wide, 2 if small else 6, 2 if small else 6),
             lambda module, name: name.startswith("blocks."),
             lambda device: (characters(device), characters(device)), 1.1),
        Work("ViT 28×28, Hybrid-2", lambda: ViT(1, 28, 10, 4, 32 if small else 512, 2 if small else 12, 2 if small else 8),
             lambda module, name: name.startswith("blocks."),
             lambda device: (torch.randn(images, 1, 28, 28, device=device), _labels(images)(device)), 1.1),
    ]


def trainer(work: Work, device: torch.device, bits: int | None, precision: str, compiled: bool) -> Callable[[], None]:
    """A function that takes one training step; bits=None is AdamW on the float network."""
    torch.manual_seed(0)
    model = work.build().to(device)
    parts: list[torch.optim.Optimizer] = []
    if bits is not None:
        gft.quantize_(model, bits, work.filter_fn, bias=False)
        parts.append(gft.GFT(gft.quantized(model)))
    if gft.dense(model):
        parts.append(torch.optim.AdamW(gft.dense(model), fused=True))
    optimizer = gft.Hybrid(*parts)
    x, y = work.batch(device)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext():
            logits = run(x)
        loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()

    return step


def step(device: torch.device, small: bool = False, bits: int = 2, compiled: bool | None = None) -> Iterator[Row]:
    """Forward, backward and update. On a GPU in bf16 and compiled, against AdamW in bf16 and in float32; on a CPU in
    float32 and eager, and the DNN alone, since a transformer's step takes minutes there."""
    on_gpu = device.type == "cuda"
    compiled = on_gpu if compiled is None else compiled
    for work in works(small)[: None if on_gpu or small else 1]:
        mine = trainer(work, device, bits, "bf16" if on_gpu else "fp32", compiled)
        peers = [("bf16", work.bar)] if on_gpu else [("fp32", 1.0)]
        if on_gpu and work.name.startswith("DNN"):
            peers.append(("fp32", 0.6))
        steps = [trainer(work, device, None, precision, compiled) for precision, _ in peers]
        ours, *theirs = seconds(mine, *steps, device=device)
        for (precision, bar), peer in zip(peers, theirs, strict=True):
            yield Row("step", f"{work.name}, {bits} bit", ours * 1e3, peer * 1e3, "ms",
                      f"fused AdamW {precision}" + (", compiled" if compiled else ""), ours / peer, f"at most {bar:g}",
                      ours <= bar * peer)


BENCHMARKS: dict[str, Callable[..., Iterator[Row]]] = {"update": update, "votes": votes, "step": step}


# ---------------------------------------------------------------------------------------------------- keeping


def append(rows: Sequence[Row], file: Path, device: torch.device) -> None:
    """Add the rows to a CSV file, each with commit, device and versions."""
    about = {"commit": commit(), "device": device_name(device), "torch": torch.__version__,
             "date": time.strftime("%Y-%m-%d")}
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = not file.exists()
    with open(file, "a", newline="") as out:
        writer = csv.DictWriter(out, [field.name for field in fields(Row)] + list(about))
        if fresh:
            writer.writeheader()
        writer.writerows({**asdict(row), **about} for row in rows)
