"""The ladder's table and figures.

    curves.png     bits a byte on val against tokens, a panel a size, bands from the least to the largest seed
    gap.png        bits a byte on test beyond AdamW's, against weights
    memory.png     bits a byte on test against bytes a weight in training, and which rows no other beats in both

At equal time: the val loss where AdamW's run of that size ended, by the clock of the steps alone. A slower method is read
off its curve before its rates have fallen to 0, so a run planned for that time would do better; a faster one has its final
loss. Times of runs that had others beside them say nothing, and are left out.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gft.lab import figures
from gft.lab.ladder import SIZES, body_weights, place_of

Row = Mapping[str, Any]
Line = Mapping[str, Any]
MARKERS = {"-": "o", "--": "s", ":": "^"}  # by the line that a row has
FAR = 0.5  # bits a byte behind AdamW, beyond which a row is left out of the figures: the others would lie on each other


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def at_step(curve: Sequence[Sequence[float]], step: float) -> float:
    """A curve's value between two of its points, or at the nearer end."""
    before = [point for point in curve if point[0] <= step]
    after = [point for point in curve if point[0] > step]
    if not before or not after:
        return (before[-1] if before else after[0])[1]
    (left, low), (right, high) = before[-1], after[0]
    return low + (high - low) * (step - left) / (right - left)


def ladder_rows(rows: Sequence[Row], lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The rows of a table with the ladder's own columns."""
    runs = {row["recipe"]: [line for line in lines if line["recipe"] == row["recipe"]] for row in rows}
    made = []
    for row in rows:
        some = runs[row["recipe"]]
        size, kind = place_of(row["recipe"])
        bits = [line["test_bits_a_byte"] for line in some if line.get("test_bits_a_byte") is not None]
        adamw = runs.get(f"{row['recipe'].removesuffix(kind)}adamw", [])
        flips = mean([line.get("flips") for line in some])
        of_adamw = mean([line.get("test_bits_a_byte") for line in adamw])
        made.append({
            **row, "size": size, "kind": kind, "weights": body_weights(some[0]["config"]["model"]),
            "test_bits_a_byte": mean(bits), "test_std": statistics.stdev(bits) if len(bits) > 1 else 0.0,
            "test_gap": statistics.fmean(bits) - of_adamw if bits and of_adamw is not None else None,
            "bits_a_byte": mean([line.get("bits_a_byte") for line in some]),
            "loss_at_equal_time": at_equal_time(alone(some), alone(adamw)),
            "step_ms": mean([line.get("step_ms") for line in alone(some)]), "tokens": some[0].get("tokens"),
            "flips_a_weight": None if flips is None else flips / row["quantized_params"],
            **{key: mean([line.get(key) for line in some]) for key in (
                "state_bytes_per_weight", "train_s", "joules", "peak_bytes")},
        })
    return made


def alone(some: Sequence[Line]) -> list[Line]:
    """The runs that had the machine to themselves."""
    return [line for line in some if line.get("alone")]


def at_equal_time(some: Sequence[Line], adamw: Sequence[Line]) -> float | None:
    """The mean val loss of runs when the steps have taken as long as all of AdamW's."""
    budget = mean([line["step_ms"] * line["steps"] for line in adamw if line.get("step_ms")])
    timed = [line for line in some if line.get("step_ms") and line.get("curve")]
    if budget is None or not timed:
        return None
    return mean([at_step(line["curve"], budget / line["step_ms"]) for line in timed])


# ---------------------------------------------------------------------------------------------------- figures


def draw(rows: Sequence[Row], lines: Sequence[Line], out: Path) -> None:
    rows = [row for row in rows if (row["test_gap"] or 0) < FAR]
    present = [size for size in SIZES if any(row["size"] == size for row in rows)]
    draw_curves(rows, lines, present, _files(out, "curves"))
    draw_gap(rows, _files(out, "gap"))
    draw_memory(rows, present, _files(out, "memory"))


def _files(out: Path, name: str) -> list[Path]:
    return [out / f"{name}.png", out / f"{name}.svg"]


def _looks(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """A colour and a line for each kind of row, the same in all figures: with momentum dashed, in the colour of without."""
    colours = figures.pyplot().rcParams["axes.prop_cycle"].by_key()["color"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    places = {kind: place for place, kind in enumerate(dict.fromkeys(map(_without_momentum, kinds)))}
    looks = {}
    for kind in kinds:
        place = places[_without_momentum(kind)]
        line = "--" if kind != _without_momentum(kind) else "-" if place < len(colours) else ":"
        looks[kind] = {"color": colours[place % len(colours)], "linestyle": line}
    return looks


def _without_momentum(kind: str) -> str:
    return kind.removesuffix("-momentum")


def _title(row: Row) -> str:
    return row["name"].partition(", ")[2]


def _panels(count: int) -> tuple[Any, list[Any]]:
    figure, axes = figures.pyplot().subplots(1, max(count, 1), figsize=(3.0 + 3.2 * max(count, 1), 4.2), squeeze=False,
                                             layout="constrained")
    return figure, list(axes[0])


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    shown = {label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    if shown:
        figure.legend(shown.values(), shown.keys(), frameon=False, fontsize=7, loc="outside right upper")


def draw_curves(rows: Sequence[Row], lines: Sequence[Line], present: Sequence[str], files: Sequence[Path]) -> None:
    looks = _looks(rows)
    figure, panels = _panels(len(present))
    for size, axes in zip(present, panels, strict=False):
        settled = []
        for row in (row for row in rows if row["size"] == size):
            runs = [line for line in lines if line["recipe"] == row["recipe"] and line.get("curve")]
            if not runs:
                continue
            steps = [point[0] for point in runs[0]["curve"]]
            tokens = (row["tokens"] or row["steps"]) / row["steps"] / 1e6
            in_bits = (row["bits_a_byte"] or row["mean"]) / row["mean"]
            values = [[at_step(line["curve"], step) * in_bits for step in steps] for line in runs]
            middle = [statistics.fmean(column) for column in zip(*values, strict=True)]
            millions = [step * tokens for step in steps]
            axes.plot(millions, middle, label=_title(row), linewidth=1.4, **looks[row["kind"]])
            axes.fill_between(millions, [min(column) for column in zip(*values, strict=True)],
                              [max(column) for column in zip(*values, strict=True)], alpha=0.18, linewidth=0,
                              color=looks[row["kind"]]["color"])
            settled += middle[len(middle) // 4 :]
        if settled:  # the first quarter of a curve may be far off; the rest should fill the picture
            margin = 0.06 * (max(settled) - min(settled)) or 0.1
            axes.set_ylim(min(settled) - margin, max(settled) + margin)
        axes.set(title=size.upper(), xlabel="tokens, millions", ylabel="bits a byte, val" if axes is panels[0] else "")
        axes.grid(alpha=0.25)
    _legend(figure, panels)
    figures.save(figure, files)


def draw_gap(rows: Sequence[Row], files: Sequence[Path]) -> None:
    looks = _looks(rows)
    figure, (axes,) = _panels(1)
    for kind in looks:
        some = [row for row in rows if row["kind"] == kind and row["test_gap"] is not None]
        if some:
            axes.errorbar([row["weights"] for row in some], [row["test_gap"] for row in some],
                          [row["test_std"] for row in some], label=_title(some[0]), markersize=3, capsize=2, linewidth=1.4,
                          marker=MARKERS[looks[kind]["linestyle"]], **looks[kind])
    axes.set(xscale="log", xlabel="weights in the blocks", ylabel="bits a byte on test beyond AdamW's")
    axes.grid(alpha=0.25)
    _legend(figure, [axes])
    figures.save(figure, files)


def unbeaten(rows: Sequence[Row]) -> list[Row]:
    """Rows than which no other has both fewer bytes a weight and fewer bits a byte, from the least bytes on."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["training_bytes_per_weight"], row["test_bits_a_byte"])):
        if not kept or row["test_bits_a_byte"] < kept[-1]["test_bits_a_byte"]:
            kept.append(row)
    return kept


def draw_memory(rows: Sequence[Row], present: Sequence[str], files: Sequence[Path]) -> None:
    """Filled: with gradients or votes; hollow: what is kept between steps."""
    looks = _looks(rows)
    figure, panels = _panels(len(present))
    for size, axes in zip(present, panels, strict=False):
        some = [row for row in rows if row["size"] == size and row["test_bits_a_byte"] is not None]
        for row in some:
            colour, value = looks[row["kind"]]["color"], row["test_bits_a_byte"]
            marker = MARKERS[looks[row["kind"]]["linestyle"]]
            axes.scatter([row["training_bytes_per_weight"]], [value], color=colour, marker=marker, s=26, label=_title(row))
            axes.scatter([row["state_bytes_per_weight"]], [value], facecolors="none", edgecolors=colour, marker=marker, s=26)
        front = unbeaten(some)
        axes.plot([row["training_bytes_per_weight"] for row in front], [row["test_bits_a_byte"] for row in front],
                  color="0.6", linewidth=1, zorder=0)
        axes.set(title=size.upper(), xscale="log", xlabel="bytes a weight in training",
                 ylabel="bits a byte, test" if axes is panels[0] else "")
        axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    for label, face in (("with gradients or votes", "0.6"), ("between steps", "none")):
        panels[0].scatter([], [], facecolors=face, edgecolors="0.6", s=26, label=label)
    _legend(figure, panels)
    figures.save(figure, files)
