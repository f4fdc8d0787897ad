"""The lab imports what is heavy only when it is used, and its functions can be called without counting arguments."""

import ast
import subprocess
import sys
from pathlib import Path

import gft

HOUSE = Path(gft.__file__).parent
MOST_PARAMETERS = 8


def test_solvers_and_plots_are_imported_only_when_used():
    program = "import sys, gft.lab.hardness.study; print({'pysat', 'ortools', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_functions_take_few_parameters():
    """But those of commands, which are the command's options."""
    too_many = []
    for file in (*(HOUSE / "lab").rglob("*.py"), *(HOUSE / "cli").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and not any("command" in ast.unparse(one) for one in node.decorator_list):
                names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len([name for name in names if name not in ("self", "cls")]) > MOST_PARAMETERS:
                    too_many.append(f"{file.name}: {node.name}")
    assert not too_many
