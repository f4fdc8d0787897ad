"""Every number of the paper's energy columns beside ours, and the whole training step beside the optimizer's: `gft energy
table`."""

import dataclasses
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gft.errors import UsageError
from gft.files import write_text
from gft.lab import tables
from gft.lab.energy import estimate, paper, sheets
from gft.lab.energy.networks import networks
from gft.lab.energy.sheets import Sheet
from gft.lab.provenance import commit
from gft.lab.records import write_json


@dataclass(frozen=True)
class Estimates:
    """The tables of the paper, row by row: its columns beside ours, and what they leave out."""

    node: str
    precision: str
    columns: list[Sheet]
    whole: list[Sheet]
    flips: list[Sheet]  # of runs that counted them
    rows: list[dict[str, Any]]

    @property
    def assumed(self) -> str:
        return f"{sheets.WHOLE_EXPLAINED} At {self.node}, products in {self.precision}."

    def write(self, out: Path, command: str) -> None:
        """energy.md and energy.json."""
        about = {"commit": commit(), "python": platform.python_version(), "torch": torch.__version__}
        write_json(out / "energy.json", {"about": {"command": command, **about}, "node": self.node,
                                         "precision": self.precision, "rows": self.rows})
        write_text(out / "energy.md", "\n".join([
            "# Energy, estimated", "", *(sheet.markdown() for sheet in self.columns), sheets.MARKS_EXPLAINED, "",
            *(sheet.markdown() for sheet in self.whole), self.assumed, "",
            *(sheet.markdown() for sheet in self.flips), "## The paper's slips", "", *(f"- {slip}" for slip in SLIPS), "",
            f"Command: `{command}` · " + " · ".join(f"{key} {value}" for key, value in about.items()), ""]))


SLIPS = [f"{slip.table}, {', '.join(slip.rows)}, {slip.column}: {slip.cause}; {slip.why}" for slip in paper.SLIPS]


def estimates(node: str = "7nm", precision: str = "fp32", runs: Sequence[Path] = ()) -> Estimates:
    """All tables; runs: folders of `gft reproduce` whose counted flips are set beside what the paper assumes."""
    estimate.mac_pj(precision, node)  # a mistake should show before anything is built
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
    return Estimates(node, precision, columns, whole, flips, rows)


def mean_results(folder: Path) -> list[dict[str, Any]]:
    """One line a recipe from the runs of a table's folder, the flips of its seeds averaged."""
    lines = list(tables.read_lines(folder).values())
    if not lines:
        raise UsageError(f"no finished run in {folder}; give the folder of a table that gft reproduce made")
    rows = []
    for name in dict.fromkeys(line["recipe"] for line in lines):
        same = [line for line in lines if line["recipe"] == name]
        rows.append({**same[0], "updates_actual": statistics.fmean(line["updates_actual"] for line in same)})
    return rows
