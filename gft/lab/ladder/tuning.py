"""Settings for the ladder's rows, chosen on val: `gft tune`.

Every setting of a grid is a run of its own in OUT/wiki-ladder/tuning, resumed and kept as those of a table are. tuned.json
says all that was tried and what was chosen; `gft reproduce wiki-ladder` with the same --out takes its settings from there.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gft.errors import UsageError
from gft.lab import tables
from gft.lab.ladder import AT_1B, ROWS, SIZES, TABLE, recipe
from gft.lab.recipe import Recipe
from gft.lab.records import write_json, write_lines
from gft.lab.runs import TrainingError

AT = ("10m", "30m")
TUNED = ("adamw", "bitnet-2bit")
# What is tried by default, of each kind of row. "lr" is the row's own; "blocks" the share of it that its blocks' matrices,
# or latents, take. Rows on a grid have a rate of their own for these, so floats must have the choice, too.
ADAMWS = {"lr": ("1e-3", "2e-3", "4e-3", "8e-3"), "blocks": ("1", "0.25"), "dense.weight_decay": ("0.1", "0.3")}
GRIDS = {"adamw": ADAMWS, "muon": ADAMWS, "bitnet": ADAMWS, "gft": {"lr": ("0.025", "0.05", "0.1", "0.2", "0.4")},
         "dqt": {"lr": ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3")}, "eco": {"lr": ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3")}}


def trials(size: str, row: str, grid: Mapping[str, Sequence[str]], settings: Sequence[str] = ()) -> list[Recipe]:
    """A recipe for each setting of a grid, named NAME@KEY=VALUE,KEY=VALUE."""
    if size not in SIZES or row not in ROWS or (size == "1b" and row not in AT_1B):
        raise UsageError(f"no row {row!r} of size {size!r}; sizes are {', '.join(SIZES)}, rows {', '.join(ROWS)}")
    base, found = recipe(size, row).changed(settings), []
    for values in itertools.product(*grid.values()):
        tried = settings_of(row, dict(zip(grid, values, strict=True)))
        found.append(base.changed(tried).updated(name=f"{base.name}@{','.join(tried)}"))
    return found


def settings_of(row: str, point: Mapping[str, str]) -> list[str]:
    """A point of a grid as settings of a recipe."""
    own, settings = ROWS[row].own_lr, []
    for key, value in point.items():
        if key == "lr":
            settings += [f"{name}={value}" for name in own]
        elif key != "blocks":
            settings.append(f"{key}={value}")
        elif own == ("dense.lr",):
            settings.append(f"dense.blocks={value}")
        elif "dense.lr" in own and "lr" in point:  # latents, which have a rate by itself
            settings.append(f"integers.lr={float(value) * float(point['lr']):g}")
        else:
            raise UsageError(f"--try blocks={value}: {row} has a rate for its blocks alone; try lr and dense.lr")
    return list({setting.partition("=")[0]: setting for setting in settings}.values())  # the last of each


def grid_of(row: str, asked: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The axes that were asked for as KEY=VALUE,VALUE,…, or the row's default grid."""
    if not asked:
        return dict(GRIDS[row.partition("-")[0]])
    grid = {}
    for axis in asked:
        key, equals, values = axis.partition("=")
        if not equals or not values:
            raise UsageError(f"--try {axis}: write KEY=VALUE,VALUE, like lr=1e-3,2e-3 or dense.weight_decay=0.1,0.3")
        grid[key] = tuple(values.split(","))
    return grid


def tune(out: Path, rows: Sequence[str] = TUNED, sizes: Sequence[str] = AT, asked: Sequence[str] = (),
         settings: Sequence[str] = (), device: str = "auto", jobs: int = 1) -> dict[str, Any]:
    """Run what is missing, and write tuned.json: what it says."""
    wanted = [one for row in rows for size in sizes for one in trials(size, row, grid_of(row, asked), settings)]
    folder = out / TABLE / "tuning"
    stopped = [result for result in tables.run_missing(wanted, folder, device, jobs) if isinstance(result, TrainingError)]
    lines = tables.read_lines(folder)
    write_lines(folder / "runs.jsonl", lines.values())
    if not lines:
        raise stopped[0]
    # One that diverged is no candidate; it is named, so that nobody takes the grid for smaller than it was.
    report = {"chosen_on": "val", "chosen": chosen(lines.values()), "tried": [tried(line) for line in lines.values()],
              "diverged": [str(error) for error in stopped]}
    write_json(out / TABLE / "tuned.json", report)
    return report


def tried(line: Mapping[str, Any]) -> dict[str, Any]:
    name, _, settings = line["recipe"].partition("@")
    size, _, row = name.removeprefix(f"{TABLE}-").partition("-")
    return {"row": row, "size": size, "settings": {key: float(value) for key, _, value in (
        setting.partition("=") for setting in settings.split(","))}, "val": line["value"],
        **{key: line[key] for key in ("steps", "seed", "commit", "device", "torch")}}


def chosen(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """row -> size -> the settings of least val loss, of those tried for as many steps as any; and which of them lie at the
    end of what was tried, where something better may lie beyond."""
    by_place: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in map(tried, lines):
        by_place.setdefault((one["row"], one["size"]), []).append(one)
    found: dict[str, dict[str, Any]] = {}
    for (row, size), every in sorted(by_place.items()):
        longest = max(one["steps"] for one in every)
        fair = [one for one in every if one["steps"] == longest]
        best = min(fair, key=lambda one: one["val"])
        axes = {key: sorted({one["settings"][key] for one in fair if key in one["settings"]}) for key in best["settings"]}
        at_end = [key for key, values in axes.items()
                  if len(values) > 2 and best["settings"][key] in (values[0], values[-1])]
        found.setdefault(row, {})[size] = {"settings": best["settings"], "val": best["val"], "tried": len(fair),
                                           "steps": longest, "at_the_end_of_the_grid": at_end}
    return found
