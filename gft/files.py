"""Files that are whole or not there, and folders that have one writer: every file that gft writes is written this way."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gft.errors import UsageError

try:
    import fcntl
except ModuleNotFoundError:  # not on Windows: there nothing keeps a second writer out, and what a kill left stays
    fcntl = None

UNFINISHED = ".unfinished"
LOCK = ".lock"
# What a full or failing disk says, from Python and (as "os error 28") from safetensors' Rust. Any other error of a block
# that writes is its own.
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
FULL = {errno.ENOSPC, errno.EDQUOT}
# File systems that have no locks, or cannot flush a folder, say one of these.
NOT_OFFERED = {errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EBADF}


@contextmanager
def written_atomically(path: str | Path) -> Iterator[Path]:
    """`with written_atomically(path) as unfinished:` write to `unfinished`; it becomes `path` when the block ends.

    The new file lies beside the final name until then. It is flushed to disk before it is renamed, and its folder after:
    whoever kills the process, or pulls the plug, finds either the old file or the new one, whole. If the block raises, the
    old file stays. What a killed process has left unfinished is removed. A place that cannot be written, or a disk that
    fills up, raises a UsageError.
    """
    path = Path(path)
    make_folder(path.parent)
    with sentence_for(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        remove_unfinished(path.parent, path.name)
        scratch, held = _scratch_beside(path)
    try:
        unfinished = scratch / path.name
        with sentence_for(path):
            unfinished.touch()
            mode = unfinished.stat().st_mode  # as the user's umask has it; safetensors lets nobody else read
        with sentence_for(path, of_the_disk=True):
            yield unfinished
        with sentence_for(path):
            unfinished.chmod(mode)
            with open(unfinished, "rb") as file:
                os.fsync(file.fileno())
            os.replace(unfinished, path)
            flush_folder(path.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(held)


def read_whole(path: Path) -> bytes:
    """The bytes of a file, or OSError. A pipe, which an archive can hold as well as a file, would be waited for without end,
    and a device might never end."""
    if "\0" in str(path):
        raise FileNotFoundError(errno.ENOENT, "no name holds a NUL")
    if path.exists() and not path.is_file() and not path.is_dir():  # of a folder the system says so
        raise OSError(errno.EINVAL, "it is no file")
    return path.read_bytes()


def write_text(path: str | Path, text: str) -> Path:
    """Write a whole text file, atomically."""
    with written_atomically(path) as unfinished, sentence_for(path):
        unfinished.write_text(text, encoding="utf-8")
    return Path(path)


def make_folder(path: str | Path) -> Path:
    """Make a folder and those above it, or raise a UsageError that says why it cannot be made."""
    path = Path(path)
    with sentence_for(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            flush_folder(folder.parent)
    return path


@contextmanager
def sentence_for(path: str | Path, of_the_disk: bool = False) -> Iterator[None]:
    """Where a file lies is the user's choice, so that it cannot be written is the user's to mend. of_the_disk: only errors
    that a disk gives when it is full, failing or read-only; others are the block's own."""
    if "\0" in str(path):
        raise UsageError(f"{str(path)!r} cannot be written (no name holds a NUL); give a place where you may write")
    try:
        yield
    except Exception as error:
        number = _number_of(error)
        if isinstance(error, UsageError) or (number not in DISK if of_the_disk else not isinstance(error, OSError)):
            raise
        reason = getattr(error, "strerror", None) or (os.strerror(number) if number else str(error))
        mend = ("free some space there" if number in FULL else "allow larger files (ulimit -f)" if number == errno.EFBIG
                else "give a place where you may write")
        raise UsageError(f"{path} cannot be written ({reason}); {mend}") from error


def _number_of(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    named = re.search(r"\(os error (\d+)\)", str(error))
    return int(named[1]) if named else None


def flush_folder(path: Path) -> None:
    """Have a folder's own list of files on disk: a new file survives a power cut only when its name does."""
    if os.name == "nt":  # a folder cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------- what a kill leaves


def _scratch_beside(path: Path) -> tuple[Path, int]:
    """A folder for what will be `path`, of a name that no thread and no process has, and a locked descriptor of it. The lock
    ends with the process, however it ends; one that can be locked is nobody's. A folder, since some writers replace the file
    that they are given, and a lock would stay with the file that was."""
    while True:
        scratch = Path(tempfile.mkdtemp(UNFINISHED, f".{path.name}.", path.parent))
        try:
            held = os.open(scratch if fcntl else os.devnull, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another writer has taken it for a left-over, before it was locked
        # Or that writer is removing it now and holds the lock, or is done and has let go of it: a new one, then.
        if _lock(held) is not False and scratch.exists():
            return scratch, held
        os.close(held)


def remove_unfinished(folder: Path, of: str = "") -> None:
    """Remove what killed processes have left in a folder, or only of the file named `of`. What is being written stays."""
    try:
        entries = list(os.scandir(folder)) if fcntl else []
    except OSError:  # no folder, or one that may not be read
        entries = []
    for entry in entries:
        if entry.name.startswith(f".{of}") and entry.name.endswith(UNFINISHED) and entry.is_dir(follow_symlinks=False):
            try:
                held = os.open(entry.path, os.O_RDONLY)
            except OSError:  # gone by now, or another user's
                continue
            try:
                if _lock(held) is True:  # only where locks are kept can an idle folder be told from a busy one
                    shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(held)


# ---------------------------------------------------------------------------------------------------- one writer


def _lock(descriptor: int) -> bool | None:
    """Try to lock an open file or folder: False if another holds it, None where the file system keeps no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        return None
    return True


class FolderInUse(UsageError):
    """Another process is writing into the folder."""


class FolderLock:
    """The right to write into a folder, which one process has at a time: `FolderLock(folder)` takes it or raises, `release`
    or the end of the process gives it back, also a SIGKILL. The system keeps the lock; the file .lock only carries it, and
    the number of the process that has it, so that a file which a kill left behind is in nobody's way."""

    def __init__(self, folder: Path, mend: str) -> None:
        path = make_folder(folder) / LOCK
        with sentence_for(path):
            # No link: in a folder from elsewhere it would have some other file emptied.
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            if _lock(self._descriptor) is False:
                holder = os.read(self._descriptor, 100).decode("ascii", "replace").strip()
                os.close(self._descriptor)
                raise FolderInUse(f"{folder} is being written by process {holder or 'of another user'}; {mend}")
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Let others write. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
