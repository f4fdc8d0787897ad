"""Damaged inputs that follow coverage: atheris (libFuzzer) keeps those that reach new lines of gft, and goes on from them.

    pip install atheris==3.0.0                               wheels for Linux on x86-64; `make fuzz` does it
    python tests/fuzz/guided.py --inputs 1000000             shared out over all targets
    python tests/fuzz/guided.py --targets npz checkpoint --seed 7 --inputs 5000

The same files, readers and promises as those of fuzz.py and data_files.py. What libFuzzer changes is either a file's bytes,
or the choices by which a file's structure is damaged before its checksum is taken anew: else few would get past it. Each
target has a process of its own, whose memory and whose seconds an input are limited. What is not as promised is printed with
the bytes that led there, and the exit status is 1.
"""

import argparse
import base64
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]  # the gft that this file lies beside

try:
    import atheris
except ModuleNotFoundError:
    sys.exit("atheris is not installed; on Linux on x86-64 install it with: pip install atheris==3.0.0 (elsewhere it has no "
             "wheels, and fuzz.py and data_files.py do without)")

SECONDS, LIMIT = 10, 2**30  # an input; bytes above what the process has when it begins
SHOWN = 5  # findings of a target that are printed
# How often a target has a turn. A checkpoint takes a hundred times as long as a line of JSON.
WEIGHTS = {"checkpoint": 1, "state": 1, "safetensors": 1, "config": 2}


class Chosen(Random):
    """Random numbers that libFuzzer chooses: choices, shuffles and all are made of these. Where its bytes end, chance goes
    on: a sample of different places would wait for ever for a second number."""

    def __init__(self, data: bytes) -> None:
        super().__init__(len(data))
        self.source = atheris.FuzzedDataProvider(data)

    def random(self) -> float:
        return self.source.ConsumeIntInRange(0, 2**32 - 1) / 2**32 if self.source.remaining_bytes() else super().random()

    def getrandbits(self, k: int) -> int:
        if not self.source.remaining_bytes():
            return super().getrandbits(k)
        return int.from_bytes(self.source.ConsumeBytes(-(-k // 8)), "little") & ((1 << k) - 1)

    def _randbelow(self, n: int) -> int:
        return self.source.ConsumeIntInRange(0, n - 1) if self.source.remaining_bytes() else int(super().random() * n)


class OfReader:
    """A reader of data_files as a target: an input is refused in one sentence, or read."""

    def __init__(self, name: str, folder: Path) -> None:
        from data_files import READERS

        self.reader = READERS[name]
        self.valid = self.reader.seeds
        self.path = folder / self.reader.file

    def damaged(self, random: Random) -> bytes:
        from data_files import mutated

        return mutated(random.choice(self.valid), random.choice(self.valid), random)

    def feed(self, content: bytes) -> bool:
        from data_files import wrong_with

        self.path.write_bytes(content)
        try:
            self.reader.read(self.path)
        except Exception as error:
            if (why := wrong_with(error)) is not None:
                raise AssertionError(why) from error
            return True
        return False


class Planted:
    """A fault of four steps, which chance finds once in 2^32 inputs: whether coverage is followed."""

    valid = (b"gold",)

    def damaged(self, random: Random) -> bytes:
        return random.randbytes(4)

    def feed(self, content: bytes) -> bool:
        found = 0
        for index, letter in enumerate(b"gft!"):
            if content[index : index + 1] != bytes([letter]):
                return True
            found += 1 << index
            _step(found)
        raise KeyError("planted")


def _step(found: int) -> int:
    """A line of its own for each step: what is counted is lines, not values."""
    if found == 1:
        return 1
    if found == 3:
        return 2
    if found == 7:
        return 3
    return 0


def names() -> list[str]:
    """Of all targets but the planted one."""
    from data_files import READERS
    from targets import TARGETS

    return list({**TARGETS, **READERS})


# ---------------------------------------------------------------------------------------------------- one target


def follow(name: str, inputs: int, seed: int, folder: Path) -> None:
    """Feed one target; this process ends with it."""
    with atheris.instrument_imports(include=["gft"]):
        from targets import TARGETS, quiet
    quiet()
    for function in (Planted.feed, _step) if name == "planted" else ():
        atheris.instrument_func(function)

    def build() -> Any:
        return TARGETS[name]() if name in TARGETS else Planted() if name == "planted" else OfReader(name, folder)

    target, counts, began = build(), Counter[str](), time.perf_counter()

    def one(data: bytes) -> None:
        nonlocal target
        if sum(counts.values()) == inputs:
            print(json.dumps({"target": name, "inputs": inputs, **counts, "seconds": round(time.perf_counter() - began, 1),
                              "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}), flush=True)
            os._exit(1 if set(counts) - {"refused", "taken"} else 0)
        as_bytes, rest = bool(target.valid) and data[:1] < b"\x80", data[1:]
        content = rest if as_bytes else target.damaged(Chosen(rest))
        try:
            counts["refused" if target.feed(content) else "taken"] += 1
        except Exception as error:
            kind = type(error).__name__
            counts[kind] += 1
            if counts[kind] <= SHOWN:
                where = "".join(traceback.format_exception(error)[-6:])
                led_there = base64.b64encode(data).decode()[:4000]
                print(f"{name}: {kind}: {str(error)[:300]}\n{where}  base64: {led_there}", file=sys.stderr, flush=True)
            target = build()  # whose state may have changed

    corpus = folder / "corpus"
    corpus.mkdir()
    draw = Random(seed)
    beginnings = [b"\0" + content for content in target.valid] + [b"\xff" + draw.randbytes(300) for _ in range(30)]
    for number, content in enumerate(beginnings):
        (corpus / str(number)).write_bytes(content)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + LIMIT, resource.RLIM_INFINITY))  # beyond it: MemoryError
    longest = 2 * max(map(len, beginnings))
    atheris.Setup([sys.argv[0], str(corpus), f"-seed={seed + 1}", f"-max_len={longest}", f"-timeout={SECONDS}",
                   "-verbosity=0", "-rss_limit_mb=4096", f"-artifact_prefix={folder}/"], one)
    atheris.Fuzz()


# ---------------------------------------------------------------------------------------------------- all of them


def shares(chosen: list[str], inputs: int) -> dict[str, int]:
    from data_files import READERS

    weights = {name: WEIGHTS.get(name) or (READERS[name].weight if name in READERS else 1) for name in chosen}
    return {name: -(-inputs * weight // sum(weights.values())) for name, weight in weights.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", default=[], help="planted: a fault to be found")
    parser.add_argument("--process", type=Path, help=argparse.SUPPRESS)  # of one target: the folder it works in
    asked = parser.parse_args()
    if asked.process:  # before anything of gft is imported
        follow(asked.targets[0], asked.inputs, asked.seed, asked.process)
    if unknown := set(asked.targets) - {*names(), "planted"}:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(names())}")
    failed, total = [], 0
    for name, inputs in shares(asked.targets or names(), asked.inputs).items():
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
            command = [sys.executable, __file__, "--targets", name, "--inputs", str(inputs), "--seed", str(asked.seed)]
            ended = subprocess.run([*command, "--process", folder], capture_output=True, text=True, errors="replace")
            print(ended.stdout, end="", flush=True)
            if ended.returncode:  # also where libFuzzer has ended it: a crash, a hang
                failed.append(name)
                print(f"{name} ended with {ended.returncode}\n{ended.stderr[-20_000:]}", file=sys.stderr)
        total += inputs
    print(f"{total:,} inputs; not as promised: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
