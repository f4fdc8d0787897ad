"""The folder of a training run, and the device it runs on.

A run folder holds config.json, metrics.jsonl (a line each time something is logged), checkpoint/state.safetensors
(of a text also which number is which character) and, once finished, result.json.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gft.errors import UsageError
from gft.files import write_text
from gft.lab import older
from gft.lab.recipe import Recipe, dotted
from gft.lab.records import read_json, write_json


class TrainingError(UsageError):
    """A run that cannot start or go on, and what to do."""


# ---------------------------------------------------------------------------------------------------- the run folder


def checkpoint_of(path: Path) -> Path:
    return path / "checkpoint" / "state.safetensors"


def read_config(path: Path) -> dict[str, Any]:
    """The settings that a run folder was started with."""
    config = read_json(path / "config.json")
    if not isinstance(config, dict):
        raise TrainingError(f"{path / 'config.json'} does not hold the settings of a run; restore it, or use another folder")
    if older.is_flat(config):
        raise TrainingError(f"{path} was made by an older gft, whose settings had other names; train anew in another --out")
    return config


class RunFolder:
    """The files of one run. Nothing in it is ever overwritten by another run."""

    def __init__(self, path: Path, recipe: Recipe, seed: int, resume: bool) -> None:
        """Look, but write nothing yet: settings that turn out to make no sense should leave no folder behind."""
        self.path = path
        self.checkpoint = checkpoint_of(path)
        self._metrics = path / "metrics.jsonl"
        self._writer: Any = None
        self._config = {**recipe.config(), "seed": seed}
        self.result = None
        if (path / "config.json").exists():
            if not resume:
                raise TrainingError(f"{path} holds a run already; go on with it by --resume, or give another --out")
            before = dotted(read_config(path))
            for key, value in dotted(self._config).items():
                if before.get(key) != value:
                    raise TrainingError(f"{path} was started with {key}={before.get(key)!r}, not {value!r}; resume it "
                                        "with the same settings, or give another --out")
            if (path / "result.json").exists():
                self.result = read_json(path / "result.json")

    def start(self, step: int, tensorboard: bool) -> None:
        """Write the config; drop what was logged after the checkpoint that is resumed: it will be logged again."""
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


# ---------------------------------------------------------------------------------------------------- devices


def resolve_device(name: str) -> torch.device:
    """"auto", "cpu", "cuda" or "cuda:1" -> the device; "auto" takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise TrainingError(f"--device {name}: choose auto, cpu or cuda")
    if name != "cpu" and not torch.cuda.is_available():
        raise TrainingError(f"--device {name}: torch sees no CUDA device here; use --device cpu or auto")
    return torch.device(name)
