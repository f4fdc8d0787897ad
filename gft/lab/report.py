"""What runs came to: tables for the terminal and for Markdown, and validation curves as PNG and SVG."""

import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gft.lab import bench, figures, older
from gft.lab import markdown as tables
from gft.lab.recipe import Recipe
from gft.lab.records import checked, read_json_lines

Result = Mapping[str, Any]
Row = Mapping[str, Any]  # of a table: several runs


def short(number: float) -> str:
    """53583872 -> 53.6M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


def demo_table(results: Iterable[Result]) -> Table:
    table = Table(title="Three ways to train the same network on scikit-learn's digits")
    for name in ("network", "accuracy", "B a weight", "bits", "updates", "energy*", "time"):
        table.add_column(name, justify="left" if name == "network" else "right", no_wrap=True)
    for result in results:
        kept = 12.0 if not result["quantized_params"] else result["bytes_per_weight"]  # AdamW: weight, two moments
        table.add_row(result["row"], f"{result['value']:.2f} %", f"{kept:g}", short(result["bits_total"]),
                      short(result["updates_actual"]), f"{result['energy_estimate_j'] * 1e6:.3g} µJ",
                      f"{result['wall_s']:.1f} s")
    table.caption = ("B a weight: kept between steps, state included; for the hybrid, of its integers.\n"
                     "*The paper's estimate for the optimizer step alone, at 7 nm.")
    return table


def recipe_lines(recipes: Iterable[Recipe]) -> list[str]:
    """A head line, then one a recipe: its data, and how its integers learn. 80 characters at most; the same in a pipe."""
    rows = [("recipe", "data", "rule", "votes", "steps", "paper")]
    for recipe in recipes:
        integers = recipe.integers
        if integers.layers == "none":
            rule, votes = "–", "–"
        else:
            rule, votes = (integers.rule, integers.vote) if integers.method == "gft" else (integers.method, "–")
        rows.append((recipe.name, recipe.data.name, rule, votes, str(recipe.schedule.steps),
                     "–" if recipe.paper is None else f"{recipe.paper:g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join([*line[:2], " ".join(line[2:])]).rstrip() for line in cells]


def sentence(result: Result) -> str:
    """What a finished run came to."""
    against = "" if result["paper"] is None else f" (paper: {result['paper']:g})"
    return (f"{result['metric']} {result['value']:.4g}{against} on the {result['split']} split after {result['steps']} "
            f"steps, {result['wall_s']:.1f} s.")


# ---------------------------------------------------------------------------------------------------- rows of a paper table


def table_rows(results: Sequence[Result], command: str) -> list[dict[str, Any]]:
    """Runs of the same recipe -> one row, in the order they first appear."""
    rows = []
    for recipe in dict.fromkeys(result["recipe"] for result in results):
        runs = sorted((result for result in results if result["recipe"] == recipe), key=lambda run: run["seed"])
        values = [run["value"] for run in runs]
        mean = statistics.fmean(values)
        first = runs[0]
        rows.append({
            "name": first["row"], "recipe": recipe, "paper": first["paper"], "mean": mean,
            "std": statistics.stdev(values) if len(values) > 1 else 0.0, "n": len(values),
            "seeds": [run["seed"] for run in runs], "values": values, "lower_is_better": first["metric"] == "loss",
            "gap": None if first["paper"] is None else mean - first["paper"],
            "table": first["table"], "training_bytes_per_weight": first.get("training_bytes_per_weight"),
            "orthogonalize": older.orthogonalizes(first.get("config")),
            **{key: first[key] for key in ("metric", "steps", "fp32_params", "quantized_params", "bits", "bits_total",
                                           "bytes_per_weight", "updates_estimated", "energy_estimate_j")},
            "updates_actual": statistics.fmean(run["updates_actual"] for run in runs),
            "wall_s": statistics.fmean(run["wall_s"] for run in runs),
            "commit": ", ".join(dict.fromkeys(run["commit"] for run in runs)),
            "device": ", ".join(dict.fromkeys(run["device"] for run in runs)),
            "torch": ", ".join(dict.fromkeys(run["torch"] for run in runs)),
            "command": command,
        })
    return rows


def _digits(row: Row) -> int:
    return 3 if row["metric"] == "loss" else 2


def _value(row: Row) -> str:
    digits = _digits(row)
    return f"{row['mean']:.{digits}f}" + (f" ± {row['std']:.{digits}f}" if row["n"] > 1 else "")


def _gap(row: Row) -> str:
    return "–" if row["gap"] is None else f"{row['gap']:+.{_digits(row)}f}"


# What a table's columns are called -> a row's cell in them.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "row": lambda row: row["name"],
    "paper": lambda row: "–" if row["paper"] is None else f"{row['paper']:g}",
    "ours": _value,
    "gap": _gap,
    "n": lambda row: str(row["n"]),
    "bytes a weight": lambda row: f"{row['bytes_per_weight']:g}",
    "bits": lambda row: short(row["bits_total"]),
    "updates (paper's formula)": lambda row: short(row["updates_estimated"]),
    "updates (counted)": lambda row: short(row["updates_actual"]),
    "energy (estimate)": lambda row: f"{row['energy_estimate_j']:.2f} J",
    "time": lambda row: f"{row['wall_s']:.0f} s",
}
BASELINE_COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row["name"].removesuffix(f" {row['bits']}bit"),
    "bits": lambda row: str(row["bits"]),
    "accuracy": _value,
    "n": COLUMNS["n"],
    "training bytes a weight": lambda row: f"{row['training_bytes_per_weight']:.3g}",
    "updates": COLUMNS["updates (counted)"],
    "time": COLUMNS["time"],
}


def or_dash(show: Callable[[Any], str], key: str) -> Callable[[Row], str]:
    """A cell of a number that may not be known."""
    return lambda row: "–" if row[key] is None else show(row[key])


LADDER_COLUMNS: dict[str, Callable[[Row], str]] = {
    "row": lambda row: row["name"],
    "bits a byte, test": lambda row: "–" if row["test_bits_a_byte"] is None else (
        f"{row['test_bits_a_byte']:.4f}" + (f" ± {row['test_std']:.4f}" if row["n"] > 1 else "")),
    "to AdamW": or_dash("{:+.4f}".format, "test_gap"),
    "val, nats": _value,
    "val at equal time": or_dash("{:.3f}".format, "loss_at_equal_time"),
    "n": COLUMNS["n"],
    "B a weight, training": lambda row: f"{row['training_bytes_per_weight']:.3g}",
    "without votes or gradients": lambda row: f"{row['state_bytes_per_weight']:.3g}",
    "peak GB": or_dash(lambda number: f"{number / 1e9:.2f}", "peak_bytes"),
    "ms a step": or_dash("{:.1f}".format, "step_ms"),
    "kJ": or_dash(lambda number: f"{number / 1e3:.1f}", "joules"),
    "flips a weight": or_dash("{:.2f}".format, "flips_a_weight"),
}


def _settings(row: Row) -> str:
    """Rates and decay of a row of convolutions."""
    floats = f"{row['dense_lr']:g}, {row['weight_decay']:g}"
    if row["integers_lr"] is not None:
        return f"{row['integers_lr']:g}; {floats}"
    if row["tuned_for"] == row["steps"]:
        return floats
    return f"{floats} (not tuned)" if row["tuned_for"] is None else f"{floats} (tuned for {row['tuned_for']} steps)"


CONVOLUTION_COLUMNS: dict[str, Callable[[Row], str]] = {
    "row": lambda row: row["name"],
    "test, %": lambda row: "–" if row["test"] is None else (
        f"{row['test']:.2f}" + (f" ± {row['test_std']:.2f}" if row["n"] > 1 else "")),
    "to the better float": or_dash("{:+.2f}".format, "test_gap"),
    "val, %": _value,
    "n": COLUMNS["n"],
    "steps": lambda row: str(row["steps"]),
    "lr; floats' lr, decay": _settings,
    "B a weight, training": lambda row: f"{row['training_bytes_per_weight']:.3g}",
    "without votes or gradients": lambda row: f"{row['state_bytes_per_weight']:.3g}",
    "ms a step": or_dash("{:.2f}".format, "step_ms"),
    "time": COLUMNS["time"],
}
NOTES = {
    "convolutions": "Test: of the network at its last step, read once; Imagenette has no test split, and val serves, on "
                    "which the floats' settings were chosen: that favours the floats. To the better float: to AdamW's or "
                    "SGD's row of the same network and epochs, whichever has more. Rows of floats have settings chosen on "
                    "val (tuned.json) unless they say otherwise, GFT's the library's defaults, and AdamW's row's for their "
                    "floats. B a weight: of the blocks, measured.",
    "wiki-ladder": "Settings are chosen on val (tuned.json), bits a byte are of the test split, read once. Val at equal "
                   "time: where AdamW's run of that size ended by the clock of its steps; a slower method is read off its "
                   "curve before its rates have fallen, so it is shown worse than a run planned for that time. Figures "
                   "leave out rows more than half a bit behind AdamW. B a weight: of the "
                   "blocks' matrices, measured; kJ: of all steps, by the device's own counter, gross, where runs had it to "
                   "themselves. Flips: levels that changed.",
    "baselines": "Training bytes a weight: weight, optimizer state and gradient or votes as held between backward and step, "
                 "measured; of the quantized layers, which are all but the first and the last, or of all layers in full "
                 "precision. Updates: levels that changed, and float weights (latent ones too) times steps. "
                 "Time: gft has kernels of its own, the other methods are plain torch.",
}


def columns_of(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    return {"baselines": BASELINE_COLUMNS, "wiki-ladder": LADDER_COLUMNS,
            "convolutions": CONVOLUTION_COLUMNS}.get(rows[0]["table"], COLUMNS)


# Without it a reader of a table would see a hundredfold of joules and not know why.
ORTHOGONALIZED = ("Energy is that of all optimizer steps by the paper's formula; where votes are orthogonalized ({rows}) "
                  "the matrix products of that are counted as well.")
SPREAD = ("Pooled over the rows a run deviates from its row's mean by {deviation} (standard deviation, {degrees} degrees of "
          "freedom): two or three seeds alone say little of it. Most further runs of a row should land within twice that.")
METRICS = {"accuracy": "Validation accuracy in %", "loss": "Validation loss in nats (lower is better)"}


def spread_note(rows: Sequence[Row]) -> str | None:
    """What a reader who runs a row once may expect. Other methods than ours differ too much to be pooled."""
    degrees = sum(row["n"] - 1 for row in rows)
    if not degrees or rows[0]["table"] in ("baselines", "wiki-ladder", "convolutions"):
        return None
    deviation = math.sqrt(sum((row["n"] - 1) * row["std"] ** 2 for row in rows) / degrees)
    return SPREAD.format(deviation=f"{deviation:.{_digits(rows[0])}f}", degrees=degrees)


def markdown(title: str, rows: Sequence[Row]) -> str:
    columns = columns_of(rows)
    lines = [f"# {title}", "", tables.table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])]
    seeds = sorted({seed for row in rows for seed in row["seeds"]})  # a row with n of them has the first n
    where = {key: ", ".join(dict.fromkeys(row[key] for row in rows)) for key in ("device", "torch", "command")}
    where["commit"] = ", ".join(dict.fromkeys(commit for row in rows for commit in row["commit"].split(", ")))
    gap = "; gap: ours minus the paper's" if "gap" in columns else ""
    some = [row["name"] for row in rows if row["orthogonalize"] and "energy (estimate)" in columns]
    notes = [spread_note(rows), NOTES.get(rows[0]["table"]), ORTHOGONALIZED.format(rows=", ".join(some)) if some else None]
    lines += ["", f"{METRICS[rows[0]['metric']]}, mean ± standard deviation over n seeds ({', '.join(map(str, seeds))})"
              f"{gap}.", "", *(line for note in notes if note for line in (note, "")),
              *(["Time is the wall time of one run, beside as many others as the command's --jobs says.", ""]
                if "time" in columns else []),
              f"Command: `{where['command']}` · commit {where['commit']} · {where['device']} · torch {where['torch']}", ""]
    return "\n".join(lines)


# What fits 80 characters: of the paper's tables, and of others.
NARROW = ("row", "paper", "ours", "gap", "n", "bits", "time")
NARROW_OTHERS = {"baselines": tuple(BASELINE_COLUMNS),
                 "wiki-ladder": ("row", "bits a byte, test", "to AdamW", "val, nats", "n"),
                 "convolutions": ("row", "test, %", "to the better float", "n", "time")}


def terminal_table(title: str, rows: Sequence[Row]) -> Table:
    """The columns that fit 80 characters; table.md has them all."""
    table = Table(title=title)
    columns = columns_of(rows)
    shown = {name: columns[name] for name in NARROW_OTHERS.get(rows[0]["table"], NARROW)}
    for place, name in enumerate(shown):
        table.add_column(name, justify="right" if place else "left")
    for row in rows:
        table.add_row(*(cell(row) for cell in shown.values()))
    return table


def bench_table(title: str, rows: Sequence[bench.Row], bars: bool = True) -> Table:
    """Ours beside a peer's, and whether the bar was met. No bars for tiny networks, which they were not set for."""
    table = Table(title=title)
    for name in ("case", "ours", "peer", "ratio", "bar") if bars else ("case", "ours", "peer", "ratio"):
        table.add_column(name, justify="left" if name in ("case", "bar") else "right")
    for row in rows:
        bar = [row.bar + (" ✓" if row.met else " ✗")] if bars else []
        table.add_row(row.case, f"{row.ours:.4g} {row.unit}", f"{row.peer:.4g} ({row.peer_is})", f"{row.ratio:.2f}", *bar)
    return table


# ---------------------------------------------------------------------------------------------------- curves


def validation_curve(run: Path) -> list[tuple[int, float]]:
    """(step, validation value) of a run folder's metrics."""
    file = run / "metrics.jsonl"
    lines = (checked(line, f"{file}, line {number}", {"step": "integer", "val": "number if any"})
             for number, line in enumerate(read_json_lines(file), 1))
    return [(line["step"], line["val"]) for line in lines if line.get("val") is not None]


def plot_curves(curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]], title: str, metric: str,
                files: Iterable[Path]) -> None:
    """Name -> the curves of its seeds; drawn as their mean with a band from the least to the largest."""
    import numpy as np

    plt = figures.pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    axes.set_prop_cycle(plt.cycler(linestyle=["-", ":"]) * plt.rcParams["axes.prop_cycle"])  # no two rows of a table alike
    for name, seeds in curves.items():
        steps = [step for step, _ in seeds[0]]
        alike = [seed for seed in seeds if [step for step, _ in seed] == steps]  # others were evaluated at other steps
        values = np.array([[value for _, value in seed] for seed in alike])
        (line,) = axes.plot(steps, values.mean(0), label=name, linewidth=1.6, marker="o", markersize=2.5)
        axes.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.18, linewidth=0)
    # The first quarter of a curve may be far off; the rest should fill the picture.
    settled = [value for seeds in curves.values() for seed in seeds for _, value in seed[len(seed) // 4 :]]
    if settled:
        margin = 0.08 * (max(settled) - min(settled)) or 0.1
        axes.set_ylim(max(min(settled) - margin, 0), max(settled) + margin)
    axes.set_title(textwrap.fill(title, 60), fontsize="medium")
    axes.set(xlabel="step", ylabel=METRICS[metric].lower())
    axes.grid(alpha=0.25)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")  # beside the curves: inside it would hide some
    figures.save(figure, files)
