"""Joules of training recipes, measured side by side by the machine's own counters: `gft energy measure`."""

import dataclasses
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gft.errors import UsageError
from gft.files import make_folder, write_text
from gft.lab import display, train
from gft.lab.energy import estimate, meter, sheets
from gft.lab.energy.meter import Counter, Reading, mean_std, take
from gft.lab.energy.networks import Network, network, over_a_run
from gft.lab.provenance import commit, device_name, versions
from gft.lab.recipe import Recipe
from gft.lab.records import write_json


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    full: whole trainings, a window and a seed each, instead of windows of `steps` steps.
    repeats: windows a recipe. warmup: steps before the first window. idle_seconds: to measure the idle power; 0: leave it.
    """

    steps: int = 200
    repeats: int = 5
    warmup: int = 20
    full: bool = False
    idle_seconds: float = 5.0
    seed: int = 0
    node: str = "7nm"  # of the estimates beside it

    def window(self, recipe: Recipe) -> int:
        """Steps in a window: of a whole run all but its warm-up and its last, which evaluates and writes its result."""
        return recipe.schedule.steps - 1 - self.warmup if self.full else self.steps

    def check(self, recipes: Sequence[Recipe]) -> None:
        """Raise now what would show only after hours of training."""
        estimate.operations(self.node)
        short = next((recipe for recipe in recipes if self.full and self.window(recipe) < 1), None)
        if short is not None:
            raise UsageError(f"{short.name} has {short.schedule.steps} steps, of which {self.warmup} are warm-up; give a "
                             "smaller --warmup")


def measure(recipes: Sequence[Recipe], plan: Plan, on: torch.device, out: Path, command: str) -> sheets.Sheet:
    """Measure, and write measured.json and measured.md into the folder `out`."""
    if (out / "measured.json").exists():
        raise UsageError(f"{out} holds a measurement already; give another --out")
    counters, missing = meter.find_counters(on)
    plan.check(recipes)
    make_folder(out)  # rather now than after hours of training
    report = measure_recipes(recipes, counters, plan, on)
    about = {"command": command, "commit": commit(), "python": platform.python_version(), "torch": torch.__version__,
             "device": device_name(on), "cuda": torch.version.cuda or "none", **versions("nvidia-ml-py")}
    report |= {"about": about, "not_measured": missing}
    sheet = sheets.measured_sheet(report)
    write_json(out / "measured.json", report)
    write_text(out / "measured.md", sheet.markdown())
    return sheet


def measure_recipes(recipes: Sequence[Recipe], counters: Sequence[Counter], plan: Plan, on: torch.device) -> dict[str, Any]:
    """measured.json, less where and by which command it was measured. Nothing of the runs themselves is kept."""
    plan.check(recipes)
    # The paper's numbers are of AdamW and GFT; another method is measured without an estimate beside it.
    counted = over_a_run if plan.full else network
    estimates = {recipe.name: counted(recipe) if recipe.integers.method == "gft" else None for recipe in recipes}
    idle = idle_power(counters, plan.idle_seconds, on)
    readings: dict[str, list[Reading]] = {recipe.name: [] for recipe in recipes}
    results: dict[str, list[dict[str, Any]]] = {recipe.name: [] for recipe in recipes}
    with tempfile.TemporaryDirectory() as scratch:
        windows = whole_runs if plan.full else some_steps
        for recipe, reading, result in windows(recipes, counters, plan, idle, on, Path(scratch)):
            readings[recipe.name].append(reading)
            results[recipe.name] += [] if result is None else [result]
            say(f"{recipe.name} {len(readings[recipe.name])}/{plan.repeats}", reading, plan.window(recipe))
    rows = [measured_row(recipe, readings[recipe.name], results[recipe.name], plan)
            | {"estimate": estimated(recipe, estimates[recipe.name], results[recipe.name], plan.node, on)}
            for recipe in recipes]
    return {"full": plan.full, "steps": plan.steps, "repeats": plan.repeats, "warmup": plan.warmup, "seed": plan.seed,
            "node": plan.node, "counters": {counter.name: counter.about for counter in counters}, "idle_watts": idle,
            "rows": rows, "shortest_window_s": min(reading.seconds for some in readings.values() for reading in some)}


# ---------------------------------------------------------------------------------------------------- windows

Measured = Iterator[tuple[Recipe, Reading, dict[str, Any] | None]]  # a window, and the result of a run that ended


def whole_runs(recipes: Sequence[Recipe], counters: Sequence[Counter], plan: Plan, idle: Mapping[str, float],
               on: torch.device, scratch: Path) -> Measured:
    """Runs to their end, the recipes in turn: a window from the warm-up to the last step but one, and the run's result."""
    for number in range(plan.repeats):
        for recipe in recipes:
            run = start(recipe, scratch / f"{recipe.name}-{number}", plan.seed + number, on)
            take(run, plan.warmup)
            with meter.measure(counters, idle=idle) as window:
                take(run, plan.window(recipe), recipe.name, window)
            yield recipe, window.reading, next(run).result


def some_steps(recipes: Sequence[Recipe], counters: Sequence[Counter], plan: Plan, idle: Mapping[str, float],
               on: torch.device, scratch: Path) -> Measured:
    """Windows of some steps, the recipes in turn."""
    # One step more than is taken: the last one of a run evaluates and writes its result.
    needed = plan.warmup + plan.repeats * plan.steps + 1
    # And all alike: windows that are longer than the recipe's training must not reach its whole images.
    runs = {recipe.name: start(recipe.updated(schedule={"steps": max(recipe.schedule.steps, needed), "whole_images": 0.0}),
                               scratch / recipe.name, plan.seed, on) for recipe in recipes}
    by_name = {recipe.name: recipe for recipe in recipes}
    for name, reading in meter.measure_steps(runs, counters, steps=plan.steps, repeats=plan.repeats, warmup=plan.warmup,
                                             idle=idle):
        yield by_name[name], reading, None
    for run in runs.values():
        run.close()


def start(recipe: Recipe, folder: Path, seed: int, on: torch.device) -> Any:
    """The recipe's training, a step a `next`, with no evaluation and no checkpoint before its last."""
    never = recipe.schedule.steps + 1
    return train.training(recipe.updated(schedule={"eval_every": never}), folder, seed=seed, device=str(on),
                          checkpoint_every=never, keep_checkpoint=False)


def idle_power(counters: Sequence[Counter], seconds: float, on: torch.device) -> dict[str, float]:
    """Watts while nothing runs; on a GPU with what a process holds there even then."""
    if seconds == 0:
        return {}
    if on.type == "cuda":
        torch.zeros(1, device=on)
        torch.cuda.synchronize(on)
        time.sleep(2)  # for its clocks to fall
    return meter.idle_power(counters, seconds)


def say(what: str, reading: Reading, steps: int) -> None:
    gross, net = (joules / steps * 1e3 for joules in (reading.gross, reading.net))
    display.say(f"{what}: {gross:.1f} mJ/step gross, {net:.1f} net, {reading.seconds:.1f} s")


# ---------------------------------------------------------------------------------------------------- rows


def measured_row(recipe: Recipe, readings: Sequence[Reading], results: Sequence[Mapping[str, Any]],
                 plan: Plan) -> dict[str, Any]:
    """What was measured of one recipe."""
    steps = plan.window(recipe)
    row: dict[str, Any] = {
        "recipe": recipe.name, "table": recipe.table, "row": recipe.row, "metric": recipe.metric,
        "bits": recipe.integers.bits, "batch": recipe.data.batch, "run_steps": recipe.schedule.steps,
        "steps_a_window": steps,
        "gross_j_per_step": mean_std([reading.gross / steps for reading in readings]),
        "net_j_per_step": mean_std([reading.net / steps for reading in readings]),
        "seconds_per_step": mean_std([reading.seconds / steps for reading in readings]),
        "readings": [dataclasses.asdict(reading) for reading in readings], "config": recipe.config(),
    }
    if results:
        row |= {"value": mean_std([result["value"] for result in results]), "results": list(results)}
    return row


def estimated(recipe: Recipe, own: Network | None, results: Sequence[Mapping[str, Any]], node: str,
              on: torch.device) -> dict[str, Any] | None:
    """The estimate to set beside a measurement; of runs that ended also from the flips they counted."""
    if own is None:
        return None
    moved = None
    if results and own.counts.quantized:
        updates = statistics.fmean(result["updates_actual"] for result in results)
        moved = estimate.moved_share(updates, *own.counts, recipe.schedule.steps)
    precision = recipe.model.precision if on.type == "cuda" else "fp32"
    joules, of_flips = (own.step(recipe, precision, node, share) for share in (None, moved))
    return {**dataclasses.asdict(joules), "whole": joules.total, "precision": precision, "moved": moved,
            "optimizer_from_flips": of_flips.optimizer, **own.counts._asdict()}
