"""The house itself: who may import whom, how long a file may be, and that what is public is explained."""

import ast
import inspect
from pathlib import Path

import pytest

import gft

HOUSE = Path(gft.__file__).parent
TESTS = Path(__file__).parent
LONGEST = 600

# From the ground up. A room imports from lower floors only; the modules of one room (a folder) may import each other.
# The kernels stand on the ground: they take plain tensors, and the definitions they are twins of call them.
FLOORS = [
    {"philox", "kernels"},
    {"grid"},
    {"vote", "directions", "step", "reference"},
    {"product", "distributed"},
    {"layers"},
    {"convert", "optimizer"},
    {"statistics", "checkpoint", "capture", "energy"},
    {"__init__"},  # `import gft`
    {"lab", "hardness"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: height for height, floor in enumerate(FLOORS) for room in floor}
FILES = sorted(HOUSE.rglob("*.py"))


def room_of(file: Path) -> str:
    """gft/vote.py -> vote; gft/lab/data.py -> lab."""
    return file.relative_to(HOUSE).with_suffix("").parts[0]


def room_of_name(name: str) -> str:
    """gft.vote -> vote; gft.lab.data -> lab; gft, or a name that gft offers, -> __init__."""
    parts = name.split(".")
    is_module = len(parts) > 1 and ((HOUSE / f"{parts[1]}.py").exists() or (HOUSE / parts[1]).is_dir())
    return parts[1] if is_module else "__init__"


def imports(file: Path) -> list[str]:
    """The rooms a file imports from, wherever in it the import stands."""
    package = ["gft", *file.relative_to(HOUSE).parts[:-1]]
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from gft import step` names a module, `from gft import GFT` does not.
            names += [f"{origin}.{alias.name}" for alias in node.names] if origin == "gft" else [origin]
    return [room_of_name(name) for name in names if name.split(".")[0] == "gft"]


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(HOUSE)) for file in FILES])
def test_imports_go_downwards(file):
    room = room_of(file)
    assert room in FLOOR, f"{room} has no floor; give it one in FLOORS"
    for other in imports(file):
        assert other in FLOOR, f"{room} imports {other}, which has no floor; give it one in FLOORS"
        inside = room == other and file.parent != HOUSE
        assert FLOOR[other] < FLOOR[room] or inside, f"{room} imports {other}, which is not below it"


def test_imports_are_seen_by_this_test():
    """Lest the test above pass because it reads nothing."""
    assert "philox" in imports(HOUSE / "vote.py")
    assert {"step", "grid", "vote"} <= set(imports(HOUSE / "optimizer.py"))
    assert room_of_name("gft.lab.data") == "lab"
    assert room_of_name("gft.GFT") == "__init__"


def test_reference_shares_no_code_with_what_it_checks():
    assert imports(HOUSE / "reference.py") == []


def test_only_the_command_line_imports_lab():
    importers = {room_of(file) for file in FILES if "lab" in imports(file)}
    assert importers <= {"lab", "cli"}


ALL_FILES = [*FILES, *sorted(TESTS.rglob("*.py"))]


@pytest.mark.parametrize("file", ALL_FILES, ids=[f"{file.parent.name}/{file.name}" for file in ALL_FILES])
def test_files_can_be_read_in_one_sitting(file):
    assert len(file.read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("name", gft.__all__)
def test_public_names_are_explained(name):
    value = getattr(gft, name)
    if inspect.ismodule(value) or inspect.isclass(value) or callable(value):
        assert value.__doc__
        assert len(value.__doc__) > 20
    else:
        assert name.isupper()  # a constant


def test_public_names_are_listed_once():
    assert len(set(gft.__all__)) == len(gft.__all__)
    assert not [name for name in gft.__all__ if name.startswith("_")]
