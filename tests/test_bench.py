"""Every benchmark runs, at a size that says nothing about speed."""

import csv

import pytest
import torch
from typer.testing import CliRunner

from gft.cli import app
from gft.lab import bench

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "options", "cases"), [("update", {"sizes": (40,)}, 3), ("votes", {"sizes": (24,)}, 1),
                                                        ("step", {"small": True, "compiled": False}, 3)])
def test_benchmarks_measure_every_case(name, options, cases):
    rows = list(bench.BENCHMARKS[name](CPU, **options))
    assert len(rows) == cases
    for row in rows:
        assert row.ours > 0
        assert row.peer > 0
        assert row.ratio == pytest.approx(row.ours / row.peer, rel=1e-6)


def test_times_are_taken_in_turns():
    calls = []
    first, second = bench.seconds(lambda: calls.append(1), lambda: calls.append(2), device=CPU, rounds=3)
    assert calls == [1, 2] * 5  # two turns to warm up
    assert first > 0
    assert second > 0


def test_bench_appends_to_its_file(tmp_path):
    file = tmp_path / "bench.csv"
    for _ in range(2):
        outcome = CliRunner().invoke(app, ["bench", "--only", "votes", "--small", "--device", "cpu", "--out", str(file)])
        assert outcome.exit_code == 0
    rows = list(csv.DictReader(file.open()))
    assert [row["bench"] for row in rows] == ["votes", "votes"]
    assert all(row["commit"] and row["device"].startswith("cpu") and row["torch"] for row in rows)
    outcome = CliRunner().invoke(app, ["bench", "--only", "speed", "--device", "cpu", "--out", str(file)])
    assert "choose one of" in str(outcome.exception)
