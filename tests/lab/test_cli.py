"""The command line as a user meets it: in this process, and in one of its own where it is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from gft import cli
from gft.checkpoint import read_checkpoint
from gft.lab import demo

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
    assert "mnist-dnn-quantized-2bit-paper" in gft("recipes").out


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


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(gft, tmp_path):
    arguments = ["train", "digits-hybrid-4bit", "--steps", "120", "--checkpoint-every", "3", "--seed", "5", "--set",
                 "dropout=0.1", *SMALL]
    assert gft(*arguments, "--out", "whole").code == 0
    process = subprocess.Popen([*COMMAND, *arguments, "--out", "killed"], cwd=tmp_path, stdout=subprocess.DEVNULL,
                               env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2]), "OMP_NUM_THREADS": "1"})
    wait_for_step(tmp_path / "killed" / "metrics.jsonl", 20, process)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "result.json").exists()
    assert gft(*arguments, "--out", "killed", "--resume").code == 0

    whole, killed = (read_checkpoint(tmp_path / name / "checkpoint" / "state.safetensors") for name in ("whole", "killed"))
    assert whole["extra"]["step"] == killed["extra"]["step"] == 120
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, killed["model"][name]), name
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def wait_for_step(metrics: Path, wanted: int, process: subprocess.Popen, seconds: float = 60) -> None:
    start = time.monotonic()
    while time.monotonic() - start < seconds and process.poll() is None:
        if metrics.exists():
            lines = metrics.read_text().splitlines()
            if lines and lines[-1].endswith("}") and json.loads(lines[-1])["step"] >= wanted:
                return
        time.sleep(0.01)
