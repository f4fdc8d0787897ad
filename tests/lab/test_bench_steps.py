"""Steps beside AdamW's: every network runs in every way, at sizes that say nothing about speed."""

import csv
import sys

import pytest
import torch
from typer.testing import CliRunner

import gft
from gft.cli import app
from gft.lab import bench
from gft.lab.bench import first, steps, written
from gft.lab.bench.run import has_parts
from gft.lab.bench.works import llama, of_users, works
from gft.layers import quantized_layers
from gft.ops.native.build import library

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(steps, "ROUNDS", 1)
    monkeypatch.setattr(steps, "STEPS", 1)


@pytest.fixture
def in_this_process(monkeypatch):
    """First steps without a process each."""
    monkeypatch.setattr(first, "in_a_process", lambda task, caches: first.measure(**task))


def chosen(text: str, **options) -> list[bench.Row]:
    return list(bench.step(CPU, small=True, wanted=lambda name: has_parts(name, text), **options))


def test_every_network_has_its_rows(in_this_process):
    pytest.importorskip("transformers")
    measured = list(bench.step(CPU, small=True))
    assert [f"{row.case}, {row.peer_is.rpartition(', ')[2]}" for row in measured] == steps.names(CPU, small=True)
    assert {row.case.split(",")[0].split()[0] for row in measured} == {"DNN", "nanoGPT", "ViT", "Llama", "ResNet-18",
                                                                       "ResNet-50", "first"}
    for row in measured:
        assert row.ours > 0
        assert row.peer > 0
        assert row.ratio == pytest.approx(row.ours / row.peer)


def test_a_step_runs_in_all_three_ways(monkeypatch):
    """torch.compile without its code generator, which takes minutes on a CPU; gft.Captured leaves a CPU's step as it is."""
    pytest.importorskip("transformers")
    compiled = []
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or real(model, backend="eager"))
    rows = chosen("llama 2x32, 4 bit", ways=tuple(bench.WAYS))
    assert [row.peer_is for row in rows] == [f"fused AdamW fp32, {way}" for way in ("eager", "compiled", "captured")]
    assert len({row.bar for row in rows}) == 3  # a bar for each way
    assert len(compiled) == 2  # each side once, for both ways


@pytest.mark.parametrize("work", of_users(small=True), ids=lambda work: work.name.split()[0].strip(","))
def test_all_layers_of_the_body_are_integers_and_learn(work):
    if work.needs:
        pytest.importorskip(work.needs)
    side = bench.Side(work, CPU, bench.Ours(4), "fp32")
    floats = {name for name, module in side.model.named_modules() if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d))}
    assert floats <= {"lm_head", "stem.0", "head"}
    before = [weight.clone() for weight in gft.quantized(side.model)]
    bench.rows.repeat(side.steps(compiled=False, captured=True), 3)
    assert all(not torch.equal(one, other) for one, other in zip(before, gft.quantized(side.model), strict=True))
    family = work.name.split()[0].strip(",")
    assert len(quantized_layers(side.model)) == {"Llama": 14, "ResNet-18": 5, "ResNet-50": 8}[family]


def test_adamw_in_float32_is_the_peer_on_a_cpu_and_one_more_on_a_gpu():
    (row,) = chosen("dnn 2x64, batch 256")
    assert (row.peer_is, row.bar) == ("fused AdamW fp32, eager", "at most 1")
    (work, *_) = works(CPU, small=True)
    case = steps.Case("time", bench.Ours(2), "captured", "")
    assert [steps.bar_of(work, case, peer, "bf16") for peer in ("bf16", "fp32")] == [1.0, 0.6]


def test_low_precision_has_rows_of_its_own_beside_the_same_peer():
    pytest.importorskip("transformers")
    rows = chosen("llama 2x48")
    assert [row.case.removeprefix("Llama 2×48, 2×16 tokens, ") for row in rows] == ["4 bit", "4 bit fp8", "4 bit int8",
                                                                                    "2 bit fp8"]
    assert len({row.peer for row in rows}) == 1
    assert [row.bar for row in rows] == ["at most 1", *["at most 0.75"] * 3]


def test_momentum_has_rows_beside_muon_alone():
    pytest.importorskip("transformers")
    (row,) = chosen("llama 2x32, 2 bit momentum")
    assert (row.peer_is, row.bar) == ("fused AdamW fp32 and Muon, eager", "at most 1")
    (work,) = (work for work in of_users(small=True) if work.peak_bar)
    ours = bench.Side(work, CPU, bench.Ours(2, momentum=True), "fp32").optimizer.optimizers[0]
    assert ours.param_groups[0]["rule"] == gft.Rounding(momentum=0.9, orthogonalize=True)
    muon, adamw = bench.Side(work, CPU, None, "fp32 and Muon").optimizer.optimizers
    assert sum(weight.dim() == 2 for weight in muon.param_groups[0]["params"]) == 14  # as many as would be integers
    assert sum(weight.dim() == 2 for weight in adamw.param_groups[0]["params"]) == 2  # embedding and head


def test_layers_of_llama_are_as_wide_as_its_paper_has_them():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = llama(2, 1024, 8).build()
    assert model.config.intermediate_size == 2752  # 8/3 of 1024 is 2730.7; 43 tiles of 64
    assert model.config.num_attention_heads == 16
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_peak_memory_is_of_each_side_alone(monkeypatch):
    """A GPU's counters, played by numbers: what others hold is left out, ours and the peer's are not."""
    pytest.importorskip("transformers")
    (work,) = (work for work in of_users(small=True) if work.peak_bar)
    held, most = iter([100, 400]), iter([100 + 60, 400 + 90])
    monkeypatch.setattr(steps, "allocated", lambda device: next(held))
    monkeypatch.setattr(steps, "peak", lambda device: next(most))
    cases = [case for case in steps.cases(work, ["eager"], has_peak=True) if (case.kind, case.ours.bits) == ("peak", 2)]
    (row,) = steps.rows_of(work, cases, CPU)
    assert row.case == f"peak memory, {work.name}, 2 bit"
    assert row.ratio == pytest.approx(60 / 90)
    assert row.met


def test_a_network_whose_package_is_missing_is_left_out_and_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert chosen("llama") == []
    said = capsys.readouterr().out
    assert "needs transformers; install it with: pip install" in said


def test_a_first_step_has_a_process_and_caches_of_its_own(tmp_path):
    task = {"device": "cpu", "way": "eager", "precision": "fp32", "small": True, "bits": 2}
    took = first.in_a_process(task, tmp_path)
    assert 0 < took < 60
    if library() is not None:  # there is a C compiler
        assert list((tmp_path / "xdg_cache_home" / "gft").iterdir())


def test_the_bar_of_a_first_step_is_what_it_takes_more(monkeypatch):
    taken = iter([13.0, 4.0, 2.0, 1.0])  # ours with empty and with kept caches, AdamW's
    monkeypatch.setattr(first, "in_a_process", lambda task, caches: next(taken))
    empty, kept = first.first(CPU, True, lambda name: True, ["eager"])
    assert (empty.ours, empty.peer, empty.met) == (13.0, 2.0, False)
    assert (kept.ours, kept.peer, kept.met) == (4.0, 1.0, True)


# ---------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(("text", "fits"), [("llama", True), ("Llama 12x768", True), ("12×768, 2 bit", True),
                                            ("eager, llama", True), ("24x1024", False), ("llama, 4 bit", False)])
def test_rows_are_chosen_by_parts_of_their_names(text, fits):
    assert has_parts("Llama 12×768, 16×1024 tokens, 2 bit, eager", text) is fits


def test_bench_runs_only_the_cases_asked_for(tmp_path):
    file = tmp_path / "bench.csv"
    options = ["--small", "--device", "cpu", "--out", str(file)]
    outcome = CliRunner().invoke(app, ["bench", "--only", "step", "--case", "resnet-18, 4 bit", "--case", "dnn", *options])
    assert outcome.exit_code == 0, outcome.exception
    assert [row["case"] for row in csv.DictReader(file.open())] == ["DNN 2×64, batch 256, 2 bit",
                                                                    "ResNet-18, batch 2 of 8×8, 4 bit"]


@pytest.mark.parametrize(("arguments", "match"), [(["--only", "step", "--case", "gpt-7"], "in no row's name"),
                                                  (["--case", "llama"], "--only step"),
                                                  (["--only", "votes", "--case", "llama"], "--only step")])
def test_cases_that_do_not_exist_are_refused(arguments, match, tmp_path):
    outcome = CliRunner().invoke(app, ["bench", *arguments, "--small", "--device", "cpu", "--out", str(tmp_path / "x.csv")])
    assert match in str(outcome.exception)


# ---------------------------------------------------------------------------------------------------- in the documentation


def kept(case: str, peer_is: str, ratio: float, device: str = "NVIDIA H200", **others: str) -> dict[str, str]:
    """A line of bench.csv."""
    return {"bench": "step", "case": case, "ours": str(10 * ratio), "peer": "10.0", "unit": "ms", "peer_is": peer_is,
            "ratio": str(ratio), "bar": "at most 1.1", "met": str(ratio <= 1.1), "commit": "abc", "device": device, **others}


LLAMA, DNN = "Llama, 2 bit", "DNN, 2 bit"
ROWS = [
    kept(LLAMA, "fused AdamW bf16, eager", 3.0),
    kept(LLAMA, "fused AdamW bf16, eager", 1.05, commit="new"),
    kept(LLAMA, "fused AdamW bf16, compiled", 1.5),
    kept(LLAMA, "fused AdamW bf16, compiled, replayed", 2.0),  # the old word for captured
    kept(LLAMA, "fused AdamW bf16, captured", 0.9),
    kept(DNN, "fused AdamW fp32", 1.7, "cpu (aarch64, 2 threads)"),
    kept(DNN, "fused AdamW fp32, eager", 0.8, "cpu (x86_64, 1 threads)"),
    kept("4096³", "bfloat16 product", 1.6, bench="votes"),
]


def test_the_table_of_steps_has_a_line_a_case_and_a_column_a_way():
    lines = written.steps_table(ROWS).splitlines()[2:]
    assert lines == [
        "| Llama, 2 bit | bf16 | 1.05 (10.5 / 10 ms; at most 1.1) | **1.50** (15 / 10 ms; at most 1.1) | "
        "0.90 (9 / 10 ms; at most 1.1) | new, abc | NVIDIA H200 |",
        "| DNN, 2 bit | fp32 | **1.70** (17 / 10 ms; at most 1.1) |  |  | abc | cpu (aarch64, 2 threads) |",
        "| DNN, 2 bit | fp32 | 0.80 (8 / 10 ms; at most 1.1) |  |  | abc | cpu (x86_64, 1 threads) |"]
    (other,) = written.other_table(ROWS).splitlines()[2:]
    assert other.startswith("| votes | 4096³ |")


def test_the_picture_shows_every_case_of_steps(tmp_path):
    written.draw(ROWS, [tmp_path / "step.png", tmp_path / "step.svg"])
    assert (tmp_path / "step.png").stat().st_size > 1000
    drawn = (tmp_path / "step.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("Llama, 2 bit", "DNN, 2 bit, cpu (aarch64)", "captured"))
