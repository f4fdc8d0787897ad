"""Tests that fork, which costs no import. A child cannot use the threads of its parent's products, and would wait for them
for ever: so these run by themselves, in processes of one thread (`make test` sees to that)."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # for torture.py


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("OMP_NUM_THREADS") != "1":
        for item in items:
            if "forked" in Path(item.fspath).parts:
                item.add_marker(pytest.mark.skip(reason="run these by themselves: OMP_NUM_THREADS=1 pytest tests/forked"))
