"""Reproducing a table of the paper: every row with several seeds, resumably, several runs at a time if asked.

Each run has its folder OUT/RECIPE/seed-S. A run that has its result is not run again, one that has a checkpoint goes
on from it; so a stopped table continues, and one more seed costs one more seed.
"""

import json
import multiprocessing
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gft.lab import report, train
from gft.lab.display import Bars
from gft.lab.recipes import RECIPES, Recipe

TITLES = {"mnist-dnn": "DNN on MNIST (paper, Table 1)", "depth": "Ternary DNN on MNIST by depth (paper, Table 6)"}


def recipes_of(table: str, paper: bool, rows: Sequence[str] = ()) -> list[Recipe]:
    """The recipes of a table, those of `gft.PAPER` if asked; `rows` keeps only names that contain one of its words."""
    if table not in TITLES:
        raise ValueError(f"no table {table!r}; choose one of {', '.join(TITLES)}")
    chosen = [recipe for recipe in RECIPES.values() if recipe.table == table and recipe.name.endswith("-paper") == paper
              and (not rows or any(row in recipe.name for row in rows))]
    if not chosen:
        raise ValueError(f"--rows {' '.join(rows)} names no row of {table}; gft recipes lists them")
    return chosen


def reproduce(table: str, out: Path, *, seeds: int = 5, paper: bool = False, rows: Sequence[str] = (),
              settings: Sequence[str] = (), device: str = "auto", jobs: int = 1) -> list[dict[str, Any]]:
    """Run what is missing of a table, then write it (`write_table`) beside the runs."""
    recipes = [recipe.changed(list(settings)) for recipe in recipes_of(table, paper, rows)]
    runs = [(recipe, seed, out / recipe.name / f"seed-{seed}") for seed in range(seeds) for recipe in recipes]
    train.resolve_device(device)
    command = " ".join(["gft reproduce", table, f"--seeds {seeds}", *(["--paper"] if paper else []),
                        *(f"--rows {row}" for row in rows), *(f"--set {setting}" for setting in settings),
                        *([f"--jobs {jobs}"] if jobs > 1 else [])])
    out.mkdir(parents=True, exist_ok=True)
    train.write_json(out / "command.json", {"title": TITLES[table] + (", the paper's own rule" if paper else ""),
                                            "command": command, "recipes": [recipe.name for recipe in recipes]})
    with Bars() as bars:
        bars.add("all runs", len(runs))
        for name, told in (_in_turn(runs, device) if jobs == 1 else _side_by_side(runs, device, jobs)):
            bars.show(name, told)
            if told.result is not None:
                bars.done(name)
                bars.advance("all runs")
    return write_table(out)


def write_table(out: Path) -> list[dict[str, Any]]:
    """table.md, table.json, runs.jsonl and curves.{png,svg} from every finished run in the folder of a table."""
    if not (out / "command.json").exists():
        raise ValueError(f"{out} is not the folder of a table (it has no command.json); give one that gft reproduce made")
    about = train.read_json(out / "command.json")
    folders = {name: sorted(file.parent for file in (out / name).glob("seed-*/result.json")) for name in about["recipes"]}
    finished = {name: runs for name, runs in folders.items() if runs}
    if not finished:
        raise ValueError(f"no run in {out} is finished yet; go on with: {about['command']}")
    results = [train.read_json(folder / "result.json") for runs in finished.values() for folder in runs]
    rows = report.table_rows(results, about["command"])
    train.write_json(out / "table.json", {"title": about["title"], "rows": rows})
    train.write_text(out / "table.md", report.markdown(about["title"], rows))
    train.write_text(out / "runs.jsonl", "".join(json.dumps(result) + "\n" for result in results))
    curves = {row["name"]: [report.validation_curve(folder) for folder in finished[row["recipe"]]] for row in rows}
    report.plot_curves(curves, about["title"], "validation accuracy, %", [out / "curves.png", out / "curves.svg"])
    return rows


Run = tuple[Recipe, int, Path]


def _events(run: Run, device: str) -> Iterator[tuple[str, train.Progress]]:
    recipe, seed, folder = run
    for told in train.training(recipe, folder, seed=seed, device=device, resume=True, keep_checkpoint=False):
        yield f"{recipe.name} seed {seed}", told


def _in_turn(runs: Sequence[Run], device: str) -> Iterator[tuple[str, train.Progress]]:
    for run in runs:
        yield from _events(run, device)


def _work(run: Run, device: str, told: Any, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high")
    for name, event in _events(run, device):
        if event.loss is not None or event.result is not None:
            told.put((name, event))


def _side_by_side(runs: Sequence[Run], device: str, jobs: int) -> Iterator[tuple[str, train.Progress]]:
    """Several processes at once: small networks leave a GPU waiting for the host between kernels."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, multiprocessing.cpu_count() // jobs)
    # A pool's exit ends its processes at once, also on Ctrl-C; what was finished or checkpointed stays on disk.
    with context.Manager() as manager, context.Pool(jobs) as pool:
        told = manager.Queue()
        pending = [pool.apply_async(_work, (run, device, told, threads)) for run in runs]
        while pending or not told.empty():
            for one in [one for one in pending if one.ready()]:
                one.get()  # raises what the run raised
                pending.remove(one)
            try:
                yield told.get(timeout=0.2)
            except queue.Empty:
                continue
