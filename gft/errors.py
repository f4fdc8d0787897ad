"""The errors a user can mend. Their message is one sentence that names the cause and the mend.

The command line prints these in one line. Any other exception is a bug of ours and keeps its traceback.
"""

import shlex
from pathlib import Path


class UsageError(ValueError):
    """A value, a file or a call that cannot be used."""


class UsageTypeError(UsageError, TypeError):
    """The same where the type is wrong, not the value."""


def install_hint(extra: str) -> str:
    """The command that installs an extra of pyproject.toml: from the clone that this code lies in, or from the index."""
    folder = Path(__file__).resolve().parents[1]
    project = folder / "pyproject.toml"
    if not (project.is_file() and 'name = "gft-torch"' in project.read_text(encoding="utf-8")):
        return f"pip install 'gft-torch[{extra}]'"
    where = "." if folder == Path.cwd() else str(folder)
    return f"pip install -e {shlex.quote(f'{where}[{extra}]')}"
