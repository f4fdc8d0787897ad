"""How docstrings become the API page: called by mkdocstrings (mkdocs.yml, `extensions`).

A parameter is explained in a docstring as `name: what it does`, further lines indented. Here such lines become a list.
"""

import re
from typing import Any

import griffe


class ParametersAsList(griffe.Extension):
    """Turns `name: text` of a docstring into `- **name**: text`, for names that the function or class takes."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        turn(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        names = set(cls.attributes)
        if isinstance(made := cls.members.get("__init__"), griffe.Function):
            names |= {parameter.name for parameter in made.parameters}
        turn(cls, names)


def turn(documented: griffe.Object, names: set[str]) -> None:
    if documented.docstring is not None:
        documented.docstring.value = "\n".join(listed(documented.docstring.value.splitlines(), names))


def listed(lines: list[str], names: set[str]) -> list[str]:
    out: list[str] = []
    inside = False
    for line in lines:
        start = re.match(r"(\w+)(?:\([\w, ]*\))?: ", line)
        if start and start[1] in names:
            out += ([] if inside else [""]) + [f"- **`{start[1]}`**: {line[start.end():]}"]
            inside = True
        elif inside and re.match(" {4}\\S", line):
            out[-1] += line[3:]  # one line: a number at its start would begin a list of its own
        else:
            inside = False
            out.append(line)
    return out
