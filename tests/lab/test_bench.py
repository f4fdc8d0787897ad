"""Every benchmark runs, at a size that says nothing about speed; what it counts is counted right."""

import csv
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gft
from gft.cli import app
from gft.lab import bench
from gft.lab import data as datasets
from gft.lab.bench import decode, growth, memory, rows, scale

CPU = torch.device("cpu")


def rows_of(name: str, **options) -> list[bench.Row]:
    return list(bench.BENCHMARKS[name](CPU, small=True, **options))


# ---------------------------------------------------------------------------------------------------- what all share


@pytest.mark.parametrize(("name", "cases"), [("update", 3), ("votes", 1), ("decode", 16)])
def test_benchmarks_measure_every_case(name, cases, monkeypatch):
    monkeypatch.setattr(decode, "TOKENS", 4)
    measured = rows_of(name)
    assert len(measured) == cases
    for row in measured:
        assert row.ours > 0
        assert row.peer > 0
        assert row.ratio == pytest.approx(row.ours / row.peer, rel=1e-6)


def test_times_are_taken_in_turns():
    calls = []
    first, second = bench.seconds(lambda: calls.append(1), lambda: calls.append(2), device=CPU, rounds=3)
    assert calls == [1, 2] * 5  # two turns to warm up
    assert first > 0
    assert second > 0


def test_storages_are_counted_once_and_whole():
    tensor = torch.zeros(10, 4)
    assert rows.stored([tensor, {"view": tensor[2:3]}, (None, 3)]) == 160
    assert rows.stored([tensor[2:3]]) == 160  # what a view keeps alive
    assert rows.stored([]) == 0


def test_bench_appends_to_its_file(tmp_path):
    file = tmp_path / "bench.csv"
    for _ in range(2):
        outcome = CliRunner().invoke(app, ["bench", "--only", "votes", "--small", "--device", "cpu", "--out", str(file)])
        assert outcome.exit_code == 0
    kept = list(csv.DictReader(file.open()))
    assert [row["bench"] for row in kept] == ["votes", "votes"]
    assert all(row["commit"] and row["device"].startswith("cpu") and row["torch"] for row in kept)
    outcome = CliRunner().invoke(app, ["bench", "--only", "speed", "--device", "cpu", "--out", str(file)])
    assert "choose one of" in str(outcome.exception)


def test_long_benchmarks_run_only_when_named(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "BENCHMARKS", {name: lambda *_, name=name, **__: asked.append(name) or iter(())
                                              for name in bench.BENCHMARKS})
    options = ["--small", "--device", "cpu", "--out", str(tmp_path / "bench.csv")]
    assert CliRunner().invoke(app, ["bench", *options]).exit_code == 0
    assert asked == [name for name in bench.BENCHMARKS if name not in ("growth", "scale")]
    assert CliRunner().invoke(app, ["bench", "--only", "scale", *options]).exit_code == 0
    assert asked[-1] == "scale"


# ---------------------------------------------------------------------------------------------------- memory


def test_a_weight_is_counted_with_its_state():
    width = 64
    measured = {row.case: row for row in memory.weights(CPU, small=True) if row.peer_is == "AdamW fp32"}
    for row, (stored, floats) in zip(measured.values(), ((0.25, 10), (0.5, 10), (1.0, 10), (2.0, 11)), strict=True):
        # Beside the weight a few floats a feature: running rms of x and delta, this step's squares, a mean's scale.
        assert stored < row.ours <= stored + (floats * width * 4 + 64) / width**2
        assert row.peer == pytest.approx(16, rel=1e-3)  # weight, gradient and two moments, and a counter


def test_votes_held_until_the_step_are_counted():
    layer = gft.QuantLinear(64, 64, 2, memory=False)
    model, build = nn.Sequential(layer), {}
    optimizer = None
    for in_backward in (True, False):
        if optimizer is not None:
            optimizer.release()
        optimizer = gft.GFT(gft.quantized(model), in_backward=in_backward)
        memory.backward(model, optimizer, 64, CPU, torch.float32)
        build[in_backward] = memory.counted(model, optimizer)
    assert build[False] - build[True] == 4 * 64**2 - 8  # int32 votes; flips are counted when it moves


@pytest.mark.parametrize(("vote", "stored", "squares"), [("sign", 0.25, 0), ("ternary", 0.25, 4), ("int4", 0.5, 4),
                                                         ("int8", 1.0, 4)])
def test_what_backward_keeps_of_x_is_exact(vote, stored, squares):
    tokens = 64  # each feature's mean square is 4 B for all of them
    (row,) = (row for row in memory.saved(CPU, small=True) if row.case.endswith(f"votes {vote}"))
    assert row.ours == stored + squares / tokens
    assert row.peer == 2.0
    assert row.met


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    (missing,) = (row for row in memory.weights(CPU, small=True) if "pip install torchao" in row.peer_is)
    assert math.isnan(missing.peer)
    assert not missing.met


# ---------------------------------------------------------------------------------------------------- scale


def test_a_hundred_billion_are_asked_for_exactly():
    size = scale.size_for(100)
    assert (size.width, size.depth) == (16384, 32)
    assert size.parameters == 32 * 12 * 16384**2 == 103_079_215_104
    assert size.tokens == 1024
    assert scale.size_for(1, width=4096).parameters >= 1e9


def test_a_scaled_network_has_no_float_matrix():
    torch.manual_seed(0)
    model = scale.build(scale.SMALL, 50, CPU)
    weights = gft.quantized(model)
    assert sum(weight.numel() for weight in weights) * 4 == scale.SMALL.parameters  # four a byte
    assert all(weight.dtype is torch.uint8 for weight in weights)
    assert {parameter.numel() for parameter in gft.dense(model)} <= {64, 50 * 64, 32 * 64}  # norms, embeddings, head


def test_a_scaled_layer_starts_as_quantize_would_start_it(monkeypatch):
    monkeypatch.setattr(scale, "DRAWN_AT_ONCE", 1000)  # a few rows at a time
    for gain in (1.0, 0.25):
        layer = gft.QuantLinear(256, 192, 2, memory=False)
        torch.manual_seed(3)
        scale.draw_(layer, gain)
        linear = nn.Linear(256, 192, bias=False)
        nn.init.normal_(linear.weight, std=gain / 16)
        kept = gft.QuantLinear.from_float(linear, 2, memory=False)
        assert float(layer.scale) == pytest.approx(float(kept.scale), rel=0.02)  # that of a sample, that of the deviation
        shares = [(levels.levels() == 0).float().mean().item() for levels in (layer, kept)]
        assert shares[0] == pytest.approx(shares[1], abs=0.01)


def test_running_a_block_again_casts_votes_once():
    """With and without activation checkpointing, the same weights to the bit."""
    size = replace(scale.SMALL, steps=3)
    ends = []
    for again in (True, False):
        torch.manual_seed(0)
        model = scale.build(size, datasets.load_verses(size.context).classes, CPU)
        if not again:
            model.blocks = nn.ModuleList(block.block for block in model.blocks)  # type: ignore[union-attr]
        begin = [weight.clone() for weight in gft.quantized(model)]
        scale.train(model, scale.optimizers(model, size), size, CPU)
        ends.append([weight.clone() for weight in gft.quantized(model)])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert all(not torch.equal(one, other) for one, other in zip(ends[0], begin, strict=True))


def test_scale_trains_and_says_what_it_holds():
    measured = {row.case: row for row in rows_of("scale")}
    size = scale.SMALL
    assert measured["quantized parameters"].ours * 1e9 == size.parameters == 12 * 64**2 * 2
    (loss,) = (row for case, row in measured.items() if case.startswith("loss"))
    assert loss.met
    assert measured["memory: packed weights"].ours * 1e9 == size.parameters / 4
    assert measured["memory: dense parts, gradients and AdamW"].met


def test_the_fall_is_not_the_dense_parts_alone():
    ends = []
    for lr in (0.0, scale.SMALL.lr):
        torch.manual_seed(0)
        size = replace(scale.SMALL, lr=lr)
        model = scale.build(size, datasets.load_verses(size.context).classes, CPU)
        progress = scale.train(model, scale.optimizers(model, size), size, CPU)
        ends.append(sum(progress.losses[-5:]) / 5)
        assert ends[-1] < progress.losses[0]
    without, with_integers = ends
    assert with_integers < without - 0.05


# ---------------------------------------------------------------------------------------------------- growth


def test_growth_compares_each_width_with_the_one_before(tmp_path, monkeypatch):
    made = [growth.Point(32, 1e-6, 0), growth.Point(64, 2e-6, 0), growth.Point(128, 1.6e-5, 0)]
    monkeypatch.setattr(growth, "points", lambda *_: iter(made))
    measured = list(growth.growth(CPU, small=True, files=[tmp_path / "growth.png", tmp_path / "growth.svg"]))
    assert [row.ratio for row in measured] == pytest.approx([1, 0.5, 2])
    assert [row.met for row in measured] == [True, True, False]
    assert (tmp_path / "growth.png").stat().st_size > 1000
    assert "<svg" in (tmp_path / "growth.svg").read_text()


def test_growth_runs_and_draws_beside_its_rows(tmp_path):
    file = tmp_path / "bench.csv"
    outcome = CliRunner().invoke(app, ["bench", "--only", "growth", "--small", "--device", "cpu", "--out", str(file)])
    assert outcome.exit_code == 0, outcome.exception
    assert [row["case"].split(",")[0] for row in csv.DictReader(file.open())] == ["DNN 4×32", "DNN 4×64", "DNN 4×128"]
    assert (tmp_path / "growth.png").exists()
