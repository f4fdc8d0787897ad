"""Where data lies, and how a missing file is fetched.

Everything is looked for under $GFT_DATA, or the user's cache folder if that is not set. What we compute from it (decoded
images) goes beside it if we may write there, else into the user's cache folder, else into the system's folder for
temporary files, into one that is this user's alone.
"""

import http.client
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gft.errors import UsageError
from gft.files import read_whole, written_atomically


class DataError(UsageError):
    """A data set that is missing or damaged, and what to do."""


@dataclass(frozen=True)
class Source:
    """One file of a data set, as its publisher names it."""

    name: str
    md5: str


def data_folder() -> Path:
    if os.environ.get("GFT_DATA"):
        return Path(os.environ["GFT_DATA"]).expanduser()
    return _user_cache()


def _user_cache() -> Path:
    import pooch

    return Path(pooch.os_cache("gft"))


def cache_folders() -> list[Path]:
    """Where computed files may lie, best place first."""
    places = (data_folder() / "cache", _user_cache() / "cache", _own_temporary())
    return [place for place in dict.fromkeys(places) if place is not None]


def _own_temporary() -> Path | None:
    """A folder of this user's alone among the temporary files, where anyone may write: one that another has put there, or
    can write to, is not used."""
    folder = Path(tempfile.gettempdir()) / f"gft-cache-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    if not os.path.lexists(folder):
        return folder
    status = folder.lstat()
    ours = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    return folder if ours and stat.S_ISDIR(status.st_mode) else None


def writable_cache() -> Path:
    """The first of `cache_folders` that can be written, made if need be."""
    for folder in cache_folders():
        if _may_write(folder):
            try:
                folder.mkdir(0o700 if folder == _own_temporary() else 0o777, parents=True, exist_ok=True)
            except OSError:
                continue
            if folder in cache_folders():  # still: another may have been quicker
                return folder
    raise DataError(f"none of {', '.join(map(str, cache_folders()))} can be written; set GFT_DATA to a folder of yours")


def _may_write(folder: Path) -> bool:
    """Judged at the nearest folder that exists. The mode is read too: to root every folder looks writable, but one
    whose mode forbids writing to all was meant to stay as it is."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return there.is_dir() and bool(there.stat().st_mode & 0o222) and os.access(there, os.W_OK)


def content_of(path: Path) -> bytes:
    """The bytes of a file of data."""
    try:
        return read_whole(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); allow reading it, or set GFT_DATA to another folder"
                        ) from error


def check_md5(path: Path, md5: str | None) -> None:
    """Refuse a file that is not the one its publisher has; a folder, or a file of which nothing is known, passes."""
    import pooch

    if md5 is not None and path.is_file():
        try:
            found = pooch.file_hash(str(path), alg="md5")
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); allow reading it, or set GFT_DATA to another folder"
                            ) from error
        if found != md5:
            raise DataError(f"{path} is damaged (its checksum is not the publisher's); delete it and fetch it again")


def retrieve(what: str, file: Source, mirrors: Iterable[str], folder: Path, progress: bool, mend: str) -> Path:
    """Download `file` into `folder` from the first mirror that has it whole; `mend` ends the error if none does. Until its
    checksum is known to be right it lies aside: a download that is killed leaves no bad file, and two at once are fine."""
    import pooch

    if not _may_write(folder):
        raise DataError(f"{what} is not in {data_folder()}, and nothing may be written there; set GFT_DATA to a folder of "
                        f"yours, or {mend}")
    why, bar = "", progress and sys.stderr.isatty()
    for mirror in mirrors:
        try:
            with written_atomically(folder / file.name) as unfinished:
                pooch.retrieve(mirror + file.name, f"md5:{file.md5}", unfinished.name, unfinished.parent, progressbar=bar)
            return folder / file.name
        except UsageError:  # of the disk
            raise
        except OSError as error:  # the network's errors are of this kind; the next mirror may be up
            why = f"{type(error).__name__}: is there a network?"
        except ValueError as error:  # pooch's own: a wrong checksum
            why = str(error).splitlines()[0]
    raise DataError(f"{what} is not in {data_folder()} and could not be fetched ({why}); {mend}")


def retrieve_published(what: str, url: str, folder: Path, progress: bool, mend: str) -> Path:
    """Download a file of the Hugging Face hub, checked by the SHA-256 that the hub itself states of it (X-Linked-Etag)."""
    import pooch

    if not _may_write(folder):
        raise DataError(f"{what} is not in {data_folder()}, and nothing may be written there; set GFT_DATA to a folder of "
                        f"yours, or {mend}")
    try:
        stated = _stated_checksum(url)
        name, bar = url.rsplit("/", 1)[-1], progress and sys.stderr.isatty()
        with written_atomically(folder / name) as unfinished:
            pooch.retrieve(url, f"sha256:{stated}", unfinished.name, unfinished.parent, progressbar=bar)
        return folder / name
    except UsageError:  # of the disk
        raise
    except (OSError, ValueError) as error:
        why = "is there a network?" if isinstance(error, OSError) else str(error).splitlines()[0].partition(". ")[0]
        raise DataError(f"{what} is not in {data_folder()} and could not be fetched ({why}); {mend}") from None


def _stated_checksum(url: str) -> str:
    """The hub answers with a redirection that carries it; what lies behind that need not be asked."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=30)
    try:
        connection.request("HEAD", parts.path)
        stated = (connection.getresponse().getheader("X-Linked-Etag") or "").strip('"')
    finally:
        connection.close()
    if not re.fullmatch(r"[0-9a-f]{64}", stated):
        raise ValueError("the hub states no checksum of this file")
    return stated
