"""Whether the fuzzer that follows coverage runs, and finds what chance does not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris is installed by make fuzz, and on Linux on x86-64 alone")


def guided(*words: str) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("guided.py")
    return subprocess.run([sys.executable, program, *words], capture_output=True, text=True, timeout=120)


def test_inputs_that_follow_coverage_are_taken_or_refused():
    ended = guided("--targets", "metrics", "--inputs", "2000")
    assert ended.returncode == 0, ended.stderr
    counts = json.loads(ended.stdout.splitlines()[0])
    assert counts["refused"] + counts["taken"] == 2000
    assert min(counts["refused"], counts["taken"]) > 20


def test_a_fault_that_chance_finds_once_in_four_milliards_is_found():
    ended = guided("--targets", "planted", "--inputs", "300000")
    assert ended.returncode == 1
    assert "KeyError: 'planted'" in ended.stderr
