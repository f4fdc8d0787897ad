"""Tables of estimates and of measurements, as plain cells: the command prints them, or writes them as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gft.lab.energy.estimate import MOVED_SHARE, P_CHANGE, Joules, K, energy_estimate_j, moved_share
from gft.lab.energy.meter import SHORT_WINDOW
from gft.lab.energy.paper import COLUMNS, Counts, Row, read, verdict
from gft.lab.markdown import table


@dataclass(frozen=True)
class Sheet:
    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        return "\n".join([f"## {self.title}", "", table(self.columns, self.rows), "",
                          *([self.note, ""] if self.note else [])])


# ---------------------------------------------------------------------------------------------------- estimates

MARKS = {"exact": "", "rounded": "≈"}  # anything else: ≠
WHOLE_EXPLAINED = ("Joules of a whole training; weights: AdamW's gradients or GFT's votes. ×: how many times less than the "
                   "first row, in the optimizer alone and in the whole step.")
MARKS_EXPLAINED = ("A single number: ours prints as the paper's. a ≈ b: the paper's a comes from counts rounded beforehand, "
                   "ours is b. a ≠ b: a slip of the paper's, ours is b.")


def compared(row: Row, ours: Counts, total: int) -> list[dict[str, Any]]:
    """The four cells of a row: what the paper prints, ours, and how the one comes about from the other."""
    return [{"column": column, "paper": printed, "ours": value, "verdict": verdict(row, column, ours, total)}
            for column, printed, value in zip(COLUMNS, row.cells, row.values(*ours), strict=True)]


def paper_sheet(title: str, rows: Sequence[Row], counts: Mapping[str, Counts], node: str = "7nm") -> Sheet:
    """A table of the paper beside ours; counts: a row's name -> the parameters of our network."""
    total = counts[rows[0].name].fp32
    cells = []
    for row in rows:
        line = [row.name]
        for cell in compared(row, counts[row.name], total):
            mark = MARKS.get(cell["verdict"], "≠")
            if cell["column"] == "Energy" and node != "7nm":  # the paper has none to compare with
                line.append(f"{energy_estimate_j(*counts[row.name], row.bits, row.steps, node):.2f}")
            else:
                line.append(cell["paper"] + (f" {mark} {read(cell['paper']).write(cell['ours'])}" if mark else ""))
        cells.append(line)
    energy = "Energy [J]" if node == "7nm" else f"at {node} [J]"
    return Sheet(title, ("Row", *COLUMNS[:3], energy), cells)


def whole_sheet(title: str, rows: Sequence[Row], steps: Mapping[str, Joules]) -> Sheet:
    """Whole training steps; steps: a row's name -> joules of one step of it. The first row is what the others are
    compared with."""
    first = steps[rows[0].name]
    cells = []
    for row in rows:
        joules = steps[row.name]
        parts = (joules.optimizer, joules.forward, joules.error, joules.weight, joules.total)
        cells.append([row.name, *(digits(part * row.steps) for part in parts),
                      f"{first.optimizer / joules.optimizer:.2f}", f"{first.total / joules.total:.2f}"])
    return Sheet(title, ("Row", "optimizer", "forward", "errors", "weights", "whole", "opt. ×", "whole ×"), cells)


def digits(number: float) -> str:
    """Three digits at least, and no exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def flips_sheet(title: str, results: Sequence[Mapping[str, Any]], node: str = "7nm") -> Sheet:
    """Runs that counted their flips, beside what the paper assumes; results: lines of result.json, one a row."""
    cells = []
    for result in results:
        fp32, quantized, bits, steps = (result[key] for key in ("fp32_params", "quantized_params", "bits", "steps"))
        if not quantized or result["updates_estimated"] is None:  # no integers, or a method the paper does not estimate
            continue
        moved = moved_share(result["updates_actual"], fp32, quantized, steps)
        from_flips, assumed = (energy_estimate_j(fp32, quantized, bits, steps, node, share) for share in (moved, None))
        cells.append([result["recipe"], f"{moved:.3f}", f"{result['updates_actual'] / 1e9:.2f}B",
                      f"{result['updates_estimated'] / 1e9:.2f}B", f"{from_flips:.3f}", f"{assumed:.3f}"])
    return Sheet(title, ("recipe", "moved", "updates", "assumed", "J", "assumed J"), cells,
                 "moved: the share of integer weights that changed in a step; the paper's updates assume "
                 f"{MOVED_SHARE}, its energy {P_CHANGE * K}. What orthogonalizing votes adds is not counted here.")


# ---------------------------------------------------------------------------------------------------- measurements


def spread(pair: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    return f"{pair[0] * scale:.{digits}f} ± {pair[1] * scale:.{digits}f}"


def measured_sheet(report: Mapping[str, Any]) -> Sheet:
    """measured.json as one table, estimated and measured."""
    full = report["full"]
    columns = ["recipe", *(["accuracy or loss"] if full else []), "gross mJ/step", "net mJ/step", "ms/step",
               "estimate: optimizer mJ", "estimate: whole mJ", *(["gross J", "net J"] if full else [])]
    cells = []
    for row in report["rows"]:
        gross, net = row["gross_j_per_step"], row["net_j_per_step"]
        line = [row["recipe"], *([spread(row["value"], digits=2 if row["metric"] == "accuracy" else 3)] if full else []),
                spread(gross, 1e3), spread(net, 1e3), spread(row["seconds_per_step"], 1e3, 2),
                *(f"{row['estimate'][part] * 1e3:.3g}" if row["estimate"] else "–" for part in ("optimizer", "whole"))]
        cells.append(line + ([spread(gross, row["run_steps"]), spread(net, row["run_steps"])] if full else []))
    idle = ", ".join(f"{name} {watts:.1f} W" for name, watts in report["idle_watts"].items()) or "not measured"
    windows = ("a window is a whole run less its warm-up and last step, one run a seed" if full
               else f"windows of {report['steps']} steps, the recipes in turn")
    notes = [f"Mean ± standard deviation of {report['repeats']}; {windows}; {report['warmup']} steps of warm-up, evaluation "
             f"and checkpoints outside. Net: without the idle power ({idle}). Estimates: {report['node']}, docs/energy.md."]
    if report["shortest_window_s"] < SHORT_WINDOW:
        notes.append(f"The shortest window lasted {report['shortest_window_s']:.2f} s, too short for a GPU's counter: give "
                     "more --steps.")
    notes += report["not_measured"]
    counters = "; ".join(f"{name}: {about}" for name, about in report["counters"].items())
    about = " · ".join(f"{key} {value}" for key, value in report["about"].items() if key != "command")
    notes += [f"Counters, summed: {counters}. Command: `{report['about']['command']}` · {about}"]
    return Sheet("Joules, estimated and measured", tuple(columns), cells, "\n\n".join(notes))
