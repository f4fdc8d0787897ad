"""Whole training steps, forward, backward and update, beside fused AdamW's run the same way.

On a GPU in bf16, eager, compiled and captured (side.WAYS); on a CPU in float32 and eager. A network is built once for all
ways. A row's name, by which it can be chosen, is its case and its way: "Llama 12×768, 16×1024 tokens, 2 bit, eager".
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch

from gft.errors import install_hint
from gft.lab.bench import first
from gft.lab.bench.rows import Row, allocated, forget_peak, peak, repeat, say, seconds, wait
from gft.lab.bench.side import FLOAT8, MUON, STEPS, WAYS, Side, has_float8
from gft.lab.bench.works import Ours, Work, works

ROUNDS = 5
GIB = 1 << 30
Wanted = Callable[[str], bool]  # a row's name -> is it to be measured?
Kind = Ours | str  # a side: ours, or AdamW's by its precision


class Case(NamedTuple):
    """A row to be measured."""

    kind: str  # "time" | "peak"
    ours: Ours
    way: str
    name: str

    @property
    def case(self) -> str:
        return self.name.removesuffix(f", {self.way}")


def cases(work: Work, ways: Sequence[str], has_peak: bool) -> list[Case]:
    """All rows of a network."""
    times = [Case("time", ours, way, f"{work.name}, {ours}, {way}") for way in ways for ours in work.ours]
    if work.peak_bar is None or not has_peak or "eager" not in ways:
        return times
    peaks = [Case("peak", ours, "eager", f"peak memory, {work.name}, {ours}, eager") for ours in map(Ours, work.bits)]
    return [*peaks, *times]


def ways_of(work: Work, device: torch.device, ways: Sequence[str] | None = None) -> Sequence[str]:
    """Those asked for, or those that the network has bars for; a CPU runs eager."""
    return ways or (tuple(work.bars) if device.type == "cuda" else ("eager",))


def names(device: torch.device, small: bool = False) -> list[str]:
    """Of all rows that `step` can measure."""
    on_gpu = device.type == "cuda"
    of_works = [case.name for work in works(device, small) for case in cases(work, ways_of(work, device), on_gpu)]
    return [*of_works, *first.names(("eager", "compiled") if on_gpu else ("eager",), small)]


def step(device: torch.device, small: bool = False, wanted: Wanted = lambda name: True,
         ways: Sequence[str] | None = None) -> Iterator[Row]:
    """Milliseconds a step of every network in every way, peak memory where a bar is set for it, and the wait for the first
    step, each beside AdamW's."""
    on_gpu = device.type == "cuda"
    for work in works(device, small):
        chosen = [case for case in cases(work, ways_of(work, device, ways), on_gpu) if wanted(case.name)]
        if chosen and work.needs and find_spec(work.needs) is None:
            say(f"  {work.name}: left out, it needs {work.needs}; install it with: {install_hint('hf')}")
        elif chosen:
            say(f"  {work.name}")
            yield from rows_of(work, chosen, device)
            free(device)
    yield from first.first(device, small, wanted, [way for way in ways or ("eager", "compiled")[: 1 + on_gpu]
                                                   if way != "captured"])


def rows_of(work: Work, chosen: Sequence[Case], device: torch.device) -> Iterator[Row]:
    """The chosen rows of one network."""
    peers = peers_of(work, chosen, device)
    low = peers[0]
    # Ours first: what libraries keep from a process's first products on then counts as ours.
    kinds: dict[Kind, tuple[Ours | None, str]] = {**{case.ours: (case.ours, low) for case in chosen},
                                                  **{peer: (None, peer) for peer in peers}}
    sides: dict[Kind, Side] = {}
    held: dict[Kind, int] = {}
    for name, kind in kinds.items():
        sides[name], held[name] = with_peak(partial(Side, work, device, *kind), device)
    for case in chosen:
        if case.kind == "peak":
            yield row(case, held[case.ours] / GIB, held[low] / GIB, "GiB", f"fused AdamW {low}, eager", work.peak_bar)
    for way in dict.fromkeys(case.way for case in chosen if case.kind == "time"):
        begun = time.perf_counter()
        took = dict(zip(sides, in_turns([side.steps(**WAYS[way]) for side in sides.values()], device), strict=True))
        say(f"    {way}, measured in {time.perf_counter() - begun:.0f} s")
        for case in chosen:
            for peer in peers if (case.kind, case.way) == ("time", way) else ():
                if (bar := bar_of(work, case, peer, low)) is not None:
                    yield row(case, took[case.ours] * 1e3, took[peer] * 1e3, "ms", f"fused AdamW {peer}, {way}", bar)


def peers_of(work: Work, chosen: Sequence[Case], device: torch.device) -> list[str]:
    """What AdamW trains in beside these cases: first what is usual on the device."""
    on_gpu = device.type == "cuda"
    peers = ["bf16" if on_gpu else "fp32"]
    if on_gpu and work.fp32_bar is not None:
        peers.append("fp32")
    if on_gpu and any(ours.compute for ours in work.more) and has_float8():
        peers.append(FLOAT8)
    if any(case.ours.momentum for case in chosen):
        peers.append(peers[0] + MUON)
    return peers


def bar_of(work: Work, case: Case, peer: str, usual: str) -> float | None:
    """What of a peer's time a case is to take at most; None: they are not compared. `usual`: what the device trains in."""
    if peer.endswith(MUON) or case.ours.momentum:
        return work.muon_bar if peer.endswith(MUON) and case.ours.momentum else None
    if peer == FLOAT8:
        return work.float8_bar
    if peer == "fp32" and peer != usual and work.fp32_bar is not None:
        return work.fp32_bar
    return work.low_bar if case.ours.compute else work.bars.get(case.way, 1.0)


def row(case: Case, ours: float, peer: float, unit: str, peer_is: str, bar: float | None) -> Row:
    assert bar is not None  # of those that are measured
    return Row("step", case.case, ours, peer, unit, peer_is, ours / peer, f"at most {bar:g}", ours <= bar * peer)


def in_turns(steps: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Median seconds of one step of each. What the first calls compile and record is no part of it."""
    with exact_float32():
        # By itself a network's votes lie in the same places step after step (replay.py), as in training; after another
        # one's steps they lie elsewhere at first.
        settle = int(device.type == "cuda" and len(steps) > 1)
        taken = seconds(*(partial(repeat, one, STEPS) for one in steps), device=device, rounds=ROUNDS, settle=settle)
    return [one / STEPS for one in taken]


def with_peak(build: Callable[[], Side], device: torch.device) -> tuple[Side, int]:
    """A side, and the most bytes that some eager steps hold of it: the network, its optimizer's state, what is alive between
    forward and backward. Drawing the network is left out."""
    forget_peak(device)
    before = allocated(device)
    side = build()
    forget_peak(device)
    repeat(side.steps(**WAYS["eager"]), STEPS)
    wait(device)
    return side, peak(device) - before


@contextmanager
def exact_float32() -> Iterator[None]:
    """float32 means float32 here, whatever the process asked for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def free(device: torch.device) -> None:
    """Let go of the last network: its graphs, what was compiled for it, and the memory that torch keeps for later."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
