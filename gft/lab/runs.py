"""The folder of a training run, and the device it runs on.

A run folder holds config.json, metrics.jsonl (a line each time something is logged), checkpoint/state.safetensors
(of a text also which number is which character) and, once finished, result.json.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gft.errors import UsageError
from gft.files import FolderInUse, FolderLock, read_whole, remove_unfinished, sentence_for, write_text
from gft.lab import older
from gft.lab.recipe import IN_OLDER, Recipe, dotted
from gft.lab.records import parsed, read_object, read_result, write_json


class TrainingError(UsageError):
    """A run that cannot start or go on, and what to do."""


# ---------------------------------------------------------------------------------------------------- the run folder


def checkpoint_of(path: Path) -> Path:
    return path / "checkpoint" / "state.safetensors"


def read_config(path: Path) -> dict[str, Any]:
    """The settings that a run folder was started with."""
    config = read_object(path / "config.json")
    if older.is_flat(config):
        raise TrainingError(f"{path} was made by an older gft, whose settings had other names; train anew in another --out")
    return config


class RunFolder:
    """The files of one run. Nothing in it is ever overwritten by another run, nor written by two processes at a time."""

    def __init__(self, path: Path, recipe: Recipe, seed: int, resume: bool) -> None:
        """Look, but write nothing yet: settings that turn out to make no sense should leave no folder behind."""
        self.path = path
        self.checkpoint = checkpoint_of(path)
        self._metrics = path / "metrics.jsonl"
        self._writer: Any = None
        self._lock: FolderLock | None = None
        self._config = {**recipe.config(), "seed": seed}
        self.result: dict[str, Any] | None = None
        with sentence_for(path):  # it may be one that nobody is to look into
            self._look(resume)

    def _look(self, resume: bool) -> None:
        path = self.path
        if (path / "config.json").exists():
            if not resume:
                raise TrainingError(f"{path} holds a run already; go on with it by --resume, or give another --out")
            before = IN_OLDER | dotted(read_config(path))
            for key, value in dotted(self._config).items():
                if before.get(key) != value:
                    raise TrainingError(f"{path} was started with {key}={before.get(key)!r}, not {value!r}; resume it "
                                        "with the same settings, or give another --out")
            if (path / "result.json").exists():
                self.result = read_result(path / "result.json")
            else:
                self._lock = _lock_of(path)
            for folder in (path, self.checkpoint.parent):
                remove_unfinished(folder)

    def start(self, step: int, tensorboard: bool) -> None:
        """Write the config; drop what was logged after the checkpoint that is resumed: it will be logged again."""
        if self._lock is None:
            self._lock = _lock_of(self.path)
            if (self.path / "config.json").exists():  # since __init__ looked
                raise TrainingError(f"{self.path} was taken by another run just now; give another --out")
        write_json(self.path / "config.json", self._config)
        kept = []
        with sentence_for(self._metrics):
            lines = read_whole(self._metrics).split(b"\n") if self._metrics.exists() else []
        for line in lines:
            try:
                if parsed(line)["step"] > step:
                    break
            except (ValueError, TypeError, KeyError):
                break  # a line cut short by a kill
            kept.append(line.decode() + "\n")
        write_text(self._metrics, "".join(kept))
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            with sentence_for(self.path / "tensorboard"):
                self._writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=step)

    def log(self, step: int, **values: Any) -> None:
        with sentence_for(self._metrics), open(self._metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._writer is not None:
            with sentence_for(self.path / "tensorboard"):
                for key, value in flat_numbers(values):
                    self._writer.add_scalar(key, value, step)

    def flush(self) -> None:
        """Have on disk what was logged: a checkpoint that outlives a power cut has its lines with it."""
        with sentence_for(self._metrics), open(self._metrics, "rb") as file:
            os.fsync(file.fileno())

    def finish(self, result: dict[str, Any], keep_checkpoint: bool) -> None:
        self.flush()
        write_json(self.path / "result.json", result)
        if not keep_checkpoint:
            self.checkpoint.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process have the folder."""
        if self._writer is not None:
            with suppress(OSError):  # of a full disk, said by now
                self._writer.close()
        if self._lock is not None:
            self._lock.release()


def _lock_of(path: Path) -> FolderLock:
    try:
        return FolderLock(path, "wait for it to end, or give another --out")
    except FolderInUse as error:
        raise TrainingError(str(error)) from None


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
