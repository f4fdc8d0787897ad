"""Training a recipe: build, restore if there is something to restore, loop, evaluate, write. Read it top to bottom."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gft
from gft.capture import on_the_host
from gft.checkpoint import read_checkpoint
from gft.lab import baselines, energy
from gft.lab import data as datasets
from gft.lab.build import DataSet, build_model, build_optimizer, build_scheduler
from gft.lab.data.augment import middle
from gft.lab.models import ViT
from gft.lab.provenance import commit, device_name
from gft.lab.recipe import Recipe
from gft.lab.runs import RunFolder, TrainingError, checkpoint_of, read_config, resolve_device
from gft.layers import quantized_layers
from gft.saved import is_number

LOG_EVERY = 20
SECONDS_BETWEEN_CHECKPOINTS = 60.0


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step; `result` is there after the last."""

    step: int
    steps: int
    loss: float | None = None
    val: float | None = None
    result: dict[str, Any] | None = None


# ---------------------------------------------------------------------------------------------------- loss and evaluation


def precision(recipe: Recipe, on: torch.device) -> AbstractContextManager[Any]:
    """bf16 products where the recipe wants them, on GPUs only: most CPUs are slower with them."""
    if recipe.model.precision == "bf16" and on.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


def cross_entropy(logits: Tensor,  # (..., classes)
                  labels: Tensor,  # (...) of classes, or (..., classes) of shares of each
                  smoothing: float = 0.0,
                  reduction: str = "mean") -> Tensor:
    labels = labels.flatten(0, -2) if labels.is_floating_point() else labels.flatten()
    return F.cross_entropy(logits.float().flatten(0, -2), labels, label_smoothing=smoothing, reduction=reduction)


@torch.no_grad()
def evaluate(model: nn.Module, data: DataSet, split: str, recipe: Recipe) -> float:
    """The recipe's metric on a split: top-1 accuracy in %, or the mean loss in nats."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for x, y in data.evaluation_batches(split, recipe.data.eval_batch):
        if recipe.data.eval_crop < 1:
            x = middle(x, recipe.data.eval_crop)
        with precision(recipe, x.device):
            logits = model(x)
        right = (logits.argmax(-1) == y).sum() if recipe.metric == "accuracy" else cross_entropy(logits, y, reduction="sum")
        total, count = total + right.double(), count + y.numel()
    model.train(was_training)
    return float(total) / count * (100 if recipe.metric == "accuracy" else 1)


def recipe_of(folder: Path) -> Recipe:
    """What a run folder was trained by."""
    if not (folder / "config.json").exists():
        raise TrainingError(f"{folder} is not a run folder (it has no config.json); give the --out of gft train")
    return Recipe.of(read_config(folder))


def load_run(folder: Path, device: str = "auto", *, to_write: bool = False) -> tuple[nn.Module, DataSet, Recipe]:
    """The trained model of a run folder, with its data and recipe. To generate, a GPT needs no more of its text than what a
    checkpoint keeps, the characters, so the text itself may be gone."""
    recipe, checkpoint, on = recipe_of(folder), checkpoint_of(folder), resolve_device(device)
    kept = kept_text(recipe, checkpoint)
    data = (datasets.Text.without_splits(**kept) if kept and to_write else datasets.load(recipe.data.name)).to(on)
    check_text(data, kept, folder)
    model = build_model(recipe, data).to(on)
    gft.load_checkpoint(checkpoint, model)
    return model.eval(), data, recipe


def text_of(data: DataSet) -> dict[str, Any] | None:
    """What a checkpoint keeps of a text: which number is which character."""
    return {"characters": data.characters, "context": data.context} if isinstance(data, datasets.Text) else None


def kept_text(recipe: Recipe, checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint has kept of a text, known before there is a model to load it into: its size depends on that."""
    text = read_checkpoint(checkpoint)["extra"].get("text") if recipe.model.name == "gpt" else None
    if text is not None and not (isinstance(text, dict) and text.keys() == {"characters", "context"} and text["context"] and
                                 isinstance(text["characters"], str) and type(text["context"]) is int):
        raise TrainingError(f"{checkpoint} does not say which characters its text has; restore it from a copy")
    return text


def check_text(data: DataSet, kept: dict[str, Any] | None, folder: Path) -> None:
    """A model reads numbers; those of a text with other characters would mean something else to it."""
    if kept not in (None, text_of(data)):
        raise TrainingError(f"the text that {folder} was trained on has other characters now; give it back the text it had, "
                            "or train anew in another folder")


def evaluate_run(folder: Path, split: str, device: str = "auto") -> tuple[float, Recipe]:
    """The metric of a run folder's checkpoint on one of its data's splits."""
    if split not in ("train", "val", "test"):
        raise TrainingError(f"--split {split}: choose train, val or test")
    model, data, recipe = load_run(folder, device)
    return evaluate(model, data, split, recipe), recipe


# ---------------------------------------------------------------------------------------------------- the loop


def training(recipe: Recipe, out: Path, *, seed: int = 0, device: str = "auto", resume: bool = False,
             checkpoint_every: int | None = None, keep_checkpoint: bool = True,
             tensorboard: bool = False) -> Iterator[Progress]:
    """Train `recipe` in the folder `out`; a `next` takes one step and yields its progress.

    checkpoint_every: steps between checkpoints; once a minute if None. keep_checkpoint: leave the last one in the folder
    when the run is done, for `gft eval`.
    """
    on, steps = resolve_device(device), recipe.schedule.steps
    folder = RunFolder(out, recipe, seed, resume)
    if folder.result is not None:
        yield Progress(steps, steps, result=folder.result)
        return
    data = datasets.load(recipe.data.name).to(on)
    torch.manual_seed(seed)
    model = build_model(recipe, data).to(on)
    optimizer = build_optimizer(recipe, model, seed)
    scheduler = build_scheduler(recipe, optimizer)
    step, seconds = 0, 0.0
    if folder.checkpoint.exists():
        check_text(data, kept_text(recipe, folder.checkpoint), out)
        restored = gft.load_checkpoint(folder.checkpoint, model, optimizer, scheduler)
        if type(restored.get("step")) is not int or not is_number(restored.get("seconds")) or restored["step"] < 0:
            raise TrainingError(f"{folder.checkpoint} does not say how far its run has come; restore it from a copy")
        step, seconds = restored["step"], restored["seconds"]
    folder.start(step, tensorboard)

    eval_every = recipe.schedule.eval_every or data.per_epoch(recipe.data.batch)
    compiles = recipe.model.compiled and on.type == "cuda"
    batches = data.batches(recipe.data.batch, seed, first_step=step, augment=recipe.data.augment, compiled=compiles)
    saved_at = clock = time.perf_counter()
    loss = torch.zeros(())

    # What is rare and of another shape, evaluation and the last batch of an epoch, runs the model as it is: to compile it
    # for that, too, would take longer than it saves.
    compiled = torch.compile(model) if compiles else model

    def take_step(x: Tensor, y: Tensor) -> Tensor:
        with precision(recipe, on):
            logits = (compiled if len(x) == recipe.data.batch else model)(x)
        loss = cross_entropy(logits, y, recipe.data.label_smoothing)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        return loss

    def taker() -> Callable[[Tensor, Tensor], Tensor]:
        return take_step if on_the_host(optimizer) else gft.Captured(take_step, optimizer)

    take, whole_from = taker(), math.ceil(steps * (1 - recipe.schedule.whole_images))
    while step < steps:
        if isinstance(model, ViT) and step >= whole_from and not model.sees_whole_images:
            model.drop_patches(0.0)
            take = taker()  # a CUDA graph is of one number of patches
        loss = take(*next(batches))
        scheduler.step()
        step += 1

        last = step == steps
        progress = Progress(step, steps)
        if step % LOG_EVERY == 0 or last:
            progress = dataclasses.replace(progress, loss=finite_loss(loss, step, folder))
            folder.log(step, loss=progress.loss, lr=scheduler.get_last_lr()[0])
        if step % eval_every == 0 or last:
            progress = dataclasses.replace(progress, val=evaluate(model, data, "val", recipe))
            folder.log(step, val=progress.val, layers=gft.statistics(model, optimizer))
        due = step % checkpoint_every == 0 if checkpoint_every else clock - saved_at > SECONDS_BETWEEN_CHECKPOINTS
        seconds, clock = seconds + time.perf_counter() - clock, time.perf_counter()
        if (due and not last) or (last and keep_checkpoint):
            finite_loss(loss, step, folder)  # a diverged state is none to go on from
            gft.save_checkpoint(folder.checkpoint, model, optimizer, scheduler, step=step, seconds=seconds,
                                text=text_of(data))
            saved_at = clock
        if not last:
            yield progress
            clock = time.perf_counter()  # what the caller took is not the run's time

    result = summary(recipe, model, optimizer, evaluate(model, data, "val", recipe))
    result |= {"seed": seed, "wall_s": seconds, "device": device_name(on), "torch": torch.__version__, "commit": commit(),
               "config": recipe.config()}
    folder.finish(result, keep_checkpoint)
    yield Progress(step, steps, float(loss.detach()), result["value"], result)


def finite_loss(loss: Tensor, step: int, folder: RunFolder) -> float:
    value = float(loss.detach())
    if math.isfinite(value):
        return value
    kept = f"its last checkpoint is {folder.checkpoint}" if folder.checkpoint.exists() else "it had no checkpoint yet"
    raise TrainingError(f"the loss became {value} by step {step} and the run was stopped; {kept}; try a smaller "
                        "--set integers.lr=… or dense.lr=…")


def summary(recipe: Recipe, model: nn.Module, optimizer: gft.Hybrid, value: float) -> dict[str, Any]:
    """What result.json says of the network and its training; value: the recipe's metric.

    The paper's formulas (updates_estimated, energy_estimate_j) are for AdamW and its own optimizer; other methods have
    none. The products that orthogonalizing votes takes are added to the energy.
    """
    integers, steps = recipe.integers, recipe.schedule.steps
    quantized = baselines.weights_on_grid(model)
    fp32 = sum(parameter.numel() for parameter in baselines.dense(model))
    latent = sum(parameter.numel() for parameter in gft.dense(model)) - fp32
    flips = sum(part.flips() for part in optimizer.optimizers if isinstance(part, (gft.GFT, baselines.LevelOptimizer)))
    own = integers.method == "gft"
    joules = energy.energy_estimate_j(fp32, quantized, integers.bits, steps)
    if integers.orthogonalize:
        joules += steps * energy.orthogonalize_j((layer.rows, layer.columns) for layer in quantized_layers(model).values())
    return {
        "recipe": recipe.name, "table": recipe.table, "row": recipe.row, "paper": recipe.paper,
        "metric": recipe.metric, "value": value, "split": "val", "steps": steps,
        "fp32_params": fp32, "quantized_params": quantized, "bits": integers.bits,
        "bits_total": energy.bits_total(fp32, quantized, integers.bits),
        "bytes_per_weight": stored_bytes(model) / quantized if quantized else 4.0,
        "training_bytes_per_weight": baselines.training_bytes_after_step(model, optimizer),
        "updates_estimated": energy.updates_estimated(fp32, quantized, steps) if own else None,
        "updates_actual": (fp32 + latent) * steps + flips,
        "energy_estimate_j": joules if own else None,
    }


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights on the grid, gft's and the baselines'."""
    layers = quantized_layers(model).values()
    held = [layer.qweight for layer in layers] + [layer.scale for layer in layers if layer.scale.dim()]
    return sum(tensor.nbytes for tensor in [*held, *(layer.weight for layer in baselines.grid_layers(model))])
