"""The README's Python runs as it stands, and leaves integers behind; its tables say what results/ says, and results/ is of
the recipes as they are."""

import re
from pathlib import Path

import pytest

import gft
from gft.lab import runs, tables

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def test_readme_snippets_run_and_train():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 3  # the last is for torchrun: test_distributed.py
    names: dict = {}
    exec(blocks[0], names)
    assert float(names["loss"].detach()) < 1.0  # it starts near log(5) = 1.6
    levels = names["model"][1].mlp[0].levels()
    assert set(levels.unique().tolist()) <= set(range(-7, 8))
    names["model"] = gft.dequantize_(names["model"])
    exec(blocks[1], names)
    assert names["optimizer"].param_groups[0]["lr"] == 0.75


# ---------------------------------------------------------------------------------------------------- numbers


def table_after(text: str, marker: str = "") -> list[list[str]]:
    """The cells of the first Markdown table after the marker, its header first; bold and typographic signs taken off."""
    lines = iter(text[text.index(marker):].replace("**", "").replace("−", "-").splitlines())
    line = next(line for line in lines if line.startswith("|"))
    rows = []
    while line.startswith("|"):
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
        line = next(lines)
    return [rows[0], *rows[2:]]


VARIANTS = {"default": "", "ours": "", "packed": "-packed", "`gft.PAPER`": "-paper"}


@pytest.mark.parametrize(("marker", "table"), [
    ("**nanoGPT**", "shakespeare-gpt"), ("**on MNIST**, 4000 steps", "mnist-vit"), ("**on Imagenette**", "imagenette-vit"),
    ("**The paper's 5-layer DNN**", "mnist-dnn"), ("**Depth.**", "depth")])
def test_tables_of_the_readme_say_what_results_say(marker, table):
    header, *rows = table_after(README.read_text(), marker)
    told = {}
    for column, title in enumerate(header):
        variant, _, seeds = title.partition(" (n = ")
        if variant not in VARIANTS:
            continue
        results = table_after((ROOT / "results" / f"{table}{VARIANTS[variant]}" / "table.md").read_text())[1:]
        by_name = {name: (float(paper), *rest[:3]) for name, paper, *rest in results}
        told[variant] = len(by_name)
        for row in rows:
            name = row[0].replace(" bit", "bit").replace(" (AdamW)", "")
            if name not in by_name:
                assert not row[column]
                continue
            value, _, own_seeds = row[column].partition(" (n = ")
            n = (own_seeds or seeds).rstrip(")") or row[header.index("n")]
            assert (name, float(row[1]), value, row[column + 1], n) == (name, *by_name[name])
    assert min(told.values()) >= 5
    assert len(told) == sum(folder.name.removeprefix(table) in VARIANTS.values() and folder.name.startswith(table)
                            for folder in (ROOT / "results").iterdir())


@pytest.mark.parametrize(("name", "table"), [
    ("nanoGPT, Tiny Shakespeare", "shakespeare-gpt"), ("ViT, MNIST", "mnist-vit"), ("ViT, Imagenette", "imagenette-vit"),
    ("DNN, MNIST", "mnist-dnn"), ("ternary DNN by depth, MNIST", "depth")])
def test_the_summary_of_the_readme_counts_what_results_say(name, table):
    (told,) = [cells for first, *cells in table_after(README.read_text(), "In short") if first == name]
    floats = None
    for cell, variant in zip(told, ("", "-packed", "-paper"), strict=True):
        rows = runs.read_json(ROOT / "results" / f"{table}{variant}" / "table.json")["rows"]
        floats = next((row["mean"] for row in rows if row["bits"] == 32), floats)
        rows = [row for row in rows if row["bits"] < 32]
        sign, digits = (-1, 3) if rows[0]["lower_is_better"] else (1, 2)
        count, _, behind = cell.partition(", ")
        assert count == f"{sum(sign * row['gap'] >= 0 for row in rows)} of {len(rows)}"
        if floats is None:
            assert not behind
        else:
            worst = min(rows, key=lambda row: sign * row["mean"])["mean"] - floats
            assert float(behind) == pytest.approx(worst, abs=0.501 * 10**-digits)


@pytest.mark.parametrize(("told", "table"), [("nats (nanoGPT)", "shakespeare-gpt"), ("points (ViT on MNIST)", "mnist-vit"),
                                             ("(DNN)", "mnist-dnn"), ("(depth)", "depth")])
def test_the_readme_says_how_far_runs_deviate(told, table):
    deviation = re.search(r"its row's mean by (\S+) ", (ROOT / "results" / table / "table.md").read_text())
    assert deviation
    assert f" {deviation[1]} {told}" in README.read_text()


OLDEST = "mnist-dnn-paper"  # it has lines of a time when runs did not keep their settings


@pytest.mark.parametrize("folder", [file.parent.name for file in sorted((ROOT / "results").glob("*/runs.jsonl"))
                                    if file.parent.name != OLDEST])
def test_results_are_of_the_recipes_as_they_are(folder):
    variant = tables.variant_of(folder)
    lines = tables.read_lines(ROOT / "results" / folder)
    known = {recipe.name: recipe for recipe in tables.recipes_of(folder.removesuffix(f"-{variant}"), variant)}
    assert {name for name, _ in lines} <= known.keys()
    assert all(tables.has_line(lines, known[name], seed) for name, seed in lines)
