"""native.c, built by the machine's own C compiler when first needed and kept in the user's cache folder.

Building takes about a second. The library's name is a fingerprint of the source, the compiler and the processor. A library
is code that runs as us, so it is loaded only from a file and a folder that are ours and that nobody else can write.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path

from gft.ops.native.interface import SIGNATURES

SOURCE = Path(__file__).with_name("native.c")
PARTS = ("noise.h", "votes.h")  # that it includes
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
TUNINGS = (("-march=native",), ())  # the first that the compiler takes
PATIENCE = 60  # seconds for the compiler

_one_at_a_time = threading.Lock()


class CannotBuildError(Exception):
    """The compiler does not run, or does not compile."""


def library() -> ctypes.CDLL | None:
    """The built functions; None where they cannot be had."""
    with _one_at_a_time:
        return _library()


@cache
def _library() -> ctypes.CDLL | None:
    compiler = _compiler()
    if os.environ.get("GFT_NATIVE") == "0" or not compiler:
        return None
    try:
        for folder in (_cache_folder(), _fallback_folder()):
            try:
                return _loaded(built(compiler, folder))
            except OSError:  # cannot be written, is not ours alone, or cannot be run from
                continue
        with _folder_of_this_process() as folder:
            return _loaded(built(compiler, folder))
    except (CannotBuildError, OSError) as error:
        warnings.warn(f"the C compiler {shlex.join(compiler)!r} could not build gft's CPU kernels ({error}), so slower "
                      "torch code is used; set CC to a C compiler that works, or GFT_NATIVE=0 to do without", stacklevel=2)
    return None


def _compiler() -> list[str]:
    """The words of the command, CC="ccache gcc" is two; none where there is no compiler."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return [found] if found else []


def _loaded(path: Path) -> ctypes.CDLL:
    functions = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions


# ---------------------------------------------------------------------------------------------------- folders


def _cache_folder() -> Path:
    return (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gft").resolve()


def _fallback_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"gft-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


@contextmanager
def _folder_of_this_process() -> Iterator[Path]:
    """Removed as soon as the library is loaded: the process keeps what it has loaded."""
    folder = Path(tempfile.mkdtemp(prefix="gft-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_ours(path: Path) -> bool:
    """Is it no link, owned by us, and not for others to write?"""
    found = path.lstat()
    if not hasattr(os, "getuid"):  # Windows has other means
        return True
    return not stat.S_ISLNK(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


# ---------------------------------------------------------------------------------------------------- building


def built(compiler: list[str], folder: Path) -> Path:
    """The library in a folder, made if it is not there. Raises OSError where the folder will not do."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours(folder):
        raise PermissionError(f"{folder} is not yours alone to write")
    texts = [path.read_text() for path in (SOURCE, *map(SOURCE.with_name, PARTS))]
    marks = [*texts, *FLAGS, *chain(*TUNINGS), *compiler, platform.machine(), _processor()]
    path = folder / f"native-{hashlib.sha256(chr(0).join(marks).encode()).hexdigest()[:16]}.so"
    if not (path.exists() and is_ours(path)):
        # In a folder with a name of its own and not by the process' number, as files.py does: hosts may share this folder.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unfinished = Path(scratch) / path.name
            _compile(compiler, unfinished)
            unfinished.chmod(0o700)
            os.replace(unfinished, path)
    return path


def _compile(compiler: list[str], target: Path) -> None:
    said: list[str] = []
    for tuning in TUNINGS:
        command = [*compiler, *FLAGS, *tuning, "-o", str(target), str(SOURCE), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE, text=True, errors="replace")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotBuildError(str(error)) from error
        if done.returncode == 0 and target.exists():
            return
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    raise CannotBuildError(said[0][:120] if said else "it failed without a word")


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):  # not Linux; the name alone does not tell the instructions, so each host has its own
        return f"{platform.processor()} of {platform.node()}"
