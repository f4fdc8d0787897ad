"""The house itself: who may import whom, how long files and lists of parameters may be, that what is public is explained."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import gft

HOUSE = Path(gft.__file__).parent
TESTS = Path(__file__).parent.parent
LONGEST_FILE = 600
MOST_PARAMETERS = 8
# But quantize_ is where a user says all there is to say, by name.
MANY_PARAMETERS = {("convert.py", "quantize_")}

# From the ground up. A room imports from lower floors only; the modules of one room (a folder) may import each other.
FLOORS = [
    {"errors", "reference"},
    {"files", "philox", "saved", "storage", "settings"},
    {"ops", "initialize"},
    {"votes"},
    {"rules", "replay"},
    {"product", "distributed"},
    {"sharding"},
    {"layers"},
    {"state"},
    {"calibrate", "optim", "pack", "summary"},
    {"convert", "hybrid"},
    {"averaging"},
    {"statistics", "checkpoint", "capture"},
    {"__init__"},  # `import gft`
    {"export", "integrations"},  # above it: loaded when asked for
    {"lab"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: height for height, floor in enumerate(FLOORS) for room in floor}
FILES = sorted(HOUSE.rglob("*.py"))
LIBRARY = [file for file in FILES if file.relative_to(HOUSE).parts[0] not in ("lab", "cli")]


def room_of(file: Path) -> str:
    """gft/votes.py -> votes; gft/lab/data.py -> lab."""
    return file.relative_to(HOUSE).with_suffix("").parts[0]


def room_of_name(name: str) -> str:
    """gft.votes -> votes; gft.lab.data -> lab; gft, or a name that gft offers, -> __init__."""
    parts = name.split(".")
    is_module = len(parts) > 1 and ((HOUSE / f"{parts[1]}.py").exists() or (HOUSE / parts[1]).is_dir())
    return parts[1] if is_module else "__init__"


def rooms_imported_by(file: Path) -> list[str]:
    """The rooms a file imports from, wherever in it the import stands."""
    package = ["gft", *file.relative_to(HOUSE).parts[:-1]]
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from gft import ops` names a module, `from gft import GFT` does not.
            names += [f"{origin}.{alias.name}" for alias in node.names] if origin == "gft" else [origin]
    return [room_of_name(name) for name in names if name.split(".")[0] == "gft"]


def parameters_by_function(file: Path) -> dict[str, int]:
    """Functions and methods of a file -> how many parameters each takes; kernels, in Triton's own language, left out."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any("triton" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            every = [*(one for one in named if one.arg not in ("self", "cls")), arguments.vararg, arguments.kwarg]
            found[f"{file.relative_to(HOUSE)}:{node.lineno} {node.name}"] = sum(one is not None for one in every)
    return found


def test_imports_go_downwards_and_only_the_command_line_reaches_the_lab():
    assert {"ops", "philox"} <= set(rooms_imported_by(HOUSE / "votes.py"))  # lest the test pass because it reads nothing
    climbs = []
    for file in FILES:
        room = room_of(file)
        assert room in FLOOR, f"{room} has no floor; give it one in FLOORS"
        for other in rooms_imported_by(file):
            assert other in FLOOR, f"{room} imports {other}, which has no floor; give it one in FLOORS"
            inside = room == other and file.parent != HOUSE
            if not (FLOOR[other] < FLOOR[room] or inside):
                climbs.append(f"{file.relative_to(HOUSE)} imports {other}")
    assert not climbs
    assert {room_of(file) for file in FILES if "lab" in rooms_imported_by(file)} <= {"lab", "cli"}
    assert rooms_imported_by(HOUSE / "reference.py") == []  # it shares no code with what it checks


def test_files_and_parameter_lists_are_short():
    long = [file.name for file in [*FILES, *TESTS.rglob("*.py")] if len(file.read_text().splitlines()) > LONGEST_FILE]
    assert not long
    counts = {name: count for file in LIBRARY for name, count in parameters_by_function(file).items()}
    assert max(counts.values()) >= 6  # lest the test pass because it reads nothing
    many = {name for name, count in counts.items() if count > MOST_PARAMETERS}
    assert {(re.split(":", name)[0], name.split()[-1]) for name in many} == MANY_PARAMETERS


def test_public_names_are_explained_and_listed_once():
    assert len(set(gft.__all__)) == len(gft.__all__)
    for name in gft.__all__:
        value = getattr(gft, name)
        explained = inspect.ismodule(value) or inspect.isclass(value) or callable(value)
        assert not name.startswith("_")
        assert len(value.__doc__ or "") > 20 if explained else name.isupper(), name


def test_import_gft_loads_nothing_of_the_lab_and_no_integration():
    rooms, libraries = ("gft.lab", "gft.cli", "gft.integrations"), ("matplotlib", "typer", "rich", "sklearn", "transformers",
                                                                    "lightning", "peft", "accelerate")
    script = f"import sys, gft; print(*[name for name in sys.modules if name.startswith({rooms})"
    script += f" or name.split('.')[0] in {libraries}])"
    path = os.pathsep.join([str(HOUSE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
                          text=True, timeout=120, check=True)
    assert done.stdout.split() == []
