"""Settings for the rows of a table, chosen on val: `gft tune`.

Every setting of a grid is a run of its own in OUT/TABLE/tuning, resumed and kept as those of a table are. tuned.json says
all that was tried and what was chosen; `gft reproduce TABLE` with the same --out takes its settings from there. `TUNINGS`
are the tables that are tuned.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gft.errors import UsageError
from gft.lab import convolutions, ladder, tables, transfer
from gft.lab.recipe import Recipe
from gft.lab.recipes import RECIPES
from gft.lab.records import write_json, write_lines
from gft.lab.runs import TrainingError

Grid = Mapping[str, Sequence[str]]  # a setting -> what is tried of it


@dataclass(frozen=True)
class Tuning:
    """What of a table is tuned."""

    table: str
    prefix: str  # of its recipes' names: PREFIX-SIZE-ROW
    sizes: Sequence[str]
    rows: Mapping[str, Any]  # each has `own_lr`: which settings "lr" means
    place_of: Callable[[str], tuple[str, str]]  # a recipe's name -> its size and row
    grids: Mapping[str, Grid]  # the first word of a row's name -> what is tried by default
    tuned: Sequence[str]  # which rows, by default
    at: Sequence[str]  # and which sizes

    def trials(self, size: str, row: str, grid: Grid, settings: Sequence[str] = ()) -> list[Recipe]:
        """A recipe for each setting of a grid, named NAME@KEY=VALUE,KEY=VALUE."""
        name = f"{self.prefix}-{size}-{row}"
        if name not in RECIPES or size not in self.sizes or row not in self.rows:
            raise UsageError(f"no row {row!r} of size {size!r}; sizes are {', '.join(self.sizes)}, rows "
                             f"{', '.join(self.rows)}")
        base, found = RECIPES[name].changed(settings), []
        for values in itertools.product(*grid.values()):
            tried = self.settings_of(row, dict(zip(grid, values, strict=True)))
            found.append(base.changed(tried).updated(name=f"{base.name}@{','.join(tried)}"))
        return found

    def settings_of(self, row: str, point: Mapping[str, str]) -> list[str]:
        """A point of a grid as settings of a recipe."""
        own, settings = self.rows[row].own_lr, []
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

    def grid_of(self, row: str, asked: Sequence[str]) -> dict[str, Sequence[str]]:
        """The axes that were asked for as KEY=VALUE,VALUE,…, or the row's default grid."""
        if not asked:
            return dict(self.grids.get(row.partition("-")[0], {}))
        grid = {}
        for axis in asked:
            key, equals, values = axis.partition("=")
            if not equals or not values:
                raise UsageError(f"--try {axis}: write KEY=VALUE,VALUE, like lr=1e-3,2e-3 or dense.weight_decay=0.1,0.3")
            grid[key] = tuple(values.split(","))
        return grid

    def tune(self, out: Path, rows: Sequence[str] = (), sizes: Sequence[str] = (), asked: Sequence[str] = (),
             settings: Sequence[str] = (), device: str = "auto", jobs: int = 1) -> dict[str, Any]:
        """Run what is missing, and write tuned.json: what it says. Without rows or sizes, the table's default ones."""
        wanted = [one for row in rows or self.tuned for size in sizes or self.at
                  for one in self.trials(size, row, self.grid_of(row, asked), settings)]
        folder = out / self.table / "tuning"
        outcomes = tables.run_missing(wanted, folder, device, jobs)
        stopped = [result for result in outcomes if isinstance(result, TrainingError)]
        lines = tables.read_lines(folder)
        write_lines(folder / "runs.jsonl", lines.values())
        if not lines:
            raise stopped[0]
        # One that diverged is no candidate; it is named, so that nobody takes the grid for smaller than it was.
        report = {"chosen_on": "val", "chosen": self.chosen(lines.values()),
                  "tried": [self.tried(line) for line in lines.values()], "diverged": [str(error) for error in stopped]}
        write_json(out / self.table / "tuned.json", report)
        return report

    def tried(self, line: Mapping[str, Any]) -> dict[str, Any]:
        name, _, settings = line["recipe"].partition("@")
        size, row = self.place_of(name)
        return {"row": row, "size": size, "settings": {key: value_of(text) for key, _, text in (
            setting.partition("=") for setting in settings.split(","))}, "val": line["value"],
            **{key: line[key] for key in ("steps", "seed", "commit", "device", "torch")}}

    def chosen(self, lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """row -> size -> the settings of least val loss, or of most accuracy, of those tried for as many steps as any; and
        which of them lie at the end of what was tried, where something better may lie beyond."""
        by_place: dict[tuple[str, str], list[dict[str, Any]]] = {}
        sign = 1
        for line in lines:
            one = self.tried(line)
            by_place.setdefault((one["row"], one["size"]), []).append(one)
            sign = -1 if line["metric"] == "accuracy" else 1
        found: dict[str, dict[str, Any]] = {}
        for (row, size), every in sorted(by_place.items()):
            longest = max(one["steps"] for one in every)
            fair = [one for one in every if one["steps"] == longest]
            best = min(fair, key=lambda one: sign * one["val"])
            axes = {key: sorted({one["settings"][key] for one in fair if isinstance(one["settings"].get(key), float)})
                    for key, value in best["settings"].items() if isinstance(value, float)}
            at_end = [key for key, values in axes.items()
                      if len(values) > 2 and best["settings"][key] in (values[0], values[-1])]
            found.setdefault(row, {})[size] = {"settings": best["settings"], "val": best["val"], "tried": len(fair),
                                               "steps": longest, "at_the_end_of_the_grid": at_end}
        return found


def value_of(text: str) -> float | bool | str:
    """A setting as JSON keeps it: integers.gain=true, integers.threshold=auto."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text


# "lr" is a row's own; "blocks" the share of it that its blocks' matrices, or latents, take. Rows on a grid have a rate of
# their own for these, so floats must have the choice, too.
ADAMWS = {"lr": ("1e-3", "2e-3", "4e-3", "8e-3"), "blocks": ("1", "0.25"), "dense.weight_decay": ("0.1", "0.3")}
ON_A_GRID = {"lr": ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3")}
LADDER = Tuning(
    ladder.TABLE, ladder.TABLE, tuple(ladder.SIZES), ladder.ROWS, ladder.place_of,
    {"adamw": ADAMWS, "muon": ADAMWS, "bitnet": ADAMWS, "gft": {"lr": ("0.025", "0.05", "0.1", "0.2", "0.4")},
     "dqt": ON_A_GRID, "eco": ON_A_GRID},
    tuned=("adamw", "bitnet-2bit"), at=("10m", "30m"))
CONVOLUTIONS = Tuning(
    convolutions.TABLE, "conv", convolutions.SIZES, convolutions.ROWS, convolutions.place_of,
    {"adamw": {"lr": ("5e-4", "1e-3", "2e-3", "4e-3", "8e-3"), "dense.weight_decay": ("0.02", "0.1", "0.5")},
     "sgd": {"lr": ("0.02", "0.05", "0.1", "0.2", "0.4"), "dense.weight_decay": ("1e-4", "5e-4", "2e-3")},
     "gft": {"lr": ("0.025", "0.05", "0.1", "0.2", "0.4")}},
    tuned=convolutions.FLOATS, at=convolutions.SIZES)
TRANSFER = Tuning(
    transfer.TABLE, transfer.TABLE, transfer.SIZES, transfer.ROWS, transfer.place_of,
    {"gft": {"lr": ("0.025", "0.05", "0.1", "0.2", "0.4")}}, tuned=("gft-4bit", "gft-2bit"), at=transfer.SIZES)
TUNINGS = {tuning.table: tuning for tuning in (LADDER, CONVOLUTIONS, TRANSFER)}


def tuning_of(table: str) -> Tuning:
    if table not in TUNINGS:
        raise UsageError(f"nothing of {table} is tuned; choose one of {', '.join(TUNINGS)}")
    return TUNINGS[table]
