"""What the runs of convolutions came to: accuracy on test, and its gap to the better of the two rows of floats."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gft.lab import figures
from gft.lab.convolutions import FLOATS, SIZES, chosen_in, place_of, tuned_for

Row = Mapping[str, Any]
Line = Mapping[str, Any]
AVERAGED = ("state_bytes_per_weight", "step_ms", "joules", "peak_bytes")


def convolution_rows(rows: Sequence[Row], lines: Sequence[Line], out: Path) -> list[dict[str, Any]]:
    """The rows of a table with its own columns; out: the table's folder, whose tuned.json says what was chosen."""
    chosen = chosen_in(out)
    runs = {row["recipe"]: [line for line in lines if line["recipe"] == row["recipe"]] for row in rows}
    test = {name: [line["test"] for line in some if line.get("test") is not None] for name, some in runs.items()}
    made = []
    for row in rows:
        some, values = runs[row["recipe"]], test[row["recipe"]]
        size, kind = place_of(row["recipe"])
        floats = [test.get(f"conv-{size}-{name}") for name in FLOATS]
        best = max((statistics.fmean(one) for one in floats if one), default=None)
        config = some[0]["config"]
        timed = [line for line in some if line.get("alone")]  # the clock of several at once says nothing
        measured = {key: [line[key] for line in (timed if key == "step_ms" else some) if line.get(key) is not None]
                    for key in AVERAGED}
        made.append({
            **row, "size": size, "kind": kind, "dense_lr": config["dense"]["lr"],
            "weight_decay": config["dense"]["weight_decay"],
            "integers_lr": None if kind in FLOATS else config["integers"]["lr"],
            "tuned_for": tuned_for(config, size, kind, chosen) if kind in FLOATS else None,
            "test": statistics.fmean(values) if values else None,
            "test_std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "test_gap": None if best is None or not values else statistics.fmean(values) - best,
            **{key: statistics.fmean(found) if found else None for key, found in measured.items()},
        })
    return made


def draw(rows: Sequence[Row], lines: Sequence[Line], out: Path) -> None:
    """Accuracy on val against epochs' steps, a panel for each network and number of epochs."""
    present = [size for size in SIZES if any(row["size"] == size for row in rows)]
    across = min(3, len(present))
    down = -(-len(present) // across)
    plt = figures.pyplot()
    figure, axes = plt.subplots(down, across, figsize=(1.5 + 3.4 * across, 3.2 * down), squeeze=False, layout="constrained")
    places = [one for line in axes for one in line]
    for one in places[len(present) :]:
        one.set_visible(False)
    for size, panel in zip(present, places, strict=False):
        settled = []
        for row in (row for row in rows if row["size"] == size):
            curves = [line["curve"] for line in lines if line["recipe"] == row["recipe"] and line.get("curve")]
            alike = [curve for curve in curves if [point[0] for point in curve] == [point[0] for point in curves[0]]]
            if not alike:
                continue
            values = [[point[1] for point in curve] for curve in alike]
            middle = [statistics.fmean(column) for column in zip(*values, strict=True)]
            panel.plot([point[0] for point in alike[0]], middle, label=row["name"].rpartition(", ")[2], linewidth=1.4)
            settled += middle[len(middle) // 3 :]
        if settled:  # the first third of a curve may be far off; the rest should fill the picture
            margin = 0.08 * (max(settled) - min(settled)) or 0.1
            panel.set_ylim(min(settled) - margin, max(settled) + margin)
        panel.set(title=next(row["name"] for row in rows if row["size"] == size).rpartition(", ")[0], xlabel="step",
                  ylabel="accuracy on val, %")
        panel.grid(alpha=0.25)
        panel.legend(frameon=False, fontsize=7, loc="lower right")
    figures.save(figure, [out / "curves.png", out / "curves.svg"])
