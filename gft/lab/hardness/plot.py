"""The study's picture: success on top, time below, a column a family of formulas."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gft.lab import figures

# Okabe and Ito's colours, which colour-blind readers can tell apart, and a marker each for those who print in grey.
LOOKS = {"cp-sat": ("#000000", "s"), "local-search": ("#009E73", "^"), "gft": ("#D55E00", "o"),
         "perceptron": ("#0072B2", "v"), "guessing": ("#999999", "x")}


def plot_study(rows: Sequence[Mapping[str, Any]], seconds: float, files: Sequence[Path]) -> None:
    """Solved problems in % and median CPU seconds against the number of variables, a curve a solver."""
    plt = figures.pyplot()
    every_size = sorted({row["size"] for row in rows})
    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, axes = plt.subplots(2, len(families), figsize=(1.2 + 3.3 * len(families), 5.6), sharex=True, sharey="row",
                                squeeze=False, layout="constrained")
    for column, family in enumerate(families):
        above, below = axes[0, column], axes[1, column]
        for solver, (colour, marker) in LOOKS.items():
            own = [row for row in rows if (row["family"], row["solver"]) == (family, solver)]  # by rising size
            if not own:
                continue
            sizes = [row["size"] for row in own]
            look = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.5, "label": solver}
            above.plot(sizes, [100 * row["solved"] / row["n"] for row in own], **look)
            below.plot(sizes, [max(row["median_seconds"], 1e-4) for row in own], **look)
        kind, ratio = family.split(":")
        above.set(title=f"{kind}, {ratio} clauses a variable", ylim=(-4, 104))
        below.set(xlabel="variables", yscale="log")
        below.axhline(seconds, color="#cccccc", linewidth=1, zorder=0)
        for one in (above, below):
            one.set_xscale("log")
            one.set_xticks(every_size, [str(size) for size in every_size], rotation=60, fontsize=8)
            one.minorticks_off()
            one.grid(alpha=0.25)
    axes[0, 0].set_ylabel("solved, %")
    axes[1, 0].set_ylabel("median CPU seconds")
    lines = {line.get_label(): line for one in axes[0] for line in one.get_lines()}
    figure.legend(handles=[lines[solver] for solver in LOOKS if solver in lines], loc="outside lower center",
                  ncols=len(LOOKS), frameon=False, fontsize=9)
    figures.save(figure, files)
