"""Tables in the documentation say what results/ says; the README stays short; results/ is of the recipes as they are."""

import re
import shutil
from pathlib import Path

import pytest

from gft.errors import UsageError
from gft.lab import pages, tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.mark.parametrize("file", pages.FILES)
def test_tables_of_the_documentation_are_up_to_date(file):
    text = (ROOT / file).read_text()
    assert pages.REGION.search(text)
    assert pages.fill(text, RESULTS) == text, "run: gft pages"


def test_every_table_that_can_be_written_stands_somewhere():
    shown = {name for file in pages.FILES for _, name, *_ in pages.REGION.findall((ROOT / file).read_text())}
    assert shown == set(pages.PAGES)


def test_update_replaces_the_regions_of_every_page_and_nothing_else(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results")
    (tmp_path / "docs").mkdir()
    for name in pages.FILES:
        (tmp_path / name).write_text("before\n<!-- table: summary -->\n| old |\n<!-- end -->\nafter\n")
    file = tmp_path / pages.FILES[0]
    assert [changed for _, changed in pages.update(tmp_path / "results", check=True)] == [True] * len(pages.FILES)
    assert "| old |" in file.read_text()
    assert [changed for _, changed in pages.update(tmp_path / "results")] == [True] * len(pages.FILES)
    first, *region, last = file.read_text().splitlines()
    assert (first, last) == ("before", "after")
    assert region == ["<!-- table: summary -->", *pages.summary(RESULTS).splitlines(), "<!-- end -->"]
    assert not any(changed for _, changed in pages.update(tmp_path / "results"))


def test_update_without_results_is_refused(tmp_path, refuses):
    with refuses(UsageError, "no results at"):
        list(pages.update(tmp_path / "results"))


@pytest.mark.parametrize(("text", "match"), [
    ("<!-- table: nothing -->\n<!-- end -->\n", "no table 'nothing'"),
    ("<!-- table: summary -->\n| old |\n", "ends with"),
    ("<!-- table: summary -->\n<!-- table: depth -->\n<!-- end -->\n", "table summary has no end"),
], ids=["an unknown table", "no end", "no end before the next"])
def test_regions_that_cannot_be_filled_are_refused(text, match, refuses):
    with refuses(UsageError, match):
        pages.fill(text, RESULTS)


def test_a_table_shows_which_rows_reach_the_paper_and_which_do_not(tmp_path):
    def row(name, bits, paper, mean, n=1):
        return {"name": name, "bits": bits, "paper": paper, "mean": mean, "std": 0.25, "n": n, "seeds": list(range(n)),
                "gap": mean - paper, "metric": "accuracy", "lower_is_better": False, "commit": "abc", "device": "cpu",
                "torch": "2", "command": "gft reproduce depth"}

    (tmp_path / "depth").mkdir()
    rows = [row("Full-Precision", 32, 90.0, 91.0), row("2 layers 2bit", 2, 80.0, 85.5, n=3),
            row("3 layers 2bit", 2, 80.0, 79.5)]
    (tmp_path / "depth" / "table.json").write_text(pages.json.dumps({"title": "", "rows": rows}))
    written = pages.paper_table(tmp_path, "depth").splitlines()
    assert written[3] == "| 2 layers 2 bit | 80 | −10.0 | **85.50 ± 0.25** | +5.50 | −5.50 |"
    assert written[4] == "| 3 layers 2 bit | 80 | −10.0 | 79.50 | −0.50 | −11.50 |"
    assert "| 1; 3 (2 layers 2 bit) | 0 to 2 |" in written[-1]


def test_the_readme_stays_short():
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 150
    assert len(text.split()) <= 1200
    assert max(map(len, lines)) <= 200


@pytest.mark.parametrize("file", [str(file.relative_to(ROOT)) for file in sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "results" / "README.md"])])
def test_links_of_the_documentation_lead_somewhere(file):
    text = (ROOT / file).read_text()
    paths = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert not [path for path in paths if path and not ((ROOT / file).parent / path).exists()]


OLDEST = "mnist-dnn-paper"  # it has lines of a time when runs did not keep their settings


@pytest.mark.parametrize("folder", [file.parent.name for file in sorted(RESULTS.glob("*/runs.jsonl"))
                                    if file.parent.name != OLDEST])
def test_results_are_of_the_recipes_as_they_are(folder):
    variant = tables.variant_of(folder)
    lines = tables.read_lines(RESULTS / folder)
    known = {recipe.name: tables.as_run(recipe, RESULTS / folder)
             for recipe in tables.recipes_of(folder.removesuffix(f"-{variant}"), variant)}
    assert {name for name, _ in lines} <= known.keys()
    assert all(tables.has_line(lines, known[name], seed) for name, seed in lines)
