"""gft energy: the paper's accounting held against our models, and joules by the machine's own counters. table | measure."""

import contextlib
import dataclasses
import functools
import platform
import shlex
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table

import gft
from gft import energy
from gft.energy import estimate, paper, sheets
from gft.energy.meter import take
from gft.energy.paper import Counts
from gft.lab import data as datasets
from gft.lab import tables, train
from gft.lab.build import Data, build_float_model, build_model
from gft.lab.display import console
from gft.lab.recipes import Recipe, find
from gft.lab.runs import commit, device_name, resolve_device, write_json, write_text
from gft.layers import quantized_layers

app = typer.Typer(no_args_is_help=True, help="Energy: the paper's estimate, the whole step's, and measured joules.")

Node = Annotated[str, typer.Option(help=f"Technology of the estimate: {' or '.join(energy.NODES)}.")]


# ---------------------------------------------------------------------------------------------------- networks


class Network(NamedTuple):
    """What an estimate needs to know of a recipe."""

    counts: Counts
    products: list[energy.Product]
    shapes: list[tuple[int, int]]  # (out, in) of the integer layers

    def step(self, recipe: Recipe, precision: str, node: str, moved: float | None = None) -> energy.Joules:
        joules = energy.step_energy(self.products, *self.counts, recipe.bits, precision, node, moved)
        added = energy.even_directions_j(self.shapes, node) if recipe.directions == "even" else 0.0
        return dataclasses.replace(joules, optimizer=joules.optimizer + added)


# One sample of each of the paper's data sets: their shapes are known, so that an estimate needs no download.
SHAPES = {"mnist": (784,), "mnist-images": (1, 28, 28), "imagenette": (3, 224, 224)}
CHARACTERS = 65  # of Tiny Shakespeare


def stand_in(name: str) -> Data:
    """A data set with the shape of the one named, or that itself."""
    if name == "shakespeare":
        return datasets.Text.of("".join(map(chr, range(33, 33 + CHARACTERS))) * 100)
    if name not in SHAPES:
        return datasets.load(name)
    split = torch.zeros(1, *SHAPES[name]), torch.zeros(1, dtype=torch.long)
    return datasets.Dataset(split, split, split)


@functools.cache
def network(recipe: Recipe) -> Network:
    """The recipe's network, counted on the meta device."""
    data = stand_in(recipe.data)
    with torch.device("meta"):
        float_model = build_float_model(recipe, data)
        # Its integers start anew: there are no float values to keep on this device.
        model = build_model(dataclasses.replace(recipe, init="paper"), data)
    layers = quantized_layers(model)
    shapes = [(layer.grid.rows, layer.grid.columns) for layer in layers.values()]
    integers = sum(out * features for out, features in shapes)
    if isinstance(data, datasets.Text):
        x = torch.zeros(recipe.batch, data.context, dtype=torch.long, device="meta")
    else:
        shape = data.shape if recipe.model == "vit" else (data.inputs,)
        x = torch.zeros(recipe.batch, *shape, device="meta")
    counts = Counts(sum(parameter.numel() for parameter in gft.dense(model)), integers)
    return Network(counts, energy.products(float_model, x, layers), shapes)


def over_a_run(recipe: Recipe) -> Network:
    """`network` with the products of the mean step of a whole training, whose last steps may see more patches (`whole`)."""
    own, at_the_end = network(recipe), network(dataclasses.replace(recipe, patch_dropout=0.0))
    mean = [dataclasses.replace(some, macs=round((1 - recipe.whole) * some.macs + recipe.whole * every.macs))
            for some, every in zip(own.products, at_the_end.products, strict=True)]
    return own._replace(products=mean)


def networks(table: str) -> dict[str, Network]:
    """A row's name -> the paper's network, which sees every patch of an image at every step. Rows that differ in bits alone
    share one."""
    made: dict[str, Network] = {}
    for recipe in tables.recipes_of(table):
        if recipe.quantize not in made:
            made[recipe.quantize] = network(dataclasses.replace(recipe, patch_dropout=0.0))
    return {recipe.row: made[recipe.quantize] for recipe in tables.recipes_of(table)}


# ---------------------------------------------------------------------------------------------------- gft energy table


@app.command()
def table(node: Node = "7nm",
          precision: Annotated[str, typer.Option(help="Of the whole step's products: fp32, bf16, fp16 or int8.")] = "fp32",
          runs: Annotated[list[Path], typer.Option(help="A table's folder, for the flips its runs had; repeatable.")] = [],  # noqa: B006
          out: Annotated[Path | None, typer.Option(help="Folder for energy.md and energy.json.")] = None) -> None:
    """The columns FP32 params, Updates, Bits and Energy of the paper's tables beside ours, and the whole step's energy."""
    estimate.mac_pj(precision, node)  # says which there are, before anything is built
    asked = command("table", node=node, precision=precision, runs=runs, out=out)
    columns, whole, rows = [], [], []
    for name in paper.TABLES:
        title, own = tables.TITLES[name], networks(name)
        recipes = {recipe.row: recipe for recipe in tables.recipes_of(name)}
        printed = [row for row in paper.ROWS if row.table == name]
        counts = {row: one.counts for row, one in own.items()}
        steps = {row: one.step(recipes[row], precision, node) for row, one in own.items()}
        columns.append(sheets.paper_sheet(title, printed, counts, node))
        whole.append(sheets.whole_sheet(f"{title}: the whole step", printed, steps))
        rows += [{"table": name, "row": row.name, "recipe": recipes[row.name].name, **counts[row.name]._asdict(),
                  "cells": sheets.compared(row, counts[row.name], counts["Full-Precision"].fp32),
                  "step_j": {**dataclasses.asdict(steps[row.name]), "whole": steps[row.name].total}, "steps": row.steps}
                 for row in printed]
    flips = [sheets.flips_sheet(f"Flips counted in {folder.name}", mean_results(folder), node) for folder in runs]
    slips = [f"{slip.table}, {', '.join(slip.rows)}, {slip.column}: {slip.cause}; {slip.why}" for slip in paper.SLIPS]
    for sheet in columns:
        show(sheet)
    console.print(sheets.MARKS_EXPLAINED, "")
    for sheet in whole:
        show(sheet)
    assumed = f"{sheets.WHOLE_EXPLAINED} At {node}, products in {precision}."
    console.print(assumed, "")
    for sheet in flips:
        show(sheet)
    console.print("The paper's slips:", *(f"- {slip}" for slip in slips), sep="\n", soft_wrap=True)
    if out is not None:
        about = {"command": asked, **surroundings()}
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "energy.json", {"about": about, "node": node, "precision": precision, "rows": rows})
        write_text(out / "energy.md", "\n".join([
            "# Energy, estimated", "", *(sheet.markdown() for sheet in columns), sheets.MARKS_EXPLAINED, "",
            *(sheet.markdown() for sheet in whole), assumed, "",
            *(sheet.markdown() for sheet in flips), "## The paper's slips", "", *(f"- {slip}" for slip in slips), "",
            f"Command: `{asked}` · " + " · ".join(f"{key} {value}" for key, value in surroundings().items()), ""]))
        console.print(f"Written: {out}/energy.md, energy.json")


def mean_results(folder: Path) -> list[dict[str, Any]]:
    """One line a recipe from the runs of a table's folder, the flips of its seeds averaged."""
    lines = list(tables.read_lines(folder).values())
    if not lines:
        raise ValueError(f"no finished run in {folder}; give the folder of a table that gft reproduce made")
    rows = []
    for name in dict.fromkeys(line["recipe"] for line in lines):
        same = [line for line in lines if line["recipe"] == name]
        rows.append({**same[0], "updates_actual": statistics.fmean(line["updates_actual"] for line in same)})
    return rows


def show(sheet: sheets.Sheet) -> None:
    printed = Table(title=sheet.title, box=None, padding=(0, 1, 0, 0), caption=sheet.note or None)
    for place, column in enumerate(sheet.columns):
        printed.add_column(column, justify="left" if place == 0 else "right", no_wrap=place == 0)
    for row in sheet.rows:
        printed.add_row(*row)
    console.print(printed, "")


# ---------------------------------------------------------------------------------------------------- gft energy measure


@app.command()
def measure(recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="One or more, to compare in one run.")],
            steps: Annotated[int, typer.Option(min=1, help="In a window. A window should last some seconds.")] = 200,
            repeats: Annotated[int, typer.Option(min=1, help="Windows a recipe; with --full, runs, a seed each.")] = 5,
            warmup: Annotated[int, typer.Option(min=1, help="Steps before the first window.")] = 20,
            full: Annotated[bool, typer.Option("--full", help="Train to the end, and say how well it went.")] = False,
            idle: Annotated[float, typer.Option(min=0, help="Seconds to measure the idle power; 0: leave it.")] = 5.0,
            seed: int = 0, node: Node = "7nm", device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
            settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="As in gft train.")] = [],  # noqa: B006
            out: Annotated[Path, typer.Option(help="Folder for measured.md and .json.")] = Path("runs/energy")) -> None:
    """Joules of training steps by the machine's own counters, beside the estimates."""
    chosen = [find(name).changed(settings) for name in dict.fromkeys(recipes)]
    on = resolve_device(device)
    if (out / "measured.json").exists():
        raise ValueError(f"{out} holds a measurement already; give another --out")
    counters, missing = energy.find_counters(on)
    asked = command("measure", *recipes, steps=None if full else steps, repeats=repeats, warmup=warmup, full=full, idle=idle,
                    seed=seed, node=node, device=device, set=settings, out=out)
    about = {"command": asked, **surroundings(on)}
    report = measure_recipes(chosen, counters, steps=steps, repeats=repeats, warmup=warmup, full=full, idle_seconds=idle,
                             seed=seed, node=node, on=on)
    report |= {"about": about, "not_measured": missing}
    sheet = sheets.measured_sheet(report)
    show(sheet)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "measured.json", report)
    write_text(out / "measured.md", sheet.markdown())
    console.print(f"Written: {out}/measured.md, measured.json")


def measure_recipes(recipes: Sequence[Recipe], counters: Sequence[energy.Counter], *, steps: int, repeats: int, warmup: int,
                    on: torch.device, full: bool = False, idle_seconds: float = 5.0, seed: int = 0,
                    node: str = "7nm") -> dict[str, Any]:
    """measured.json, less what tells of the surroundings. Nothing of the runs themselves is kept."""
    estimate.operations(node)  # a mistake should show now, not after hours of training
    if full and (short := next((recipe for recipe in recipes if recipe.steps < warmup + 2), None)):
        raise ValueError(f"{short.name} has {short.steps} steps, of which {warmup} are warm-up; give a smaller --warmup")
    # The paper's numbers are of AdamW and GFT; another method is measured without an estimate beside it.
    counted = over_a_run if full else network
    estimates = {recipe.name: counted(recipe) if recipe.method == "gft" else None for recipe in recipes}
    idle = idle_power(counters, idle_seconds, on)
    readings: dict[str, list[energy.Reading]] = {recipe.name: [] for recipe in recipes}
    results: dict[str, list[dict[str, Any]]] = {recipe.name: [] for recipe in recipes}
    with tempfile.TemporaryDirectory() as scratch:
        if full:
            for number in range(repeats):
                for recipe in recipes:
                    reading, result = whole_run(recipe, Path(scratch) / f"{recipe.name}-{number}", counters, warmup, idle,
                                                seed + number, on)
                    readings[recipe.name].append(reading)
                    results[recipe.name].append(result)
                    tell(recipe.name, number + 1, repeats, reading, recipe.steps - 1 - warmup)
        else:
            # One step more than is taken: the last one of a run evaluates and writes its result.
            needed = warmup + repeats * steps + 1
            # And all alike: windows that are longer than the recipe's training must not reach its whole images.
            runs = {recipe.name: start(recipe.changed([f"steps={max(recipe.steps, needed)}", "whole=0"]),
                                       Path(scratch) / recipe.name, seed, on) for recipe in recipes}
            windows = energy.measure_steps(runs, counters, steps=steps, repeats=repeats, warmup=warmup, idle=idle)
            for name, reading in windows:
                readings[name].append(reading)
                tell(name, len(readings[name]), repeats, reading, steps)
            for run in runs.values():
                run.close()
    rows = [measured_row(recipe, estimates[recipe.name], readings[recipe.name], results[recipe.name],
                         recipe.steps - 1 - warmup if full else steps, node, on) for recipe in recipes]
    return {"full": full, "steps": steps, "repeats": repeats, "warmup": warmup, "seed": seed, "node": node,
            "counters": {counter.name: counter.about for counter in counters}, "idle_watts": idle, "rows": rows,
            "shortest_window_s": min(reading.seconds for some in readings.values() for reading in some)}


def start(recipe: Recipe, folder: Path, seed: int, on: torch.device) -> Any:
    """The recipe's training, a step a `next`, with no evaluation and no checkpoint before its last."""
    quiet = recipe.changed([f"eval_every={recipe.steps + 1}"])
    return train.training(quiet, folder, seed=seed, device=str(on), checkpoint_every=recipe.steps + 1, keep_checkpoint=False)


def whole_run(recipe: Recipe, folder: Path, counters: Sequence[energy.Counter], warmup: int, idle: Mapping[str, float],
              seed: int, on: torch.device) -> tuple[energy.Reading, dict[str, Any]]:
    """A run to its end, in one window from its warm-up to its last step but one, and its result."""
    run = start(recipe, folder, seed, on)
    take(run, warmup)
    with energy.measure(counters, idle=idle) as window:
        take(run, recipe.steps - 1 - warmup, recipe.name, window)
    result = next(run).result
    assert result is not None
    return window.reading, result


def idle_power(counters: Sequence[energy.Counter], seconds: float, on: torch.device) -> dict[str, float]:
    """Watts while nothing runs; on a GPU with what a process holds there even then."""
    if seconds == 0:
        return {}
    if on.type == "cuda":
        torch.zeros(1, device=on)
        torch.cuda.synchronize(on)
        time.sleep(2)  # for its clocks to fall
    return energy.idle_power(counters, seconds)


def tell(name: str, number: int, of: int, reading: energy.Reading, steps: int) -> None:
    gross, net = (joules / steps * 1e3 for joules in (reading.gross, reading.net))
    console.print(f"{name} {number}/{of}: {gross:.1f} mJ/step gross, {net:.1f} net, {reading.seconds:.1f} s", soft_wrap=True,
                  highlight=False)


def measured_row(recipe: Recipe, own: Network | None, readings: Sequence[energy.Reading],
                 results: Sequence[Mapping[str, Any]], steps: int, node: str, on: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {
        "recipe": recipe.name, "table": recipe.table, "row": recipe.row, "metric": recipe.metric, "bits": recipe.bits,
        "batch": recipe.batch, "run_steps": recipe.steps, "steps_a_window": steps,
        "gross_j_per_step": energy.mean_std([reading.gross / steps for reading in readings]),
        "net_j_per_step": energy.mean_std([reading.net / steps for reading in readings]),
        "seconds_per_step": energy.mean_std([reading.seconds / steps for reading in readings]),
        "readings": [dataclasses.asdict(reading) for reading in readings], "config": dataclasses.asdict(recipe),
        "estimate": None,
    }
    if results:
        row |= {"value": energy.mean_std([result["value"] for result in results]), "results": list(results)}
    if own is not None:
        moved = None
        if results and own.counts.quantized:
            updates = statistics.fmean(result["updates_actual"] for result in results)
            moved = energy.moved_share(updates, *own.counts, recipe.steps)
        precision = recipe.precision if on.type == "cuda" else "fp32"
        joules, of_flips = (own.step(recipe, precision, node, share) for share in (None, moved))
        row["estimate"] = {**dataclasses.asdict(joules), "whole": joules.total, "precision": precision, "moved": moved,
                           "optimizer_from_flips": of_flips.optimizer, **own.counts._asdict()}
    return row


# ---------------------------------------------------------------------------------------------------- shared


def command(name: str, *words: str, **options: Any) -> str:
    """What was asked, in full, to be asked again."""
    parts = ["gft energy", name, *map(shlex.quote, words)]
    for key, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is True:
                parts.append(f"--{key}")
            elif one is not None and one is not False:
                parts.append(f"--{key} {shlex.quote(str(one))}")
    return " ".join(parts)


def surroundings(on: torch.device | None = None) -> dict[str, str]:
    """Commit, hardware and versions: what a number needs beside it."""
    told = {"commit": commit(), "python": platform.python_version(), "torch": torch.__version__}
    if on is not None:
        told |= {"device": device_name(on), "cuda": torch.version.cuda or "none", "nvidia-ml-py": "not installed"}
        with contextlib.suppress(PackageNotFoundError):
            told["nvidia-ml-py"] = version("nvidia-ml-py")
    return told
