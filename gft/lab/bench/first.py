"""How long a user waits for the first step: kernels are built for it, and compiled where the model is.

Each first step is that of a fresh process, once with empty cache folders and once with those the process before has left.
Importing, building the network and starting the GPU are not counted; they are the same with AdamW.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import gft
from gft.lab.bench.rows import Row, say, wait
from gft.lab.bench.side import WAYS, Side
from gft.lab.bench.works import Batch, Ours, Work, in_blocks
from gft.lab.models import GPT

BITS = 2
SECONDS_MORE = 10.0  # than AdamW's
CACHES = ("empty caches", "kept caches")
FOLDERS = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # gft's own, for C; kernels'; compiled models'


def twelve_blocks(small: bool = False) -> Work:
    """A GPT; `small` has two blocks."""
    depth, width, context, sequences, vocabulary = (2, 32, 16, 2, 65) if small else (12, 768, 1024, 8, 16384)

    def tokens(device: torch.device) -> Batch:
        x = torch.randint(vocabulary, (sequences, context), device=device)
        return x, x

    return Work(f"GPT {depth}×{width}", lambda: GPT(vocabulary, context, width, depth, max(1, width // 64)), in_blocks,
                tokens, {})


def names(ways: Sequence[str], small: bool = False) -> list[str]:
    """Of all rows."""
    return [f"{case(cache, small)}, {way}" for way in ways for cache in CACHES]


def case(cache: str, small: bool) -> str:
    return f"first step, {twelve_blocks(small).name}, {BITS} bit, {cache}"


def first(device: torch.device, small: bool, wanted: Callable[[str], bool], ways: Sequence[str]) -> Iterator[Row]:
    """A row for each way and cache."""
    for way in ways:
        if not any(wanted(name) for name in names([way], small)):
            continue
        precision = "bf16" if device.type == "cuda" else "fp32"
        task = {"device": str(device), "way": way, "precision": precision, "small": small}
        taken: dict[str, list[float]] = {}
        for side, bits in (("ours", BITS), ("AdamW", None)):
            with TemporaryDirectory() as folder:
                taken[side] = [in_a_process({**task, "bits": bits}, Path(folder)) for _ in CACHES]
            say(f"  first step, {way}, {side}: {taken[side][0]:.1f} s, then {taken[side][1]:.1f} s")
        for cache, ours, peer in zip(CACHES, taken["ours"], taken["AdamW"], strict=True):
            if wanted(f"{case(cache, small)}, {way}"):
                yield Row("step", case(cache, small), ours, peer, "s", f"fused AdamW {precision}, {way}", ours / peer,
                          f"at most {SECONDS_MORE:g} s more", ours <= peer + SECONDS_MORE)


def in_a_process(task: dict[str, Any], caches: Path) -> float:
    """`measure` in a process of its own, whose caches are in that folder."""
    program = "import json, sys; from gft.lab.bench import first; print(first.measure(**json.loads(sys.argv[1])))"
    path = os.pathsep.join([str(Path(gft.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **{name: str(caches / name.lower()) for name in FOLDERS}}
    done = subprocess.run([sys.executable, "-c", program, json.dumps(task)], env=environment, stdout=subprocess.PIPE,
                          text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(device: str, way: str, precision: str, small: bool, bits: int | None) -> float:
    """Seconds of a network's first step."""
    on = torch.device(device)
    side = Side(twelve_blocks(small), on, None if bits is None else Ours(bits), precision)
    step = side.steps(**WAYS[way])
    wait(on)
    start = time.perf_counter()
    step()
    wait(on)
    return time.perf_counter() - start
