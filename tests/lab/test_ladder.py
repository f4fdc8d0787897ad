"""The ladder on real text: its networks and rows, tuning on val, the table that reads the test split, its figures."""

import dataclasses
import json
import math

import pytest
import torch
from typer.testing import CliRunner

import gft
from gft.cli import app
from gft.errors import UsageError
from gft.lab import build, data, ladder, pages, recipes, tables, train
from gft.lab.data.sonnets import SONNETS
from gft.lab.ladder import sheet
from gft.lab.models import Llama
from gft.lab.muon import Muon
from gft.lab.stopwatch import Stopwatch
from gft.lab.tuning import LADDER
from gft.optim import LR

pytest.importorskip("tokenizers")
TINY = ["width=16", "depth=1", "heads=2", "context=16", "vocabulary=300", "batch=4", "tokens=1280", "eval_every=10"]


@pytest.fixture
def text(empty):
    """A few sonnets in the place of Wikipedia."""
    (empty / "wiki").mkdir(parents=True)
    for split, part in (("train", SONNETS), ("val", SONNETS[:600]), ("test", SONNETS[-700:])):
        (empty / "wiki" / f"wiki-{split}.txt").write_text(part)
    return empty


def test_bodies_have_about_the_weights_they_are_named_for():
    for name, named in (("10m", 10e6), ("30m", 30e6), ("85m", 85e6), ("300m", 300e6), ("1b", 1e9)):
        recipe = ladder.recipe(name, "adamw")
        with torch.device("meta"):
            model = Llama(300, 16, recipe.model.width, recipe.model.depth, recipe.model.heads)
        weights = sum(weight.numel() for weight in model.blocks.parameters() if weight.dim() == 2)
        assert weights == ladder.body_weights(recipe.config()["model"])
        assert weights == pytest.approx(named, rel=0.08)
    plain = recipes.find("wiki-ladder-85m-adamw")
    whole, grouped = (ladder.body_weights(dataclasses.asdict(one.model)) for one in (plain, plain.changed(["kv_heads=4"])))
    assert grouped == whole - 12 * 2 * 768 * 512


def test_rows_train_the_blocks_in_their_own_way_and_all_else_by_adamw(small):
    kinds = {"adamw": [torch.optim.AdamW], "muon": [Muon, torch.optim.AdamW], "gft-3bit": [gft.GFT, torch.optim.AdamW],
             "bitnet-2bit": [torch.optim.AdamW] * 2}
    for row, optimizers in kinds.items():
        recipe = small(f"wiki-ladder-10m-{row}", "integers.lr=0.05" if row == "bitnet-2bit" else "steps=2")
        model = build.build_model(recipe, train.data_of(recipe))
        built = build.build_optimizer(recipe, model, 0)
        assert [type(one) for one in built.optimizers] == optimizers
        decays = {id(weight): group["weight_decay"] for one in built.optimizers if not isinstance(one, gft.GFT)
                  for group in one.param_groups for weight in group["params"]}
        assert len(decays) == len(gft.dense(model))
        assert all((decays[id(weight)] == 0) == (weight.dim() == 1) for weight in gft.dense(model))
        if row in ("adamw", "muon", "gft-2bit"):
            halved = build.build_optimizer(recipe.changed(["dense.blocks=0.5"]), model, 0)
            halved = [part for part in halved.optimizers if not isinstance(part, gft.GFT)]
            rates = {id(weight): group["lr"] for part in halved for group in part.param_groups for weight in group["params"]}
            blocks = {id(weight) for name, weight in model.blocks.named_parameters()
                      if name.endswith("log_gain") or (weight.dim() == 2 and row != "gft-2bit")}
            assert {key: rate / recipe.dense.lr for key, rate in rates.items()} == {
                key: 0.5 if key in blocks else 1 for key in rates}
    assert {layer.log_gain is not None for layer in gft.layers.quantized_layers(build.build_model(
        small("wiki-ladder-10m-gft-2bit"), data.load("verses", 16))).values()} == {True}  # as a user's Llama has them


def test_settings_of_text_are_checked(refuses):
    recipe = recipes.find("wiki-ladder-10m-adamw")
    assert recipe.changed(["tokens=1e6"]).schedule.steps == round(1e6 / 16 / 1024)
    assert recipe.changed(["tokens=1e6", "warmup=3"]).schedule.warmup == 3
    assert recipe.changed(["batch=8", "tokens=42598400"]).schedule == dataclasses.replace(
        recipe.schedule, steps=5200, warmup=200, eval_every=260)
    with refuses(UsageError, "set steps, or data.context too"):
        recipes.find("digits-fp").changed(["tokens=5"])
    with refuses(UsageError, "dropout=0.1 would not be used"):
        recipe.changed(["dropout=0.1"])
    with refuses(UsageError, "kv_heads=2 would not be used"):
        recipes.find("verses-gpt-fp").changed(["kv_heads=2"])
    with refuses(UsageError, "dense.blocks=0.5 would not be used"):
        recipes.find("wiki-ladder-10m-gft-4bit").changed(["dense.blocks=0.5"])  # 4 bits have no gains by default
    with refuses(UsageError, "dense.optimizer=muon trains the float matrices"):
        recipes.find("wiki-ladder-10m-gft-2bit").changed(["optimizer=muon"])


# ---------------------------------------------------------------------------------------------------- chosen settings


def test_rates_are_carried_to_other_widths_and_gfts_own_stays():
    chosen = {"adamw": {"10m": {"settings": {"dense.lr": 4e-3, "dense.weight_decay": 0.3, "dense.blocks": 0.25}},
                        "30m": {"settings": {"dense.lr": 2e-3, "dense.weight_decay": 0.1}}},
              "bitnet-2bit": {"30m": {"settings": {"dense.lr": 8e-3, "integers.lr": 8e-3}}},
              "gft-2bit": {"10m": {"settings": {"integers.lr": 0.2}}}}

    def settings(name):
        recipe = ladder.with_chosen(recipes.find(f"wiki-ladder-{name}"), chosen)
        return recipe.dense.lr, recipe.dense.weight_decay, recipe.integers.lr

    assert settings("10m-adamw")[:2] == (4e-3, 0.3)
    shares = [ladder.with_chosen(recipes.find(f"wiki-ladder-10m-{row}"), chosen).dense.blocks
              for row in ("muon", "gft-2bit", "gft-4bit", "bitnet-2bit")]
    assert shares == [0.25, 0.25, 1, 1]  # for blocks that have floats of their own: matrices or gains
    assert settings("85m-adamw")[:2] == (four(2e-3 * 512 / 768), 0.1)  # from the nearest smaller size
    assert settings("1b-gft-2bit") == (four(2e-3 * 512 / 2048), 0.1, 0.2)  # its own lr is measured so that it stays
    assert settings("10m-gft-4bit") == (4e-3, 0.3, 0.2)  # as at other bits
    assert settings("10m-gft-2bit-packed") == (4e-3, 0.3, LR)  # but of no other kind of row
    assert settings("10m-bitnet-4bit") == (four(8e-3 * 512 / 384), 0.3, four(8e-3 * 512 / 384))
    assert settings("30m-dqt-4bit") == (2e-3, 0.1, 3e-4)
    plain = recipes.find("wiki-ladder-85m-adamw")
    assert ladder.with_chosen(plain, {}) == plain


def test_the_command_tries_settings_that_are_words_and_says_what_it_chose(text, tmp_path):
    options = [part for setting in TINY for part in ("--set", setting)]
    options += [part for axis in ("lr=0.1", "integers.gain=true", "integers.threshold=auto") for part in ("--try", axis)]
    outcome = CliRunner().invoke(app, ["tune", "--rows", "gft-4bit", "--sizes", "10m", *options, "--device", "cpu", "--out",
                                       str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    assert "10m gft-4bit: integers.lr=0.1, integers.gain=true, integers.threshold=auto" in outcome.output.replace("\n", " ")
    (line,) = (tmp_path / "wiki-ladder" / "tuning" / "runs.jsonl").read_text().splitlines()
    assert json.loads(line)["config"]["integers"]["threshold"] == "auto"


def test_settings_that_are_words_are_chosen_too():
    def line(settings, value):
        return {"recipe": f"wiki-ladder-10m-gft-4bit@{settings}", "value": value, "metric": "loss", "steps": 1, "seed": 0,
                "commit": "", "device": "", "torch": ""}

    chosen = LADDER.chosen([line("integers.lr=0.1,integers.gain=true,integers.threshold=auto", 3.7),
                            line("integers.lr=0.2,integers.gain=false,integers.threshold=1", 3.8),
                            line("integers.lr=0.4", 3.9)])
    assert chosen["gft-4bit"]["10m"]["at_the_end_of_the_grid"] == ["integers.lr"]
    for size in ("10m", "85m"):
        integers = ladder.with_chosen(recipes.find(f"wiki-ladder-{size}-gft-4bit"), chosen).integers
        assert (integers.lr, integers.gain, integers.threshold) == (0.1, True, "auto")


def four(number):
    return float(f"{number:.4g}")


def test_tuning_chooses_on_val_what_the_table_then_takes(text, tmp_path, refuses, monkeypatch):
    monkeypatch.setattr(sheet, "draw", lambda *_: None)  # drawn, and looked at, by another test
    out = tmp_path / "out"
    report = LADDER.tune(out, ["bitnet-2bit"], ["10m"], ["lr=1e-4,3e-2,1e30", "blocks=0.5", "dense.weight_decay=0.1"],
                         [*TINY, "clip=none"], "cpu")
    best = report["chosen"]["bitnet-2bit"]["10m"]
    assert best["settings"] == {"dense.lr": 0.03, "integers.lr": 0.015, "dense.weight_decay": 0.1}
    assert best["tried"] + len(report["diverged"]) == 3
    assert best["val"] == min(one["val"] for one in report["tried"])
    assert json.loads((out / "wiki-ladder" / "tuned.json").read_text()) == report
    assert not list((text / "cache").glob("*test*"))  # nothing was chosen on the test split
    (row,) = tables.reproduce({"wiki-ladder": out / "wiki-ladder"}, seeds=1, rows=["10m-bitnet-2bit"], settings=TINY,
                              device="cpu")["wiki-ladder"]
    line = json.loads((out / "wiki-ladder" / "runs.jsonl").read_text())
    assert (line["config"]["integers"]["lr"], line["config"]["dense"]["lr"]) == (0.015, 0.03)
    assert row["test_gap"] is None  # there is no AdamW to compare with
    with refuses(UsageError, "write KEY=VALUE,VALUE"):
        LADDER.grid_of("adamw", ["lr"])
    with refuses(UsageError, "no row 'sgd' of size '10m'"):
        LADDER.trials("10m", "sgd", {"lr": ("1",)})
    with refuses(UsageError, "gft-2bit has a rate for its blocks alone"):
        LADDER.trials("10m", "gft-2bit", {"blocks": ("0.5",)})
    for row in LADDER.tuned:
        settings = {tuple(sorted(LADDER.tried({"recipe": one.name, "value": 1, "steps": 1, "seed": 0, "commit": "", "device":
                                               "", "torch": ""})["settings"].items())) for one in
                    LADDER.trials("30m", row, LADDER.grid_of(row, []))}
        assert len(settings) == 16


# ---------------------------------------------------------------------------------------------------- the table


def test_the_table_reads_the_test_split_and_goes_on_where_it_was(text, tmp_path, monkeypatch):
    wanted = ["wiki-ladder-10m-adamw", "wiki-ladder-10m-gft-2bit", "10m-eco-4bit", "30m-muon"]
    chosen = {"rows": wanted, "settings": TINY, "device": "cpu"}
    rows = tables.reproduce({"wiki-ladder": tmp_path}, seeds=1, **chosen)["wiki-ladder"]
    assert [row["name"] for row in rows] == ["10M, AdamW", "10M, GFT 2bit", "10M, ECO 4bit", "30M, Muon + AdamW"]
    adamw, ternary, eco, muon = rows
    loaded = data.load("wiki", 16, 300)
    line = json.loads((tmp_path / "runs.jsonl").read_text().splitlines()[0])
    kept = loaded.kept("test")
    assert line["test_bits_a_byte"] == pytest.approx(line["test"] * len(kept.tokens) / kept.bytes / math.log(2))
    assert line["test"] != line["value"]
    assert line["tokens"] == 1280
    assert ternary["test_gap"] == pytest.approx(ternary["test_bits_a_byte"] - adamw["test_bits_a_byte"])
    assert (adamw["training_bytes_per_weight"], adamw["state_bytes_per_weight"]) == pytest.approx((16, 12), abs=0.02)
    assert muon["training_bytes_per_weight"] - muon["state_bytes_per_weight"] == 4
    estimates = [json.loads(one)["energy_estimate_j"] for one in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [estimate is None for estimate in estimates] == [False, False, True, True]  # the paper has no formula for these
    assert ternary["training_bytes_per_weight"] - ternary["state_bytes_per_weight"] == 4  # int32 votes
    assert eco["flips_a_weight"] > 0
    assert adamw["flips_a_weight"] is None
    assert adamw["loss_at_equal_time"] == adamw["mean"]
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    beside = sheet.ladder_rows(rows, [line | {"alone": False} for line in lines])
    assert {(row["step_ms"], row["loss_at_equal_time"]) for row in beside} == {(None, None)}  # a shared clock says nothing
    for name in ("curves", "gap", "memory"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    text_of_table = (tmp_path / "table.md").read_text()
    assert text_of_table.count("\n| 10M, ") == 3
    assert "read once" in text_of_table
    with monkeypatch.context() as patch:
        patch.setattr(train, "build_model", None)  # nothing is trained again
        patch.setattr(sheet, "draw", lambda *_: None)
        assert tables.reproduce({"wiki-ladder": tmp_path}, seeds=1, **chosen)["wiki-ladder"] == rows
    # The same table in the documentation.
    (tmp_path / "results").mkdir()
    assert pages.wiki_ladder(tmp_path / "results").startswith("Not run yet")
    tmp_path.joinpath("results", "wiki-ladder").symlink_to(tmp_path)
    page = pages.wiki_ladder(tmp_path / "results")
    assert page.startswith("![bits a byte against bytes a weight](../results/wiki-ladder/memory.png)")
    assert page.count("\n| 10M, ") == 3


@pytest.mark.parametrize("row", ["eco-4bit", "gft-2bit-packed"])
def test_a_run_that_was_killed_ends_as_one_that_was_not(row, text, tmp_path, refuses):
    recipe = recipes.find(f"wiki-ladder-10m-{row}").changed([*TINY, "tokens=768"])
    whole = list(train.training(recipe, tmp_path / "whole", device="cpu"))[-1].result
    killed = train.training(recipe, tmp_path / "killed", device="cpu", checkpoint_every=5)
    for _ in range(8):
        next(killed)
    killed.close()
    resumed = list(train.training(recipe, tmp_path / "killed", device="cpu", resume=True))
    assert resumed[0].step == 6
    assert (resumed[-1].result["value"], resumed[-1].result["flips"]) == (whole["value"], whole["flips"])
    assert whole["test"] is None  # only the table's command reads it
    value, _ = train.evaluate_run(tmp_path / "whole", "val", "cpu")
    assert value == whole["value"]
    (text / "wiki" / "wiki-train.txt").write_text(SONNETS.upper())  # another vocabulary: its numbers mean something else
    with refuses(train.TrainingError, "has other characters or tokens now"):
        train.evaluate_run(tmp_path / "whole", "val", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["adamw", "muon", "gft-2bit", "gft-2bit-momentum", "gft-4bit-packed", "bitnet-2bit",
                                 "dqt-4bit", "eco-2bit"])
def test_a_captured_run_is_the_run_step_by_step(row, text, tmp_path, monkeypatch):
    tiny = [setting for setting in TINY if not setting.startswith(("width", "heads"))]
    recipe = recipes.find(f"wiki-ladder-10m-{row}").changed([*tiny, "width=128", "heads=4"])
    captured = list(train.training(recipe, tmp_path / "captured", device="cuda"))[-1].result
    monkeypatch.setattr(gft, "Captured", lambda step, optimizer: step)
    plain = list(train.training(recipe, tmp_path / "plain", device="cuda"))[-1].result
    assert captured["value"] == pytest.approx(plain["value"], rel=0.01)
    assert captured["flips"] == pytest.approx(plain["flips"], rel=0.05)
    assert captured["value"] < 0.95 * math.log(300)
    assert captured["peak_bytes"] > 0


def test_sizes_have_their_seeds_and_a_whole_name_is_one_row():
    assert [tables.seeds_of(ladder.recipe(size, "adamw"), None) for size in ladder.SIZES] == [3, 3, 1, 1, 1]
    assert tables.seeds_of(ladder.recipe("85m", "adamw"), 2) == 2
    assert [one.name for one in tables.recipes_of("wiki-ladder", rows=["wiki-ladder-10m-gft-2bit"])] == [
        "wiki-ladder-10m-gft-2bit"]
    several = [one.name.removeprefix("wiki-ladder-10m-gft-2bit")
               for one in tables.recipes_of("wiki-ladder", rows=["10m-gft-2bit"])]
    assert several == ["", "-momentum", "-packed", "-half", "-paper"]
    assert "wiki-ladder" not in tables.folders_of(["all"], "default", tables.Path("x"))


def test_figures_tell_all_rows_apart_and_show_momentum_dashed_in_the_colour_of_its_row():
    looks = sheet._looks([{"kind": kind} for kind in ladder.ROWS])
    assert len({tuple(look.values()) for look in looks.values()}) == len(ladder.ROWS)
    for bits in (4, 3, 2):
        plain, momentum = looks[f"gft-{bits}bit"], looks[f"gft-{bits}bit-momentum"]
        assert plain["color"] == momentum["color"]
        assert (plain["linestyle"], momentum["linestyle"]) == ("-", "--")


def test_equal_time_is_read_off_the_curve_where_adamw_ended():
    curve = [[10, 4.0], [20, 3.0], [40, 2.0]]
    adamw = [{"step_ms": 2.0, "steps": 40, "curve": curve}]
    assert sheet.at_equal_time(adamw, adamw) == 2.0
    assert sheet.at_equal_time([{"step_ms": 4.0, "steps": 40, "curve": curve}], adamw) == 3.0
    assert sheet.at_equal_time([{"step_ms": 80 / 30, "steps": 40, "curve": curve}], adamw) == pytest.approx(2.5)
    assert sheet.at_equal_time([{"step_ms": 1.0, "steps": 40, "curve": curve}], adamw) == 2.0
    assert sheet.at_equal_time([{"step_ms": 90.0, "steps": 40, "curve": curve}], adamw) == 4.0
    assert sheet.at_equal_time(adamw, []) is None


def test_no_other_row_beats_those_of_the_front_in_both():
    rows = [{"training_bytes_per_weight": size, "test_bits_a_byte": bits}
            for size, bits in ((16, 1.40), (5, 1.42), (4.3, 1.50), (13, 1.45), (5, 1.60))]
    assert [row["test_bits_a_byte"] for row in sheet.unbeaten(rows)] == [1.50, 1.42, 1.40]


# ---------------------------------------------------------------------------------------------------- the stopwatch


def test_a_stopwatch_counts_steps_alone():
    class Counter:
        name = about = "test"

        def joules(self):
            return 50 * now[0]

    now = [0.0]
    watch = Stopwatch([Counter()], seconds=7.0, joules=1.0, clock=lambda: now[0])
    watch.start(0)
    for step, took in ((20, 10.0), (40, 2.0), (60, 2.4), (62, 9.0)):  # the first compiles, the last is a rest of two steps
        now[0] += took
        watch.mark(step)
    watch.stop()
    now[0] += 1000  # an evaluation
    watch.start(62)
    watch.mark(62)
    watch.stop()
    assert watch.seconds == pytest.approx(7 + 23.4)
    assert watch.joules == pytest.approx(1 + 50 * 23.4)
    assert watch.step_ms == pytest.approx(110)
    assert Stopwatch([]).joules is None
    assert Stopwatch([]).step_ms is None
