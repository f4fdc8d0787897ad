"""Tables of the documentation, made from results/, or computed: no number in them is typed by hand.

A Markdown file marks where a table goes, and everything between the marks is written anew:

    <!-- table: mnist-dnn -->
    ...
    <!-- end -->

    gft pages            # rewrite README.md and five pages of docs; draw results/step.png
    gft pages --check    # change nothing; exit 1 if a file is out of date

`PAGES` says which names there are and which function writes each.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gft.errors import UsageError
from gft.files import write_text
from gft.lab.bench import written
from gft.lab.markdown import table
from gft.lab.recipe import IN_OLDER, Integers, dotted
from gft.lab.report import CONVOLUTION_COLUMNS, LADDER_COLUMNS
from gft.lab.traffic import traffic_table
from gft.lab.transfer import SIZES, place_of

Row = Mapping[str, Any]  # of a table.json: all runs of one recipe
ROOT = Path(__file__).resolve().parents[2]
FILES = ("README.md", "docs/results.md", "docs/benchmarks.md", "docs/kernels.md", "docs/scaling.md",
         "docs/paper.md")
REGION = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)

TABLES = {
    "shakespeare-gpt": "nanoGPT, Tiny Shakespeare",
    "mnist-vit": "ViT, MNIST",
    "imagenette-vit": "ViT, Imagenette",
    "mnist-dnn": "DNN, MNIST",
    "depth": "ternary DNN by depth, MNIST",
}
VARIANTS = {"": "with memory", "-packed": "packed", "-paper": "`gft.PAPER`"}
HARDEST = ("Hybrid-2 2bit", "Quantized 2bit")  # of a table, the row with the fewest bits in the most places
# How near to the paper's number one of ours says the same: in nats, in points of accuracy.
COMES_OUT = {"loss": 0.1, "accuracy": 2.0}
# What others published of the same network, for a reader who wonders about our full precision: nanoGPT's README, "best
# validation loss", 5000 steps of 64 × 256 characters.
PUBLISHED = {"shakespeare-gpt": ("nanoGPT's README", 1.4697)}


# ---------------------------------------------------------------------------------------------------- Markdown


def fill(text: str, results: Path) -> str:
    """The same Markdown with every marked region written anew from the results."""

    def region(found: re.Match[str]) -> str:
        if found["name"] not in PAGES:
            raise UsageError(f"no table {found['name']!r} can be written; choose one of {', '.join(PAGES)}")
        if "<!-- table:" in found["body"]:
            raise UsageError(f"the region of table {found['name']} has no end; write <!-- end --> below it")
        return f"{found[1]}{PAGES[found['name']](results)}\n{found[4]}"

    filled = REGION.sub(region, text)
    if text.count("<!-- table:") != len(REGION.findall(text)):
        raise UsageError("a region begins with '<!-- table: NAME -->' on a line of its own and ends with '<!-- end -->'")
    return filled


# ---------------------------------------------------------------------------------------------------- cells


def read_rows(results: Path, folder: str) -> dict[str, Row]:
    """Name -> row of a table.json; empty if there is none."""
    file = results / folder / "table.json"
    return {row["name"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]} if file.exists() else {}


def digits(row: Row) -> int:
    return 3 if row["metric"] == "loss" else 2


def value(row: Row) -> str:
    places = digits(row)
    return f"{row['mean']:.{places}f}" + (f" ± {row['std']:.{places}f}" if row["n"] > 1 else "")


def signed(number: float, places: int) -> str:
    return f"{number:+.{places}f}".replace("-", "−")


def better(row: Row, other: float) -> bool:
    """Is the row at least as good as that number?"""
    return row["mean"] <= other if row["lower_is_better"] else row["mean"] >= other


def spaced(name: str) -> str:
    """Hybrid-1 4bit -> Hybrid-1 4 bit."""
    return re.sub(r"(\d)bit\b", r"\1 bit", name)


def is_float(row: Row) -> bool:
    return row["bits"] == 32


def in_ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> 0 to 2, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def once(words: Iterable[str]) -> str:
    """"a, b", "b" -> "a, b"."""
    return ", ".join(dict.fromkeys(word for text in words for word in text.split(", ")))


def deviation(rows: Iterable[Row]) -> tuple[float, int]:
    """How far a run deviates from its row's mean, pooled over rows; and by how many degrees of freedom that is known."""
    rows = list(rows)
    degrees = sum(row["n"] - 1 for row in rows)
    return math.sqrt(sum((row["n"] - 1) * row["std"] ** 2 for row in rows) / max(degrees, 1)), degrees


# ---------------------------------------------------------------------------------------------------- tables


def headline(results: Path) -> str:
    """The README's: the hardest row of each network, two bits in every matrix of its body."""
    lines = []
    for name, title in TABLES.items():
        rows = {variant: read_rows(results, name + variant) for variant in VARIANTS}
        floats = next((row for row in rows[""].values() if is_float(row)), None)
        hardest = next((row for row in HARDEST if row in rows[""]), None)
        if floats is None or hardest is None:
            continue
        ours, packed = rows[""][hardest], rows["-packed"].get(hardest)
        unit = "nats" if ours["lower_is_better"] else "%"
        published = f" ({PUBLISHED[name][0]}: {PUBLISHED[name][1]})" if name in PUBLISHED else ""
        lines.append([f"{title}, {unit}", value(floats) + published, f"**{value(ours)}**", value(packed) if packed else "",
                      f"{floats['paper']:g} → {ours['paper']:g}"])
    header = ["2-bit weights", "AdamW, float", "gft, 1 B a weight", "gft packed, 0.25 B", "the paper: float → 2 bit"]
    return table(header, lines)


def summary(results: Path) -> str:
    """How many of the paper's rows each form of ours reaches, and how far its worst row is from our full precision."""
    lines = []
    for name, title in TABLES.items():
        floats, cells = None, []
        for variant in VARIANTS:
            rows = list(read_rows(results, name + variant).values())
            floats = next((row["mean"] for row in rows if is_float(row)), floats)
            rows = [row for row in rows if not is_float(row)]
            if not rows:
                cells.append("")
                continue
            reached = sum(better(row, row["paper"]) for row in rows)
            count = f"{reached} of {len(rows)}"
            worst = (max if rows[0]["lower_is_better"] else min)(row["mean"] for row in rows)
            behind = "" if floats is None else f", {signed(worst - floats, digits(rows[0]))}"
            cells.append((f"**{count}**" if reached == len(rows) else count) + behind)
        lines.append([title, *cells])
    return table(["", "with memory, 1 B a weight", "packed, 0.25 or 0.5 B", "`gft.PAPER`, packed"], lines)


def paper_table(results: Path, name: str) -> str:
    """A table of the paper beside ours, then where each of our columns comes from. Bold: at the paper's number or better."""
    rows = {variant: found for variant in VARIANTS if (found := read_rows(results, name + variant))}
    floats = next((row for row in rows[""].values() if is_float(row)), None)
    header = ["row", "paper"] + [cell for variant in rows for cell in (VARIANTS[variant], "gap")]
    if floats:
        header.insert(2, "to its float")
        header.insert(header.index("gap") + 1, "to our float")
    lines = []
    for row_name, first in rows[""].items():
        line = [spaced(row_name) + (" (AdamW)" if is_float(first) else ""), f"{first['paper']:g}"]
        if floats:
            line.append("" if is_float(first) else signed(first["paper"] - floats["paper"], 2 if digits(first) == 3 else 1))
        for variant, found in rows.items():
            row = found.get(row_name)
            if row is None:
                line += ["", ""]
                continue
            shown = f"**{value(row)}**" if better(row, row["paper"]) and not is_float(row) else value(row)
            line += [shown, signed(row["gap"], digits(row))]
            if floats and not variant:
                line.append("" if is_float(row) else signed(row["mean"] - floats["mean"], digits(row)))
        lines.append(line)
    return table(header, lines) + "\n\n" + provenance({VARIANTS[variant]: found for variant, found in rows.items()})


def paper_rows(results: Path) -> str:
    """Every quantized row of the paper beside what its own rule gives in our hands, and whether the number comes out."""
    lines = []
    for name, title in TABLES.items():
        for row in read_rows(results, name + "-paper").values():
            if is_float(row):
                continue
            near = abs(row["gap"]) <= COMES_OUT[row["metric"]]
            verdict = "comes out" if near else "better" if better(row, row["paper"]) else "**behind**"
            lines.append([title, spaced(row["name"]), f"{row['paper']:g}", value(row), signed(row["gap"], digits(row)),
                          verdict])
    return table(["network", "row", "paper", "ours by its rule", "gap", ""], lines)


def provenance(columns: Mapping[str, Mapping[str, Row]]) -> str:
    """Of each column: n, seeds, the spread of its runs, commits, machine, command."""
    lines = []
    for name, rows in columns.items():
        spread, degrees = deviation(rows.values())
        first = next(iter(rows.values()))
        lines.append([name, with_exceptions({row_name: str(row["n"]) for row_name, row in rows.items()}),
                      in_ranges(seed for row in rows.values() for seed in row["seeds"]),
                      f"{spread:.{digits(first)}f} ({degrees})" if degrees else "unknown",
                      with_exceptions({row_name: row["commit"] for row_name, row in rows.items()}),
                      once(row["device"] for row in rows.values()), once(row["torch"] for row in rows.values()),
                      f"`{first['command']}`"])
    return table(["column", "n", "seeds", "a run deviates by", "commit", "machine", "torch", "command"], lines)


def with_exceptions(values: Mapping[str, str]) -> str:
    """What most rows have, then what others have and which they are: "3; 5 (Hybrid-2 3 bit)"."""
    rows_with: dict[str, list[str]] = {}
    for row, text in values.items():
        rows_with.setdefault(text, []).append(spaced(row))
    usual = max(rows_with, key=lambda text: len(rows_with[text]))
    return "; ".join([usual, *(f"{text} ({', '.join(rows)})" for text, rows in rows_with.items() if text != usual)])


def baselines(results: Path) -> str:
    """Other ways to train the same layers in the same loop: a line a method, a column a number of bits."""
    rows = read_rows(results, "baselines")
    methods: dict[str, dict[int, Row]] = {}
    for row in rows.values():
        methods.setdefault(row["name"].removesuffix(f" {row['bits']}bit"), {})[row["bits"]] = row
    lines = []
    for method, by_bits in methods.items():
        bytes_a_weight = dict.fromkeys(f"{row['training_bytes_per_weight']:.3g}" for row in by_bits.values())
        cells = [value(by_bits[bits]) if bits in by_bits else "" for bits in (32, 4, 3, 2)]
        lines.append([method, ", ".join(bytes_a_weight), *cells])
    about = [f"n = {once(str(row['n']) for row in rows.values())}",
             f"seeds {in_ranges(seed for row in rows.values() for seed in row['seeds'])}",
             f"commit {once(row['commit'] for row in rows.values())}", once(row["device"] for row in rows.values()),
             f"torch {once(row['torch'] for row in rows.values())}", f"`{next(iter(rows.values()))['command']}`"]
    return (table(["method", "bytes a weight in training", "float", "4 bit", "3 bit", "2 bit"], lines)
            + "\n\n" + ", ".join(about) + ".")


def energy(results: Path) -> str:
    """Joules of whole trainings by the GPU's own counter."""
    report = json.loads((results / "energy-dnn" / "measured.json").read_text(encoding="utf-8"))
    base = report["rows"][0]

    def milli(pair: Sequence[float]) -> str:
        return f"{1e3 * pair[0]:.0f} ± {1e3 * pair[1]:.0f}"

    lines = []
    for row in report["rows"]:
        shares = [f"{row[kind][0] / base[kind][0]:.2f}" for kind in ("gross_j_per_step", "net_j_per_step")]
        lines.append([spaced(row["row"]), f"{row['value'][0]:.2f} ± {row['value'][1]:.2f}", milli(row["gross_j_per_step"]),
                      milli(row["net_j_per_step"]), "" if row is base else " / ".join(shares)])
    about, n = report["about"], report["repeats"]
    command = f"{about['command'].partition(' --repeats')[0]} --full --repeats {n}"
    return (table(["", "accuracy, %", "mJ a step", "mJ a step without idle power", "of AdamW's, with / without idle"], lines)
            + f"\n\nn = {n}, seeds 0 to {n - 1}, commit {about['commit']}, {about['device']}, torch {about['torch']}:\n"
            f"`{command}`.")


def read_csv(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def about_rows(rows: Sequence[Mapping[str, str]], n: str) -> str:
    """Where the rows of a CSV file come from."""
    said = {key: once(row[key] for row in rows) for key in ("commit", "device", "torch")}
    return f"{n}, commit {said['commit']}, {said['device']}, torch {said['torch']}"


def finetune(results: Path) -> str:
    """A trained float network to few bits: accuracy right after each start and after fine-tuning, then by rate."""
    rows = read_csv(results / "finetune.csv")
    names = {"keep": "nearest", "fit": "fitted", "gptq": "`gft.GPTQ`"}
    kinds: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        scales = {"tensor": "one scale", "row": "a scale a row"}.get(row["scales"], f"a scale for {row['scales']}")
        kinds.setdefault((f"{names[row['init']]}, {scales}", row["method"], row["lr"]), {})[row["bits"]] = row
    bits = sorted({row["bits"] for row in rows}, reverse=True)
    lines = []
    for (start, method, lr), found in sorted(kinds.items(), key=lambda kind: (kind[0][1], float(kind[0][2]))):
        cells = [f"{float(found[one]['at_start']):.1f} → {float(found[one]['tuned']):.1f}" if one in found else ""
                 for one in bits]
        lines.append([start, method.upper(), f"{float(lr):g}", *cells])
    plan = json.loads(rows[0]["plan"])
    whole = once(row["float"] for row in rows)
    return (table(["start", "trained by", "lr", *(f"{one} bit" for one in bits)], lines)
            + f"\n\nFloat: {whole} % after {plan['float_steps']} steps. Then {plan['steps']} steps of {plan['batch']}; "
            + about_rows(rows, f"n = 1, seed {plan['seed']}") + f": `{re.sub(' --bits .', '', rows[0]['command'])}`.")


def scales(results: Path) -> str:
    """One scale a tensor, a row or a group, from scratch."""
    rows = read_csv(results / "scales.csv")
    kinds: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        kinds.setdefault((row["recipe"], row["scales"]), []).append(row)
    lines = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        for (name, kind), found in kinds.items():
            if name == recipe:
                losses = [float(row["loss"]) for row in found]
                mean, each = sum(losses) / len(losses), " / ".join(f"{loss:.3f}" for loss in losses)
                lines.append([recipe, kind, f"{float(found[0]['bytes_a_weight']):.4g}", f"{mean:.3f}", each])
    seeds = in_ranges(int(row["seed"]) for row in rows)
    return (table(["recipe", "`scales`", "bytes a weight", "validation loss, nats", "by seed"], lines) + "\n\n"
            + about_rows(rows, f"seeds {seeds}") + f": `{rows[0]['command']}` and so on.")


def wiki_ladder(results: Path) -> str:
    """The ladder: a line a row, with AdamW's first in each size; the figures, memory against loss first."""
    file = results / "wiki-ladder" / "table.json"
    if not file.exists():
        return "Not run yet: `gft tune`, then `gft reproduce wiki-ladder`, write it."
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    pictures = [f"![{what}](../results/wiki-ladder/{name}.png)" for name, what in (
        ("memory", "bits a byte against bytes a weight"), ("curves", "bits a byte against tokens"),
        ("gap", "gap to AdamW against size")) if (file.parent / f"{name}.png").exists()]
    lines = [[spaced(cell(row)) for cell in LADDER_COLUMNS.values()] for row in rows]
    return "\n\n".join([*pictures, table(list(LADDER_COLUMNS), lines), about_table(rows)])


def about_table(rows: Sequence[Row]) -> str:
    """Where the rows of a table come from."""
    return ", ".join([f"n = {once(str(row['n']) for row in rows)}",
                      f"commit {once(row['commit'] for row in rows)}", once(row["device"] for row in rows),
                      f"torch {once(row['torch'] for row in rows)}", f"`{rows[0]['command']}`"]) + "."


def convolutions(results: Path) -> str:
    """Convolutions beside tuned floats: a line a row, then the curves."""
    file = results / "convolutions" / "table.json"
    if not file.exists():
        return "Not run yet: `gft tune convolutions`, then `gft reproduce convolutions`, write it."
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    lines = [[spaced(cell(row)) for cell in CONVOLUTION_COLUMNS.values()] for row in rows]
    picture = ["![accuracy on val against steps](../results/convolutions/curves.png)"]
    drawn = picture if (file.parent / "curves.png").exists() else []
    return "\n\n".join([table(list(CONVOLUTION_COLUMNS), lines), about_table(rows), *drawn])


def transfer(results: Path) -> str:
    """One lr for networks of all sizes and trainings of all lengths: loss on val by rate, and how far the default's is from
    the best."""
    file = results / "transfer" / "tuning" / "runs.jsonl"
    if not file.exists():
        return "Not run yet: `gft tune transfer` writes it."
    runs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    losses: dict[tuple[Any, ...], dict[float, float]] = {}
    for run in runs:
        size, row = place_of(run["recipe"].partition("@")[0])
        config = run["config"]
        warms_up = (IN_OLDER | dotted(config))["integers.own_warmup"] != 0
        kind = (row, not warms_up, SIZES.index(size), config["data"]["batch"], config["data"]["context"],
                config["schedule"]["steps"])
        losses.setdefault(kind, {})[config["integers"]["lr"]] = run["value"]
    rates = sorted({rate for by_rate in losses.values() for rate in by_rate})
    lines = []
    for (row, without, size, batch, context, steps), by_rate in sorted(losses.items()):
        best = min(by_rate.values())
        shown = {rate: f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for rate, loss in by_rate.items()}
        behind = f"{by_rate[Integers.lr] / best - 1:.1%}" if Integers.lr in by_rate and len(by_rate) > 1 else ""
        integers = spaced(row.removeprefix("gft-")).replace("-", ", ") + (", `warmup=0`" if without else "")
        lines.append([integers, SIZES[size].replace("x", "×"), f"{batch} × {context}", str(steps),
                      *(shown.get(rate, "") for rate in rates), behind])
    header = ["integers", "width × depth", "tokens a step", "steps", *(f"lr {rate:g}" for rate in rates),
              f"lr {Integers.lr:g} behind the best"]
    return (table(header, lines)
            + f"\n\nn = 1, seed {once(str(run['seed']) for run in runs)}, "
            + ", ".join(f"{name} {once(str(run[key]) for run in runs)}".strip() for key, name in (
                ("commit", "commit"), ("device", ""), ("torch", "torch")))
            + f": `gft tune transfer --set context={once(str(run['config']['data']['context']) for run in runs)} "
            + f"--set precision={once(run['config']['model']['precision'] for run in runs)}`, and `--try` for batch, steps, "
            + "lr and own_warmup.")


PAGES: dict[str, Callable[[Path], str]] = {
    "wiki-ladder": wiki_ladder,
    "convolutions": convolutions,
    "transfer": transfer,
    "headline": headline,
    "summary": summary,
    **{name: lambda results, name=name: paper_table(results, name) for name in TABLES},
    "paper-rows": paper_rows,
    "baselines": baselines,
    "energy": energy,
    "finetune": finetune,
    "scales": scales,
    "steps": lambda results: written.steps_table(read_csv(results / "bench.csv")),
    "bench": lambda results: written.other_table(read_csv(results / "bench.csv")),
    "traffic": lambda results: traffic_table(),
}


def update(results: Path = ROOT / "results", check: bool = False) -> Iterator[tuple[Path, bool]]:
    """Write the tables of every page of a checkout anew, and the picture of steps where a page was out of date or it is
    missing; with `check` only look. Yields each page and whether it was out of date."""
    if not results.is_dir():
        raise UsageError(f"no results at {results}; run this command from a checkout of gft")
    pictures = [results / name for name in written.PICTURES]
    draws = not all(picture.exists() for picture in pictures)
    for file in (results.parent / name for name in FILES):
        text = file.read_text(encoding="utf-8")
        filled = fill(text, results)
        if filled != text and not check:
            write_text(file, filled)
            draws = True
        yield file, filled != text
    if draws and not check:  # never compared: another matplotlib draws other bytes
        written.draw(read_csv(results / "bench.csv"), pictures)
