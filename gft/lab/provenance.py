"""Where a number comes from: the command, the commit, the device and the versions that are kept beside it."""

import os
import platform
import shlex
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gft


def commit() -> str:
    """The commit of the checkout this package runs from, "+changes" if its code differs; $GFT_COMMIT elsewhere."""
    if os.environ.get("GFT_COMMIT"):
        return os.environ["GFT_COMMIT"]
    here = Path(gft.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"gft {gft.__version__}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def versions(*packages: str) -> dict[str, str]:
    """Package -> its installed version."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def command_line(command: str, *words: str, **options: Any) -> str:
    """A command as one would type it again: True is an option by itself, a list one that repeats; None and False are left
    out."""
    parts = [command, *map(shlex.quote, words)]
    for key, value in options.items():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is True:
                parts.append(f"--{key}")
            elif one is not None and one is not False:
                parts.append(f"--{key} {shlex.quote(str(one))}")
    return " ".join(parts)


def described(about: dict[str, str]) -> str:
    """What is known of a result's origin, as one line of Markdown."""
    return " · ".join(f"`{value}`" if key == "command" else f"{key} {value}" for key, value in about.items())
