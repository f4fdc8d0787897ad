"""The documentation's site builds from the pages of the repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gft

ROOT = Path(gft.__file__).parents[1]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path], cwd=ROOT,
                           env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "no float copy" in (tmp_path / "index.html").read_text()  # the README
    api = (tmp_path / "api" / "index.html").read_text()
    assert all(f'id="gft.{name}"' in api for name in gft.__all__)
    assert "<strong><code>in_backward</code></strong>" in api  # a parameter, as an item of a list
