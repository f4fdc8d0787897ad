"""Training a recipe: build, restore if there is something to restore, loop, evaluate, write. Read it top to bottom.

A run folder holds config.json, metrics.jsonl (a line each time something is logged), checkpoint/state.safetensors and,
once finished, result.json.
"""

import dataclasses
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gft
from gft import energy
from gft.lab import data as datasets
from gft.lab.models import DNN
from gft.lab.recipes import Recipe
from gft.layers import quantized_layers

EVAL_BATCH = 2000
LOG_EVERY = 20
SECONDS_BETWEEN_CHECKPOINTS = 60.0


class TrainingError(ValueError):
    """A run that cannot start or go on, and what to do."""


@dataclass(frozen=True)
class Progress:
    """What `training` tells after a step; `result` is there after the last."""

    step: int
    steps: int
    loss: float | None = None
    val: float | None = None
    result: dict[str, Any] | None = None


# ---------------------------------------------------------------------------------------------------- the parts of a run


def build_model(recipe: Recipe, data: datasets.Dataset) -> nn.Module:
    """The recipe's network, with the layers it names put on the grid."""
    model = DNN(data.inputs, data.classes, recipe.width, recipe.depth, recipe.norm, recipe.activation, recipe.dropout,
                recipe.input_dropout)
    outer = ("layers.0", f"layers.{recipe.depth - 1}")
    if recipe.quantize != "none":
        gft.quantize_(model, recipe.bits, lambda _, name: recipe.quantize == "all" or name not in outer,
                      memory=recipe.memory, init=recipe.init)
    return model


def build_optimizer(recipe: Recipe, model: nn.Module, seed: int) -> gft.Hybrid:
    parts: list[torch.optim.Optimizer] = []
    if recipe.quantize != "none":
        parts.append(gft.GFT(gft.quantized(model), recipe.lr, recipe.rule, recipe.vote, sample=recipe.sample,
                             mask=recipe.mask, p_min=recipe.p_min, seed=seed))
    if gft.dense(model):
        parts.append(torch.optim.AdamW(gft.dense(model), lr=recipe.dense_lr, weight_decay=recipe.weight_decay))
    return gft.Hybrid(*parts)


def build_scheduler(recipe: Recipe, optimizer: gft.Hybrid) -> torch.optim.lr_scheduler.LambdaLR:
    """Both rates fall linearly to 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / recipe.steps))


@torch.no_grad()
def evaluate(model: nn.Module, split: tuple[Tensor, Tensor]) -> float:
    """Top-1 accuracy in %."""
    was_training = model.training
    model.eval()
    x, y = split
    right = torch.zeros((), dtype=torch.int64, device=x.device)
    for some_x, some_y in zip(x.split(EVAL_BATCH), y.split(EVAL_BATCH), strict=True):
        right += (model(some_x).argmax(1) == some_y).sum()
    model.train(was_training)
    return 100 * int(right) / len(x)


def evaluate_run(folder: Path, split: str, device: str = "auto") -> tuple[float, Recipe]:
    """Accuracy of a run folder's checkpoint on one of its data's splits."""
    if split not in ("train", "val", "test"):
        raise TrainingError(f"--split {split}: choose train, val or test")
    if not (folder / "config.json").exists():
        raise TrainingError(f"{folder} is not a run folder (it has no config.json); give the --out of gft train")
    config = read_json(folder / "config.json")
    recipe = Recipe(**{field.name: config[field.name] for field in dataclasses.fields(Recipe)})
    on = resolve_device(device)
    data = datasets.load(recipe.data).to(on)
    model = build_model(recipe, data).to(on)
    gft.load_checkpoint(folder / "checkpoint" / "state.safetensors", model)
    return evaluate(model, getattr(data, split)), recipe


# ---------------------------------------------------------------------------------------------------- the loop


def training(recipe: Recipe, out: Path, *, seed: int = 0, device: str = "auto", resume: bool = False,
             checkpoint_every: int | None = None, keep_checkpoint: bool = True,
             tensorboard: bool = False) -> Iterator[Progress]:
    """Train `recipe` in the folder `out`, telling what happened after each step.

    checkpoint_every: steps between checkpoints; once a minute if None. keep_checkpoint: leave the last one in the folder
    when the run is done, for `gft eval`.
    """
    on = resolve_device(device)
    folder = RunFolder(out, recipe, seed, resume)
    if folder.result is not None:
        yield Progress(recipe.steps, recipe.steps, result=folder.result)
        return
    data = datasets.load(recipe.data).to(on)
    torch.manual_seed(seed)
    model = build_model(recipe, data).to(on)
    optimizer = build_optimizer(recipe, model, seed)
    scheduler = build_scheduler(recipe, optimizer)
    step, seconds = 0, 0.0
    if folder.checkpoint.exists():
        restored = gft.load_checkpoint(folder.checkpoint, model, optimizer, scheduler)
        step, seconds = restored["step"], restored["seconds"]
    folder.start(step, tensorboard)

    per_epoch = -(-len(data.train[0]) // recipe.batch)
    batches = data.batches(recipe.batch, seed, first_step=step)
    saved_at = clock = time.perf_counter()
    loss = torch.zeros(())
    while step < recipe.steps:
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        step += 1

        last = step == recipe.steps
        told = Progress(step, recipe.steps)
        if step % LOG_EVERY == 0 or last:
            told = dataclasses.replace(told, loss=finite_loss(loss, step, folder))
            folder.log(step, loss=told.loss, lr=scheduler.get_last_lr()[0])
        if step % per_epoch == 0 or last:
            told = dataclasses.replace(told, val=evaluate(model, data.val))
            folder.log(step, val=told.val, layers=gft.statistics(model, optimizer))
        due = step % checkpoint_every == 0 if checkpoint_every else clock - saved_at > SECONDS_BETWEEN_CHECKPOINTS
        seconds, clock = seconds + time.perf_counter() - clock, time.perf_counter()
        if (due and not last) or (last and keep_checkpoint):
            finite_loss(loss, step, folder)  # a checkpoint is a state worth returning to
            gft.save_checkpoint(folder.checkpoint, model, optimizer, scheduler, step=step, seconds=seconds)
            saved_at = clock
        if not last:
            yield told
            clock = time.perf_counter()  # what the listener took is not the run's time

    result = summary(recipe, model, optimizer, seed, seconds, evaluate(model, data.val), on)
    folder.finish(result, keep_checkpoint)
    yield Progress(step, recipe.steps, float(loss.detach()), result["value"], result)


def finite_loss(loss: Tensor, step: int, folder: "RunFolder") -> float:
    value = float(loss.detach())
    if math.isfinite(value):
        return value
    kept = f"its last checkpoint is {folder.checkpoint}" if folder.checkpoint.exists() else "it had no checkpoint yet"
    raise TrainingError(f"the loss became {value} by step {step} and the run was stopped; {kept}; try a smaller "
                        "--set lr=… or dense_lr=…")


def summary(recipe: Recipe, model: nn.Module, optimizer: gft.Hybrid, seed: int, seconds: float, value: float,
            on: torch.device) -> dict[str, Any]:
    """result.json."""
    quantized = sum(layer.grid.rows * layer.grid.columns for layer in quantized_layers(model).values())
    fp32 = sum(parameter.numel() for parameter in gft.dense(model))
    flips = sum(part.flips() for part in optimizer.optimizers if isinstance(part, gft.GFT))
    return {
        "recipe": recipe.name, "table": recipe.table, "row": recipe.row, "paper": recipe.paper,
        "metric": recipe.metric, "value": value, "split": "val", "steps": recipe.steps, "seed": seed,
        "fp32_params": fp32, "quantized_params": quantized, "bits": recipe.bits,
        "bits_total": energy.bits_total(fp32, quantized, recipe.bits),
        "bytes_per_weight": stored_bytes(model) / quantized if quantized else 4.0,
        "updates_estimated": energy.updates_estimated(fp32, quantized, recipe.steps),
        "updates_actual": fp32 * recipe.steps + flips,
        "energy_estimate_j": energy.energy_estimate_j(fp32, quantized, recipe.bits, recipe.steps),
        "wall_s": seconds, "device": device_name(on), "torch": torch.__version__, "commit": commit(),
    }


def stored_bytes(model: nn.Module) -> int:
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in quantized_layers(model).values())


# ---------------------------------------------------------------------------------------------------- the run folder


class RunFolder:
    """The files of one run. Nothing in it is ever overwritten by another run."""

    def __init__(self, path: Path, recipe: Recipe, seed: int, resume: bool) -> None:
        """Look, but write nothing yet: settings that turn out to make no sense should leave no folder behind."""
        self.path = path
        self.checkpoint = path / "checkpoint" / "state.safetensors"
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
