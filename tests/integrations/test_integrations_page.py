"""docs/integrations.md: each row of its table is held by a test that exists."""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "integrations.md"


def rows() -> list[list[str]]:
    table = PAGE.read_text().split("## Works, works with care, refused")[1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return cells[2:]


def test_each_row_says_how_it_stands_and_names_a_test_that_exists():
    functions = {node.name for file in TESTS.rglob("test_*.py") for node in ast.parse(file.read_text()).body
                 if isinstance(node, ast.FunctionDef)}
    table = rows()
    assert {row[0] for row in table} == {"works", "care", "refused"}
    assert all(len(row) == 4 and row[1] for row in table)
    held_by = [row[3].strip("`") for row in table]
    assert not [name for name in held_by if name not in functions]
    assert not [name for name, times in Counter(held_by).items() if times > 1]


def test_the_page_s_code_is_python():
    blocks = PAGE.read_text().split("```python\n")[1:]
    assert len(blocks) >= 4
    for block in blocks:
        ast.parse(block.split("```")[0])
