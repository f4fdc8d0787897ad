"""The documentation: its links lead somewhere, its API page leaves no public name out."""

import re
from pathlib import Path

import pytest

import gft

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCED = re.compile(r"```.*?```", re.DOTALL)


def anchors(page):
    """What GitHub calls the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page):
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_api_page_has_every_public_name_once():
    named = re.findall(r"^::: gft\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(gft.__all__)


def test_the_navigation_names_pages_that_are_there():
    yaml = pytest.importorskip("yaml")
    written = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}

    def pages(nav):
        return [nav] if isinstance(nav, str) else [page for one in (nav.values() if isinstance(nav, dict) else nav)
                                                   for page in pages(one)]

    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert {"index.md", "guide.md", "api.md"} <= set(named)
    for page in named:
        assert (ROOT / written[page] if page in written else ROOT / "docs" / page).is_file(), page
