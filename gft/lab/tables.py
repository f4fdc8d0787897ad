"""Reproducing a table of the paper: every row with several seeds, resumably, several runs at a time if asked.

Each run has its folder OUT/RECIPE/seed-S. A run that has its result is not run again, one that has a checkpoint goes
on from it; so a stopped table continues, and one more seed costs one more seed.
"""

import json
import multiprocessing
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
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
    """Run what is missing of a table, then write table.md, table.json and curves.{png,svg} beside the runs."""
    recipes = [recipe.changed(list(settings)) for recipe in recipes_of(table, paper, rows)]
    runs = [(recipe, seed, out / recipe.name / f"seed-{seed}") for seed in range(seeds) for recipe in recipes]
    train.resolve_device(device)
    with Bars() as bars:
        bars.add("all runs", len(runs))
        for name, told in (_in_turn(runs, device) if jobs == 1 else _side_by_side(runs, device, jobs)):
            bars.show(name, told)
            if told.result is not None:
                bars.done(name)
                bars.advance("all runs")
    command = " ".join(["gft reproduce", table, f"--seeds {seeds}", *(["--paper"] if paper else []),
                        *(f"--rows {row}" for row in rows), *(f"--set {setting}" for setting in settings)])
    results = [train.read_json(folder / "result.json") for _, _, folder in runs]
    table_rows = report.table_rows(sorted(results, key=lambda result: [r.name for r in recipes].index(result["recipe"])),
                                   command)
    title = TITLES[table] + (", the paper's own rule" if paper else "")
    train.write_json(out / "table.json", {"title": title, "rows": table_rows})
    train.write_text(out / "table.md", report.markdown(title, table_rows))
    with open(out / "runs.jsonl", "w") as file:
        file.writelines(json.dumps(result) + "\n" for result in results)
    curves = {recipe.row: [report.validation_curve(folder) for other, _, folder in runs if other is recipe]
              for recipe in recipes}
    report.plot_curves(curves, title, "validation accuracy, %", [out / "curves.png", out / "curves.svg"])
    return table_rows


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
    with context.Manager() as manager, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        told = manager.Queue()
        pending: set[Future[None]] = {pool.submit(_work, run, device, told, threads) for run in runs}
        try:
            while pending or not told.empty():
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()  # a run's error ends the table; what is finished stays on disk
                while True:
                    try:
                        yield told.get_nowait()
                    except queue.Empty:
                        break
        finally:
            pool.shutdown(cancel_futures=True)
