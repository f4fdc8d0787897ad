"""The command line as a user meets it. Signals, kills and full disks are in test_kills.py."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import gft as library
from gft import cli, errors
from gft.errors import install_hint
from gft.lab import demo
from gft.lab.recipe import PARTS

COMMAND = [sys.executable, "-m", "gft"]
SMALL = ["--device", "cpu", "--set", "width=32", "--no-tensorboard"]

class Done(NamedTuple):
    code: int
    out: str
    error: str


@pytest.fixture
def gft(monkeypatch, capsys, tmp_path):
    """gft("train", …) in an empty folder -> exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    precision = torch.get_float32_matmul_precision()

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gft", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        return Done(exited.value.code or 0, *capsys.readouterr())

    yield run
    torch.set_float32_matmul_precision(precision)


# ---------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(("arguments", "says"), [
    (["train", "mnist-dnn-hybird-4bit"], "did you mean mnist-dnn-hybrid-4bit"),
    (["train", "digits-fp", "--set", "width=fast"], "width takes a value of type int"),
    (["train", "digits-quantized-2bit", "--set", "bits=9", *SMALL], "2 to 8 bits"),
    pytest.param(["train", "digits-quantized-2bit", "--set", "integers.lr=3", *SMALL], "give a number from 0 to 1"),
    (["train", "digits-fp", "--set", "bit=4"], "did you mean bits?"),
    (["train", "digits-fp", "--set", "integers.bit=4"], "did you mean integers.bits?"),
    (["train", "digits-fp", "--set", "integer.bits=4"], "did you mean integers.bits?"),
    (["train", "digits-fp", "--set", "colour=red"], "gft train --help lists the settings"),
    (["recipes", "gtp"], "no recipe's name contains 'gtp'"),
    (["eval", "nowhere"], "is not a run folder"),
    (["report", "nowhere"], "is not the folder of a table"),
    (["data", "fetch", "cifar"], "no data set 'cifar'"),
    (["reproduce", "table-9"], "no table 'table-9'"),
    (["reproduce", "depth", "--paper", "--packed"], "ask for one at a time"),
    (["bench", "--only", "speed"], "--only speed: choose one of"),
], ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "")
def test_mistakes_get_one_sentence(arguments, says, gft, tmp_path):
    done = gft(*arguments)
    assert done.code == 2
    assert done.error.startswith("error: ")
    assert says in done.error
    assert len(done.error.strip().splitlines()) == 1
    assert not any(tmp_path.iterdir())  # a mistake leaves nothing behind that a second try would trip over


@pytest.mark.parametrize("arguments", [
    ["train", "digits-fp", "--steps", "2", *SMALL], ["demo"], ["bench", "--only", "votes", "--small", "--device", "cpu"],
    ["reproduce", "depth", "--seeds", "1", "--device", "cpu"], ["energy", "table"], ["hardness", "agree"],
    ["hardness", "study"],
], ids=lambda arguments: " ".join(arguments[:2]))
def test_an_out_folder_that_cannot_be_made_gets_one_sentence(arguments, gft, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = gft(*arguments, "--out", tmp_path / "file" / "out")
    assert done.code == 2
    assert "cannot be written" in done.error
    assert len(done.error.strip().splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_unknown_options_are_typers_to_refuse(gft):
    done = gft("train", "digits-fp", "--stepps", 3)
    assert done.code == 2
    assert "No such option" in done.error


@pytest.mark.parametrize("bug", [ValueError, TypeError, FileNotFoundError, PermissionError])
def test_a_bug_of_ours_keeps_its_traceback(bug, gft, monkeypatch):
    def broken(*_):
        raise bug("ours")

    monkeypatch.setattr(demo, "demo", broken)
    with pytest.raises(bug, match="ours"):
        gft("demo")


# ---------------------------------------------------------------------------------------------------- commands


def test_recipes_are_listed_for_people_and_for_programs(gft):
    listed = json.loads(gft("recipes", "--json").out)
    assert {"mnist-dnn-fp", "mnist-dnn-hybrid-4bit", "mnist-dnn-quantized-2bit-paper"} <= {one["name"] for one in listed}
    shown = gft("recipes").out.splitlines()[1:]
    assert [line.split()[0] for line in shown] == [one["name"] for one in listed]


def test_recipes_are_whole_lines_without_downloads_first_and_can_be_filtered(gft):
    head, *lines = gft("recipes").out.splitlines()
    assert head.split() == ["recipe", "data", "rule", "votes", "steps", "paper"]
    assert max(map(len, lines)) <= 80
    assert all(len(line.split()) == 6 for line in lines)
    assert not any("…" in line for line in lines)
    needs_nothing = [line.split()[1] in ("digits", "verses") for line in lines]
    assert needs_nothing == sorted(needs_nothing, reverse=True)
    assert 0 < sum(needs_nothing) < len(lines)
    names = [line.split()[0] for line in lines]
    chosen = [line.split()[0] for line in gft("recipes", "GPT", "2bit").out.splitlines()[1:]]
    assert chosen == [name for name in names if "gpt" in name and "2bit" in name]


def test_version(gft):
    assert gft("--version").out == f"gft {library.__version__}\n"


def test_help_lists_commands_and_settings_in_whole_words(gft):
    for command in (["--help"], ["train", "--help"], ["energy", "--help"], ["hardness", "study", "--help"]):
        lines = gft(*command).out.splitlines()
        assert lines[0].startswith("Usage: gft")
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines)
    before, _, settings = gft("train", "--help").out.partition("Settings for --set")
    assert "--checkpoint-every" in before
    for part, kind in PARTS.items():
        assert f"\n    {part} " in settings
        assert all(field.name in settings for field in dataclasses.fields(kind))


def test_brackets_in_a_path_are_no_markup(gft, tmp_path):
    done = gft("train", "digits-fp", "--steps", 2, "--out", "a[/red]b", *SMALL)
    assert done.code == 0, done.error
    assert "Everything is in a[/red]b" in done.out
    assert (tmp_path / "a[/red]b" / "result.json").exists()


def test_a_run_without_a_terminal_writes_lines(gft):
    done = gft("train", "digits-fp", "--steps", 30, "--out", "run", *SMALL)
    first, last, sentence = done.out.splitlines()
    assert re.fullmatch(r"digits-fp  20/30  loss \d\.\d+(  val \S+)?  elapsed 0:00:\d\d  ETA 0:00:\d\d", first)
    assert re.fullmatch(r"digits-fp  30/30  loss \d\.\d+  val \S+  elapsed 0:00:\d\d", last)
    assert sentence.startswith("accuracy ")


def test_a_small_bench_holds_nothing_to_a_bar(gft):
    done = gft("bench", "--only", "votes", "--small", "--device", "cpu", "--out", "bench.csv")
    assert done.code == 0, done.error
    assert "ratio" in done.out
    assert not any(mark in done.out for mark in ("✓", "✗", "at least", "━"))


@pytest.mark.parametrize("here", [True, False], ids=["in the clone", "elsewhere"])
def test_install_hints_name_the_clone(here, monkeypatch, tmp_path):
    clone = Path(library.__file__).parents[1]
    monkeypatch.chdir(clone if here else tmp_path)
    assert install_hint("lab") == ("pip install -e '.[lab]'" if here else f"pip install -e '{clone}[lab]'")


def test_install_hints_of_an_installed_package_name_the_index(monkeypatch, tmp_path):
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "gft" / "errors.py"))
    assert install_hint("lab") == "pip install 'gft-torch[lab]'"


def test_data_list_says_where_to_look(gft):
    assert "verses" in gft("data", "list").out


def test_train_then_eval(gft, tmp_path):
    done = gft("train", "digits-hybrid-4bit", "--steps", 30, "--out", "run", *SMALL)
    assert done.code == 0, done.error
    value = json.loads((tmp_path / "run" / "result.json").read_text())["value"]
    assert f"accuracy {value:.2f} on the val split" in gft("eval", "run", "--device", "cpu").out


def test_a_damaged_checkpoint_is_named_and_left_alone(gft, tmp_path):
    gft("train", "digits-quantized-2bit", "--steps", 5, "--out", "run", *SMALL)
    checkpoint = tmp_path / "run" / "checkpoint" / "state.safetensors"
    damaged = checkpoint.read_bytes()[:-100]
    checkpoint.write_bytes(damaged)
    done = gft("eval", "run")
    assert done.code == 2
    assert "damaged or cut short" in done.error
    assert checkpoint.read_bytes() == damaged
