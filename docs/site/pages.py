"""How the repository's Markdown becomes a site: called by mkdocs (mkdocs.yml, `hooks`).

The pages are written for GitHub, and are the same here: README.md is the index, what a page shows of results/ comes along,
links are turned to where things lie on the site. A link to a file that the site does not have leads to the repository if
mkdocs.yml has its `repo_url`, else only its text stays. A page that the navigation does not name goes to its end.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
RENAMED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
SHOWN = (".md", ".png", ".svg", ".csv")  # of results/
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
ITEM = re.compile(r"( *)([-*]|\d+\.) ")


def on_config(config: Any) -> Any:
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    more = [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in named]
    config.nav += [{"More": more}] if more else []
    return config


def on_files(files: Files, config: Any) -> Files:
    results = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "results").rglob("*")) if path.suffix in SHOWN]
    for source in [*RENAMED, *results]:
        files.append(File.generated(config, RENAMED.get(source, source), abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri
    source = next((name for name, renamed in RENAMED.items() if renamed == uri),
                  uri if uri.startswith("results/") else f"docs/{uri}")

    def turned(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = RENAMED.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(there) is not None:
            here = posixpath.relpath(there, posixpath.dirname(uri) or ".")
            return f"{image}[{text}]({here}{'#' if anchor else ''}{anchor})"
        if not (ROOT / path).exists():
            return link[0]  # mkdocs warns of it
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text

    return "\n".join(for_python_markdown(LINK.sub(turned, markdown).splitlines()))


def for_python_markdown(lines: list[str]) -> list[str]:
    """GitHub takes lists and tables that follow a line of text, and what belongs to an item indented by two or three;
    Python's Markdown wants an empty line before and after, and four."""
    out: list[str] = []
    fence, before, indent = "", "", 0
    in_list = loose = False  # loose: an item of several paragraphs
    for line in lines:
        width = len(line) - len(line.lstrip())
        if not fence and line.strip():
            item = ITEM.match(line)
            table = line.startswith("|") != before.startswith("|")
            if before.strip() and (table or (item and (loose or not in_list))):
                out.append("")
            in_list = bool(item) or (in_list and (width >= 2 or bool(before.strip())))
            loose = loose and in_list and not item
            indent = 4 - width if in_list and 2 <= width < 4 else 0
        elif not fence:
            loose = in_list
        fences = re.match(r" *(```+)", line)
        if fences:
            fence = "" if fence and line.strip() == fence else fence or fences[1]
        out.append(" " * indent + line if line.strip() else line)
        before = line
    return out
