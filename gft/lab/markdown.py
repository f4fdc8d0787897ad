"""Markdown tables, made in one place."""

from collections.abc import Iterable, Sequence

RULES = {"l": "---", "r": "---:", "c": ":---:"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """A Markdown table without a line break at its end.

    align: a letter a column, l, r or c; columns beyond its end are aligned left.
    """
    rules = [RULES[letter] for letter in align[: len(header)].ljust(len(header), "l")]
    lines = [_line(map(_escaped, header)), "|" + "|".join(rules) + "|"]
    for row in rows:
        assert len(row) == len(header), f"{len(row)} cells under {len(header)} columns: {row}"
        lines.append(_line(map(_escaped, row)))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(cell: str) -> str:
    """A bar would end the cell, a line break the table."""
    return cell.replace("|", "\\|").replace("\n", " ")
