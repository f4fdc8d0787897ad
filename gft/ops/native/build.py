"""native.c, built by the machine's own C compiler when first needed and kept in the user's cache folder.

Building takes about a second. The library's name holds a fingerprint of the source, the compiler and the processor, and
one of its own bytes: a file that was cut short is found out and built anew, for to load it would end the process. A library
is code that runs as us, so it is loaded only from a file and a folder that are ours and that nobody else can write; where
the cache folder is not such a one, each process builds its own in a new folder whose name nobody knows.
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
PARTS = ("noise.h", "stored.h", "votes.h", "tokens.h", "mean.h", "moves.h")  # that it includes
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
TUNINGS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())  # the first that the compiler takes
WITHOUT_TILES = ("-mno-amx-int8",)
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
    if os.environ.get("GFT_NATIVE") == "0":
        return None
    try:
        compiler = _compiler()
        try:
            return _loaded(built(compiler, _kept_folder()))
        except OSError:  # cannot be written, is not ours alone, or cannot be run from
            with _folder_of_this_process() as folder:
                return _loaded(built(compiler, folder))
    except (CannotBuildError, OSError) as error:
        warnings.warn(f"gft's CPU kernels could not be built ({error}), so slower torch code is used; set CC to a C "
                      "compiler that works, or GFT_NATIVE=0 to do without", stacklevel=2)
    return None


def _compiler() -> list[str]:
    """The words of the command: CC="ccache gcc" is two, CC="gcc -O2" too."""
    if os.environ.get("CC", "").strip():
        try:
            return shlex.split(os.environ["CC"])
        except ValueError as error:
            raise CannotBuildError(f"CC={os.environ['CC']!r} is no command: {error}") from error
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise CannotBuildError("there is no C compiler: neither cc nor gcc nor clang is on the PATH")
    return [found]


def _loaded(path: Path) -> ctypes.CDLL:
    functions = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions


# ---------------------------------------------------------------------------------------------------- folders


def _cache_folder() -> Path:
    return (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gft").resolve()


def _kept_folder() -> Path:
    """The cache folder, made if it is not there. Raises OSError where somebody could put another in its place."""
    try:
        folder = _cache_folder()
    except RuntimeError as error:  # a user without a home
        raise FileNotFoundError(str(error)) from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not all(is_kept(parent) for parent in folder.parents):
        raise PermissionError(f"{folder} lies in a folder that others can write")
    return folder


@contextmanager
def _folder_of_this_process() -> Iterator[Path]:
    """Removed as soon as the library is loaded: the process keeps what it has loaded."""
    folder = Path(tempfile.mkdtemp(prefix="gft-")).resolve()
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


def is_kept(path: Path) -> bool:
    """Can no stranger rename what lies in this folder? A group may: on many systems it is the user's own."""
    if not hasattr(os, "getuid"):
        return True
    found = path.lstat()
    return found.st_uid in (0, os.getuid()) and (not found.st_mode & 0o002 or bool(found.st_mode & stat.S_ISVTX))


# ---------------------------------------------------------------------------------------------------- building


def built(compiler: list[str], folder: Path) -> Path:
    """The library in a folder, made if it is not there whole. Raises OSError where the folder will not do."""
    if not is_ours(folder):
        raise PermissionError(f"{folder} is not yours alone to write")
    texts = [path.read_text() for path in (SOURCE, *map(SOURCE.with_name, PARTS))]
    marks = [*texts, *FLAGS, *chain(*_tunings()), *compiler, platform.machine(), _processor()]
    name = f"native-{_digest(chr(0).join(marks).encode())}"
    for path in folder.glob(f"{name}-*.so"):
        if is_ours(path) and path.name == f"{name}-{_digest(path.read_bytes())}.so":
            return path
        path.unlink(missing_ok=True)
    # In a folder with a name of its own and not by the process' number, as files.py does: hosts may share this folder.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unfinished = Path(scratch) / f"{name}.so"
        _compile(compiler, unfinished)
        unfinished.chmod(0o700)
        content = unfinished.read_bytes()
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())  # else the name may reach the disk before the bytes do
        return unfinished.replace(folder / f"{name}-{_digest(content)}.so")


@cache
def has_tiles() -> bool:
    """Has the processor AMX's products of bytes, and does Linux give this process the registers for them? They are many, so
    a process has to ask; threads and forked processes then have them, too."""
    if platform.system() != "Linux" or "amx_int8" not in _processor().split():
        return False
    arch_prctl, request, tiles = 158, 0x1023, 18
    try:
        return ctypes.CDLL(None).syscall(arch_prctl, request, tiles) == 0
    except (AttributeError, OSError):
        return False


def _tunings() -> tuple[tuple[str, ...], ...]:
    """What is told the compiler of the processor: the first that it takes."""
    if has_tiles() or "amx_int8" not in _processor().split():
        return TUNINGS
    return tuple((*tuning, *WITHOUT_TILES) if tuning else () for tuning in TUNINGS)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(compiler: list[str], target: Path) -> None:
    said: list[str] = []
    for tuning in _tunings():
        command = [*compiler, *FLAGS, *tuning, "-o", str(target), str(SOURCE), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE, text=True, errors="replace")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotBuildError(f"the C compiler {shlex.join(compiler)!r} does not run: {error}") from error
        if done.returncode == 0 and target.exists():
            return
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    words = said[0][:120] if said else "it failed without a word"
    raise CannotBuildError(f"the C compiler {shlex.join(compiler)!r} does not compile: {words}")


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):  # not Linux; the name alone does not tell the instructions, so each host has its own
        return f"{platform.processor()} of {platform.node()}"
