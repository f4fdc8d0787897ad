"""The files of a run, and where and with what it ran.

A run folder holds config.json, metrics.jsonl (a line each time something is logged), checkpoint/state.safetensors
(of a text also which number is which character) and, once finished, result.json.
"""

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gft
from gft.lab.recipes import Recipe


class TrainingError(ValueError):
    """A run that cannot start or go on, and what to do."""


# ---------------------------------------------------------------------------------------------------- the run folder


def checkpoint_of(path: Path) -> Path:
    return path / "checkpoint" / "state.safetensors"


class RunFolder:
    """The files of one run. Nothing in it is ever overwritten by another run."""

    def __init__(self, path: Path, recipe: Recipe, seed: int, resume: bool) -> None:
        """Look, but write nothing yet: settings that turn out to make no sense should leave no folder behind."""
        self.path = path
        self.checkpoint = checkpoint_of(path)
        self._metrics = path / "metrics.jsonl"
        self._writer: Any = None
        self._config = {**dataclasses.asdict(recipe), "seed": seed}
        self.result = None
        if (path / "config.json").exists():
            if not resume:
                raise TrainingError(f"{path} holds a run already; go on with it by --resume, or give another --out")
            before = read_json(path / "config.json")
            for key, value in self._config.items():
                if before.get(key) != value:
                    raise TrainingError(f"{path} was started with {key}={before.get(key)!r}, not {value!r}; resume it "
                                        "with the same settings, or give another --out")
            if (path / "result.json").exists():
                self.result = read_json(path / "result.json")

    def start(self, step: int, tensorboard: bool) -> None:
        """Write the config; drop what was logged after the checkpoint that is resumed: it will be logged again."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "config.json", self._config)
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        kept = []
        for line in lines:
            try:
                if json.loads(line)["step"] > step:
                    break
            except (json.JSONDecodeError, KeyError):
                break  # a line cut short by a kill
            kept.append(line + "\n")
        write_text(self._metrics, "".join(kept))
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=step)

    def log(self, step: int, **values: Any) -> None:
        with open(self._metrics, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._writer is not None:
            for key, value in flat_numbers(values):
                self._writer.add_scalar(key, value, step)

    def finish(self, result: dict[str, Any], keep_checkpoint: bool) -> None:
        write_json(self.path / "result.json", result)
        if not keep_checkpoint:
            self.checkpoint.unlink(missing_ok=True)
        if self._writer is not None:
            self._writer.close()


def flat_numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Nested dicts -> ("layers/fc/zeros", 0.31), …; lists are left to the JSONL."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield prefix + key, value


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); restore it or start the run in another folder") from error


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)


# ---------------------------------------------------------------------------------------------------- where and with what


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise TrainingError(f"--device {name}: choose auto, cpu or cuda")
    if name != "cpu" and not torch.cuda.is_available():
        raise TrainingError(f"--device {name}: torch sees no CUDA device here; use --device cpu or auto")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def commit() -> str:
    """The commit of the checkout this package runs from, "+changes" if its code differs; $GFT_COMMIT elsewhere."""
    if os.environ.get("GFT_COMMIT"):
        return os.environ["GFT_COMMIT"]
    here = Path(gft.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"gft {gft.__version__}"
