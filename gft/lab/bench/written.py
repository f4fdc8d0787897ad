"""What the rows of bench.csv say, for the documentation: tables and a picture of the newest row of each case."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gft.lab import figures
from gft.lab.bench.side import WAYS
from gft.lab.markdown import table

Kept = Mapping[str, str]  # a line of bench.csv
PICTURES = ("step.png", "step.svg")
COLOURS = {"eager": "#0072B2", "compiled": "#E69F00", "captured": "#D55E00"}


def newest(rows: Iterable[Kept]) -> list[Kept]:
    """The last row of each benchmark, case, peer and kind of machine, in the order in which these came first."""
    last: dict[tuple[str, ...], Kept] = {}
    for row in rows:
        # "loss, last quarter of 20 steps, 0.0105 moves a weight": what was counted on the way is no part of a case's name.
        case = re.sub(r", [\d.]+ moves a weight$", "", row["case"])
        # How many threads a CPU had is none of it either. Rows once had "compiled, replayed" for captured steps.
        machine = row["device"].split(",")[0]
        peer_is = row["peer_is"].replace("compiled, replayed", "captured")
        if row["bench"] == "step" and way_of(peer_is) is None:
            peer_is += ", eager"
        last[row["bench"], case, peer_is, machine] = {**row, "case": case, "peer_is": peer_is}
    return list(last.values())


def way_of(peer_is: str) -> str | None:
    return next((way for way in WAYS if peer_is.endswith(f", {way}")), None)


def on_cpu(row: Kept) -> bool:
    return row["device"].startswith("cpu")


def cell(row: Kept) -> str:
    """1.17 (9.61 / 8.22 ms; at most 1), the ratio bold where the bar was missed."""
    ratio = f"{float(row['ratio']):.2f}"
    return (f"{ratio if row['met'] == 'True' else f'**{ratio}**'} ({float(row['ours']):.4g} / {float(row['peer']):.4g} "
            f"{row['unit']}; {row['bar']})")


def steps_table(rows: Sequence[Kept]) -> str:
    """A line a case, a column a way of running both sides."""
    cases: dict[tuple[str, str, str], dict[str, Kept]] = {}
    for row in sorted((row for row in newest(rows) if row["bench"] == "step"), key=on_cpu):
        precision = row["peer_is"].split(",")[0].removeprefix("fused AdamW ")
        cases.setdefault((row["case"], precision, row["device"]), {})[way_of(row["peer_is"]) or ""] = row
    lines = [[case, precision, *(cell(ways[way]) if way in ways else "" for way in WAYS),
              ", ".join(dict.fromkeys(row["commit"] for row in ways.values())), device]
             for (case, precision, device), ways in cases.items()]
    return table(["case", "AdamW in", *WAYS, "commit", "machine"], lines)


def other_table(rows: Sequence[Kept]) -> str:
    """All benchmarks but step."""
    lines = [[row["bench"], row["case"], f"{float(row['ours']):.4g} {row['unit']}", f"{float(row['peer']):.4g}",
              row["peer_is"], f"{float(row['ratio']):.2f}", row["bar"] + ("" if row["met"] == "True" else ": **missed**"),
              row["commit"], row["device"]]
             for row in newest(rows) if row["bench"] != "step"]
    order = {name: place for place, name in enumerate(dict.fromkeys(row["bench"] for row in rows))}
    lines.sort(key=lambda line: order[line[0]])
    return table(["benchmark", "case", "ours", "peer", "the peer is", "ratio", "bar", "commit", "machine"], lines)


def draw(rows: Sequence[Kept], files: Sequence[Path]) -> None:
    """The time of a step over AdamW's: a line a case, a point a way of running it, a stroke where its bar is. AdamW in bf16
    on a GPU, in float32 on a CPU."""
    shown = [row for row in newest(rows) if row["bench"] == "step" and row["unit"] == "ms"
             and (on_cpu(row) or row["peer_is"].startswith("fused AdamW bf16,"))]
    shown.sort(key=on_cpu)
    labels = list(dict.fromkeys(map(label, shown)))
    plt = figures.pyplot()
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.3 * len(labels)), layout="constrained")
    axes.axvline(1, color="#999999", linewidth=1)
    for offset, way in zip((-0.2, 0.0, 0.2), WAYS, strict=True):
        of_way = [row for row in shown if way_of(row["peer_is"]) == way]
        heights = [labels.index(label(row)) + offset for row in of_way]
        axes.scatter([float(row["ratio"]) for row in of_way], heights, color=COLOURS[way], s=22, zorder=3, label=way)
        bars = [float(row["bar"].removeprefix("at most ")) for row in of_way]
        axes.scatter(bars, heights, color=COLOURS[way], marker="|", s=60, zorder=2)
    axes.set(yticks=range(len(labels)), yticklabels=labels, xlabel="time of a step over fused AdamW's, run the same way "
             "(strokes: the bars)")
    if any(float(row["ratio"]) > 3 for row in shown):
        axes.set_xscale("log")
        axes.set_xticks([0.7, 1, 1.5, 2, 3, 5, 10], ["0.7", "1", "1.5", "2", "3", "5", "10"], minor=False)
        axes.minorticks_off()
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
    axes.tick_params(axis="y", labelsize=8)
    axes.legend(frameon=False, fontsize=8, loc="best")
    figures.save(figure, files)


def label(row: Kept) -> str:
    return row["case"] + (f", {row['device'].split(',')[0]})" if on_cpu(row) else "")
