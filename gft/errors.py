"""The errors a user can mend. Their message is one sentence that names the cause and the mend.

The command line prints these in one line. Any other exception is a bug of ours and keeps its traceback.
"""

import shlex
from pathlib import Path


class UsageError(ValueError):
    """A value, a file or a call that cannot be used."""


class UsageTypeError(UsageError, TypeError):
    """The same where the type is wrong, not the value."""


def shortened(value: object) -> str:
    """What a sentence says of a value that came from outside: it may be long, or of several lines."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # a tensor: this room knows no torch
        return f"{value.dtype} of shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    small = isinstance(value, (bool, float, str, type(None))) or (isinstance(value, int) and abs(value) < 2**70)
    text = repr(value) if small else f"a {type(value).__name__}"
    text = text.replace(". ", ".")
    return text if len(text) <= 40 else f"{text[:40]}…"


def one_line(text: object, most: int = 100) -> str:
    """Words from outside, a name in a file or what a library says of it, as a part of a sentence."""
    line = "".join(letter if letter.isprintable() else " " for letter in str(text)).rstrip(".").replace(". ", ", ")
    return line if len(line) <= most else f"{line[:most]}…"


def install_hint(extra: str) -> str:
    """The command that installs an extra of pyproject.toml: from the clone that this code lies in, or from the index."""
    folder = Path(__file__).resolve().parents[1]
    project = folder / "pyproject.toml"
    if not (project.is_file() and 'name = "gft-torch"' in project.read_text(encoding="utf-8")):
        return f"pip install 'gft-torch[{extra}]'"
    where = "." if folder == Path.cwd() else str(folder)
    return f"pip install -e {shlex.quote(f'{where}[{extra}]')}"
