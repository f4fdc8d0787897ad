"""Training a recipe: build, restore if there is something to restore, loop, evaluate, write. Read it top to bottom."""

import dataclasses
import math
import os
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
from gft.lab.build import DataSet, build_float_model, build_model, build_optimizer, build_scheduler
from gft.lab.data.augment import middle
from gft.lab.models import ViT
from gft.lab.provenance import commit, device_name
from gft.lab.recipe import Recipe
from gft.lab.repeatable import repeatable
from gft.lab.runs import RunFolder, TrainingError, checkpoint_of, read_config, resolve_device
from gft.lab.stopping import Stopped, asked_to_stop, deferred
from gft.lab.stopwatch import Stopwatch, counters_of, is_alone
from gft.layers import quantized_layers
from gft.saved import is_number

LOG_EVERY = 20
SECONDS_BETWEEN_CHECKPOINTS = 60.0
LEAST_REST = 20  # times as long as the last checkpoint took: those of large networks take a while
WEIGHTS_A_BYTE = 4  # of a checkpoint, at most
LONGEST_CONTEXT = 2**16  # characters; more is no text of ours


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
    if not os.path.exists(folder / "config.json"):  # without an error where it may not be looked for
        raise TrainingError(f"{folder} is not a run folder (it has no config.json); give the --out of gft train")
    return Recipe.of(read_config(folder))


def load_run(folder: Path, device: str = "auto", *, to_write: bool = False) -> tuple[nn.Module, DataSet, Recipe]:
    """The trained model of a run folder, with its data and recipe. To generate, a GPT needs no more of its text than what a
    checkpoint keeps, the characters, so the text itself may be gone."""
    recipe, checkpoint, on = recipe_of(folder), checkpoint_of(folder), resolve_device(device)
    kept = kept_text(recipe, checkpoint)
    characters = kept is not None and "characters" in kept
    data = (datasets.Text.without_splits(**kept) if kept and characters and to_write else data_of(recipe)).to(on)
    check_text(data, kept, folder)
    check_size(recipe, data, checkpoint)
    model = build_model(recipe, data).to(on)
    gft.load_checkpoint(checkpoint, model)
    return model.eval(), data, recipe


def data_of(recipe: Recipe) -> DataSet:
    return datasets.load(recipe.data.name, recipe.data.context, recipe.data.vocabulary)


def check_size(recipe: Recipe, data: DataSet, checkpoint: Path) -> None:
    """A config and a checkpoint are two files, and may be of two runs. A network that the checkpoint cannot fill, at two
    bits a weight, is refused before memory is taken for it."""
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in build_float_model(recipe, data).parameters())
    held = checkpoint.stat().st_size if checkpoint.is_file() else None
    if held is not None and weights > WEIGHTS_A_BYTE * held:
        raise TrainingError(f"config.json describes {weights:,} weights, and {checkpoint} has {held:,} bytes; restore the "
                            "one that belongs to it")


def text_of(data: DataSet) -> dict[str, Any] | None:
    """What a checkpoint keeps of a text: which number is which character; of a corpus a fingerprint of its vocabulary."""
    if isinstance(data, datasets.Corpus):
        return {"vocabulary": data.fingerprint, "context": data.context}
    return {"characters": data.characters, "context": data.context} if isinstance(data, datasets.Text) else None


def kept_text(recipe: Recipe, checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint has kept of a text, known before there is a model to load it into: its size depends on that."""
    if recipe.model.name not in ("gpt", "llama"):
        return None
    extra = read_checkpoint(checkpoint)["extra"]
    kept = extra.get("text") if isinstance(extra, dict) else None
    if kept is None:
        return None
    context, characters, vocabulary = (kept.get(key) if isinstance(kept, dict) else None
                                       for key in ("context", "characters", "vocabulary"))
    sensible = isinstance(context, int) and 1 <= context <= LONGEST_CONTEXT
    if sensible and isinstance(vocabulary, str):
        return {"vocabulary": vocabulary, "context": context}
    if sensible and isinstance(characters, str) and characters and list(characters) == sorted(set(characters)):
        return {"characters": characters, "context": context}
    raise TrainingError(f"{checkpoint} says nothing sensible of the text it was trained on; restore it from a copy, or "
                        "train anew in another folder")


def check_text(data: DataSet, kept: dict[str, Any] | None, folder: Path) -> None:
    """A model reads numbers; those of a text with other characters would mean something else to it."""
    if kept not in (None, text_of(data)):
        raise TrainingError(f"the text that {folder} was trained on has other characters or tokens now; give it back the "
                            "text it had, or train anew in another folder")


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
    on = resolve_device(device)
    folder = RunFolder(out, recipe, seed, resume)
    if folder.result is not None:
        yield Progress(recipe.schedule.steps, recipe.schedule.steps, result=folder.result)
        return
    try:
        with repeatable(recipe.model.deterministic, recipe.model.compiled and on.type == "cuda"):
            yield from _train(recipe, folder, Options(seed, on, checkpoint_every, keep_checkpoint, tensorboard))
    finally:
        folder.close()


@dataclass(frozen=True)
class Options:
    """What decides nothing of a run's outcome, but for the seed."""

    seed: int
    device: torch.device
    checkpoint_every: int | None  # steps; once a minute if None
    keep_checkpoint: bool
    tensorboard: bool


def _train(recipe: Recipe, folder: RunFolder, options: Options) -> Iterator[Progress]:
    on, seed, steps = options.device, options.seed, recipe.schedule.steps
    data = data_of(recipe).to(on)
    torch.manual_seed(seed)
    model = build_model(recipe, data).to(on)
    optimizer = build_optimizer(recipe, model, seed)
    scheduler = build_scheduler(recipe, optimizer)
    step, seconds, watch = 0, 0.0, Stopwatch(counters_of(on))
    if folder.checkpoint.exists():
        check_text(data, kept_text(recipe, folder.checkpoint), folder.path)
        restored = gft.load_checkpoint(folder.checkpoint, model, optimizer, scheduler)
        step, seconds = reached(restored, steps, folder.checkpoint)
        watch = Stopwatch(counters_of(on), restored.get("train_s", 0.0), restored.get("joules"))
    folder.start(step, options.tensorboard)

    eval_every = recipe.schedule.eval_every or data.per_epoch(recipe.data.batch)
    compiles = recipe.model.compiled and on.type == "cuda"
    batches = data.batches(recipe.data.batch, seed, first_step=step, augment=recipe.data.augment, compiled=compiles)
    saved_at, rest = time.perf_counter(), SECONDS_BETWEEN_CHECKPOINTS
    clock = saved_at
    loss = torch.zeros(())

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y, recipe.data.label_smoothing)

    # With its loss: the logits of a large vocabulary are most of a small model's bytes, and need not be written as float32.
    # What is rare and of another shape, evaluation and the last batch of an epoch, runs the model as it is: to compile it
    # for that, too, would take longer than it saves.
    compiled = torch.compile(loss_of) if compiles else loss_of

    def take_step(x: Tensor, y: Tensor) -> Tensor:
        with precision(recipe, on):
            loss = (compiled if len(x) == recipe.data.batch else loss_of)(x, y)
        optimizer.zero_grad(); loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(clipped, recipe.dense.clip or 0.0)
        optimizer.step()
        return loss

    def taker() -> Callable[[Tensor, Tensor], Tensor]:
        return take_step if on_the_host(optimizer) else gft.Captured(take_step, optimizer)

    clipped = gft.dense(model) if recipe.dense.clip is not None else []
    if on.type == "cuda":
        torch.cuda.reset_peak_memory_stats(on)

    def save() -> None:
        finite_loss(loss, step, folder)  # a diverged state is none to go on from
        folder.flush()
        gft.save_checkpoint(folder.checkpoint, model, optimizer, scheduler, step=step, seconds=seconds,
                            train_s=watch.seconds, joules=watch.joules, text=text_of(data))

    progress = Progress(step, steps)
    watch.start(step)
    take, whole_from = taker(), math.ceil(steps * (1 - recipe.schedule.whole_images))
    with deferred():
        while step < steps:
            if isinstance(model, ViT) and step >= whole_from and not model.sees_whole_images:
                model.drop_patches(0.0)
                take = taker()  # a CUDA graph is of one number of patches
            loss = take(*next(batches))
            scheduler.step()
            step += 1

            last, every = step == steps, options.checkpoint_every
            progress = Progress(step, steps)
            if step % LOG_EVERY == 0 or last:
                progress = dataclasses.replace(progress, loss=finite_loss(loss, step, folder))
                watch.mark(step)
                folder.log(step, loss=progress.loss, lr=scheduler.get_last_lr()[0])
            if step % eval_every == 0 or last:
                watch.stop()
                progress = dataclasses.replace(progress, val=evaluate(model, data, "val", recipe))
                folder.log(step, val=progress.val, train_s=watch.seconds, layers=gft.statistics(model, optimizer))
                watch.start(step)
            due = step % every == 0 if every else clock - saved_at > rest
            seconds, clock = seconds + time.perf_counter() - clock, time.perf_counter()
            signal = None if last else asked_to_stop()
            if (due and not last) or (last and options.keep_checkpoint) or signal:
                watch.stop()
                save()
                saved_at = time.perf_counter()
                rest = max(SECONDS_BETWEEN_CHECKPOINTS, LEAST_REST * (saved_at - clock))
                watch.start(step)
            if signal:
                raise Stopped(signal, f"step {step} of {steps} is saved in {folder.path}; --resume goes on from there")
            if not last:
                yield progress
                clock = time.perf_counter()  # what the caller took is not the run's time

    watch.stop()
    peak = torch.cuda.max_memory_allocated(on) if on.type == "cuda" else None
    value = evaluate(model, data, "val", recipe) if progress.val is None else progress.val
    result = summary(recipe, model, optimizer, value) | measures(model, data, recipe, value)
    result |= {"train_s": watch.seconds, "step_ms": watch.step_ms, "joules": watch.joules, "alone": is_alone(),
               "peak_bytes": peak}
    result |= {"seed": seed, "wall_s": seconds, "device": device_name(on), "torch": torch.__version__, "commit": commit(),
               "config": recipe.config()}
    folder.finish(result, options.keep_checkpoint)
    yield Progress(step, steps, float(loss.detach()), result["value"], result)


def measures(model: nn.Module, data: DataSet, recipe: Recipe, value: float) -> dict[str, Any]:
    """What result.json says of a corpus: bits a byte and how many tokens were seen; of any data the test split, if it is
    to be read."""
    test = evaluate(model, data, "test", recipe) if recipe.data.test else None
    if not isinstance(data, datasets.Corpus):
        return {"test": test}
    return {"test": test, "test_bits_a_byte": None if test is None else data.bits_a_byte("test", test),
            "bits_a_byte": data.bits_a_byte("val", value),
            "tokens": recipe.schedule.steps * recipe.data.batch * data.context}


def reached(extra: dict[str, Any], steps: int, checkpoint: Path) -> tuple[int, float]:
    """The step and the seconds of training that a checkpoint of this run stands at."""
    step, seconds = extra.get("step"), extra.get("seconds")
    counted = extra.get("train_s", 0.0), 0.0 if extra.get("joules") is None else extra["joules"]
    if not (isinstance(step, int) and 0 <= step <= steps and isinstance(seconds, (int, float)) and is_number(seconds) and
            all(isinstance(one, (int, float)) and is_number(one) for one in counted)):
        raise TrainingError(f"{checkpoint} was not written by this run (it is to have {steps} steps); restore it from a "
                            "copy, or train anew in another folder")
    return step, seconds


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
    none. What running means of votes and products of whole matrices take is added to the energy.
    """
    integers, steps = recipe.integers, recipe.schedule.steps
    quantized = baselines.weights_on_grid(model)
    fp32 = sum(parameter.numel() for parameter in baselines.dense(model))
    latent = sum(parameter.numel() for parameter in gft.dense(model)) - fp32
    flips = sum(part.flips() for part in optimizer.optimizers if isinstance(part, (gft.GFT, baselines.LevelOptimizer)))
    own = integers.method == "gft" and recipe.dense.optimizer == "adamw"
    counted = integers.layers != "none" and integers.method not in ("ste", "bitnet")
    with_gradients, without = baselines.training_bytes_after_step(model, optimizer)
    joules = energy.energy_estimate_j(fp32, quantized, integers.bits, steps)
    shapes = [(layer.rows, layer.columns) for layer in quantized_layers(model).values()]
    joules += steps * energy.rule_extras_j(integers, shapes)
    return {
        "recipe": recipe.name, "table": recipe.table, "row": recipe.row, "paper": recipe.paper,
        "metric": recipe.metric, "value": value, "split": "val", "steps": steps,
        "fp32_params": fp32, "quantized_params": quantized, "bits": integers.bits,
        "bits_total": energy.bits_total(fp32, quantized, integers.bits),
        "bytes_per_weight": stored_bytes(model) / quantized if quantized else 4.0,
        "training_bytes_per_weight": with_gradients, "state_bytes_per_weight": without,
        "flips": flips if counted else None,
        "updates_estimated": energy.updates_estimated(fp32, quantized, steps) if own else None,
        "updates_actual": (fp32 + latent) * steps + flips,
        "energy_estimate_j": joules if own else None,
    }


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights on the grid, gft's and the baselines'."""
    layers = quantized_layers(model).values()
    held = [layer.qweight for layer in layers] + [layer.scale for layer in layers if layer.scale.dim()]
    return sum(tensor.nbytes for tensor in [*held, *(layer.weight for layer in baselines.grid_layers(model))])
