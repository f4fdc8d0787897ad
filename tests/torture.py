"""Runs that are killed, starved of disk, locked out and given a clock that jumps, and what becomes of them (make torture).

    python tests/torture.py kills --kills 200     each run is killed until it is done, and must end as one that never was
    python tests/torture.py long --steps 100000   one long training: how its memory and its files grow

Every attempt is a forked process, so that it costs its training and no import. Half of the kills wait until a checkpoint is
being written. The tests do a dozen of them.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gft.checkpoint import read_checkpoint
from gft.errors import UsageError
from gft.lab import recipes, train
from gft.lab.recipe import Recipe

NOBODY = 65534
SMALL_DISK = 2**22
SMALL = ["steps=120", "batch=64", "eval_every=40", "warmup=5"]
RECIPES = {
    "digits-hybrid-4bit": ["width=24", "dropout=0.1"],
    "digits-quantized-2bit": ["width=24"],
    "mnist-dnn-hybrid-3bit-packed": ["data=digits", "width=24"],
    "verses-gpt-hybrid2-2bit": ["width=16", "depth=2", "heads=2", "batch=8"],
}
FAULTS = ("none", "full disk", "read-only folder", "clock that jumps")


@dataclass
class Count:
    """What has been done to runs, and what they made of it."""

    runs: int = 0
    kills: int = 0
    while_writing: int = 0
    said: Counter[str] = field(default_factory=Counter)  # sentences of runs that could not go on, by fault

    def __str__(self) -> str:
        said = ", ".join(f"{number} × {fault}" for fault, number in sorted(self.said.items())) or "none"
        return (f"{self.kills} kills, {self.while_writing} of them while a file was being written; one-sentence refusals: "
                f"{said}; {self.runs} runs, all ended with the bits of one that was never killed")


def small_recipes() -> list[Recipe]:
    return [recipes.find(name).changed([*SMALL, *settings]) for name, settings in RECIPES.items()]


# ---------------------------------------------------------------------------------------------------- one attempt


def attempt(recipe: Recipe, out: Path, every: int, fault: str = "none", seed: int = 0) -> int:
    """Fork a process that goes on with a run; its number. It exits with 0 when done, with 2 when it has said why it cannot
    (in out.said), and with 1 and a traceback if it should not have ended."""
    number = os.fork()
    if number:
        return number
    code, said = 1, os.open(said_of(out), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        suffer(fault, out, random.Random(seed))
        for _ in train.training(recipe, out, device="cpu", resume=True, checkpoint_every=every):
            pass
        code = 0
    except UsageError as error:
        with suppress(OSError):
            (out.parent / "filler").unlink()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.write(said, str(error).encode())
        code = 2
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def said_of(out: Path) -> Path:
    return out.parent / f"{out.name}.said"


def suffer(fault: str, out: Path, draw: random.Random) -> None:
    """Bring a fault upon this process."""
    if fault == "full disk" and is_small(out.parent):
        fill(out.parent / "filler", leave=draw.randrange(1, 20_000))
    elif fault == "full disk":  # as far as a process can tell: no file may grow beyond what is left
        resource.setrlimit(resource.RLIMIT_FSIZE, (draw.randrange(1, 20_000), resource.RLIM_INFINITY))
    elif fault == "read-only folder":
        for folder in (out, out / "checkpoint"):
            if folder.exists():
                folder.chmod(0o555)
        if os.geteuid() == 0:  # whom no mode stops
            os.setuid(NOBODY)
    elif fault == "clock that jumps":
        for name in ("time", "perf_counter"):
            setattr(time, name, jumping(getattr(time, name), draw))


def is_small(folder: Path) -> bool:
    return shutil.disk_usage(folder).total <= SMALL_DISK


def fill(file: Path, leave: int) -> None:
    """Fill a disk but for a few bytes."""
    with open(file, "wb", buffering=0) as filler:
        with suppress(OSError):
            while filler.write(bytes(4096)):
                pass
        filler.truncate(max(0, filler.tell() - leave))


def jumping(clock: Callable[[], float], draw: random.Random) -> Callable[[], float]:
    """A clock that is set, back and forth, by days."""
    return lambda: clock() + (draw.uniform(-1e5, 1e5) if draw.random() < 0.1 else 0.0)


# ---------------------------------------------------------------------------------------------------- many


def torture(recipe: Recipe, folder: Path, kills: int, draw: random.Random, count: Count) -> None:
    """Kill a run again and again, with faults in between, until `kills` have hit it or it is done; then let it end and
    compare."""
    whole, out = folder / "whole", folder / "killed"
    if not (whole / "result.json").exists():
        started = time.monotonic()
        assert finished(attempt(recipe, whole, every=50)) == 0
        (folder / "seconds").write_text(str(time.monotonic() - started))
    seconds = float((folder / "seconds").read_text())
    before = count.kills
    while count.kills - before < kills and not (out / "result.json").exists():
        fault = draw.choice(FAULTS)
        number = attempt(recipe, out, draw.randint(1, 4), fault, draw.randrange(2**30))
        if draw.random() < 0.5:
            wait_for_write(out, number, seconds, draw)
        else:
            time.sleep(draw.uniform(0, seconds / 3))
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        code = finished(number)
        (folder / "filler").unlink(missing_ok=True)
        for place in (out, out / "checkpoint"):
            if place.exists():
                place.chmod(0o755)
        assert code in (-signal.SIGKILL, 0, 2), f"{recipe.name} with {fault} ended with {code}"
        if code == 2:
            check_sentence(said_of(out).read_text(), fault)
            count.said[fault] += 1
        if code == -signal.SIGKILL:
            count.kills += 1
            count.while_writing += any(out.rglob("*.unfinished"))
    assert finished(attempt(recipe, out, every=50)) == 0
    same(whole, out)
    count.runs += 1
    shutil.rmtree(out)


def finished(number: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def wait_for_write(out: Path, number: int, seconds: float, draw: random.Random) -> None:
    """Until the process is writing a file; it is given up after a while, as it may have ended."""
    deadline, passed = time.monotonic() + seconds, draw.randint(0, 5)  # the first, or one of the next
    seen = False
    while time.monotonic() < deadline:
        writing = any(entry.name.endswith(".unfinished") for place in (out, out / "checkpoint") if place.exists()
                      for entry in os.scandir(place))
        if writing and not seen:
            if not passed:
                return
            passed -= 1
        seen = writing


def check_sentence(said: str, fault: str) -> None:
    assert fault in ("full disk", "read-only folder"), (fault, said)
    assert "cannot be written" in said, said
    assert "\n" not in said, said


def same(whole: Path, killed: Path) -> None:
    """The same bits in the checkpoint, the same numbers in metrics and result, and nothing left over."""
    ours, theirs = (read_checkpoint(folder / "checkpoint" / "state.safetensors") for folder in (killed, whole))
    assert_equal(untimed(ours["extra"]), untimed(theirs["extra"]), "extra")
    assert_equal({**ours, "extra": None}, {**theirs, "extra": None}, "checkpoint")
    lines = [[untimed(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
             for folder in (whole, killed)]
    assert lines[0] == lines[1]
    results = [untimed(json.loads((folder / "result.json").read_text())) for folder in (whole, killed)]
    assert results[0] == results[1]
    assert not (left := [*killed.rglob("*.unfinished"), *killed.rglob(".tmp*")]), left


def untimed(record: dict[str, object]) -> dict[str, object]:
    """Without what a clock or a meter says."""
    return {key: value for key, value in record.items() if key not in ("seconds", "wall_s", "train_s", "step_ms", "joules")}


def assert_equal(one: object, other: object, name: str) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor), name
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    elif isinstance(one, dict):
        assert isinstance(other, dict), name
        assert one.keys() == other.keys(), name
        for key in one:
            assert_equal(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, (list, tuple)):
        assert isinstance(other, (list, tuple)), name
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{name}.{index}")
    else:
        assert one == other, name


def kills(number: int, seed: int, folders: list[Path], chosen: list[Recipe]) -> Count:
    """So many kills, spread over runs of some recipes and over some folders."""
    os.environ["GFT_COMMIT"] = "torture"  # or results would differ if a file of the checkout is edited meanwhile
    for recipe in chosen:  # imports what it needs, once for all that are forked
        list(train.training(recipe.changed(["steps=1"]), folders[0] / "first" / recipe.name, device="cpu"))
    draw, count = random.Random(seed), Count()
    while count.kills < number:
        recipe = chosen[count.runs % len(chosen)]
        place = folders[count.runs % len(folders)] / recipe.name
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777)
        torture(recipe, place, min(number - count.kills, 25), draw, count)
    return count


@contextmanager
def small_disk(folder: Path) -> Iterator[list[Path]]:
    """A disk of a few megabytes that can be filled, where this process may mount one; else none."""
    place = folder / "small disk"
    place.mkdir()
    mounted = shutil.which("mount") and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", place], stderr=subprocess.DEVNULL).returncode
    try:
        yield [place] if mounted else []
    finally:
        if mounted:
            subprocess.run(["umount", place], check=True)


# ---------------------------------------------------------------------------------------------------- a long run


def long_run(steps: int, folder: Path) -> None:
    """Memory of this process, and bytes of the run's files, by tenths of a long training of a small network."""
    recipe = recipes.find("digits-hybrid-4bit").changed([f"steps={steps}", "width=16", "depth=3", "batch=32",
                                                         f"eval_every={max(1, steps // 100)}"])
    started = time.monotonic()
    for progress in train.training(recipe, folder / "long", device="cpu", tensorboard=True):
        if progress.step % (steps // 10) == 0 or progress.step == steps // 100:
            held = sum(file.stat().st_size for file in (folder / "long").rglob("*") if file.is_file())
            print(f"step {progress.step:>7}: {memory_mb():.1f} MB of memory, {held / 1e6:.2f} MB of files, "
                  f"{time.monotonic() - started:.0f} s", flush=True)


def memory_mb() -> float:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("kills", "long"))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        if asked.what == "kills":
            with small_disk(Path(folder)) as small:
                print(kills(asked.kills, asked.seed, [Path(folder), *small], small_recipes()))
        else:
            long_run(asked.steps, Path(folder))


if __name__ == "__main__":
    main()
