"""The command line as a user meets it, in processes of its own where that matters."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gft.checkpoint import read_checkpoint

COMMAND = [sys.executable, "-m", "gft"]
SMALL = ["--device", "cpu", "--set", "width=32", "--no-tensorboard"]


def gft(*arguments, cwd, environment=None):
    return subprocess.run([*COMMAND, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "COLUMNS": "200", **(environment or {})}, check=False)


def test_recipes_as_json(tmp_path):
    listed = json.loads(gft("recipes", "--json", cwd=tmp_path).stdout)
    assert {"mnist-dnn-fp", "mnist-dnn-hybrid-4bit", "mnist-dnn-quantized-2bit-paper"} <= {one["name"] for one in listed}


@pytest.mark.parametrize(("arguments", "says"), [
    (["train", "mnist-dnn-hybird-4bit"], "did you mean mnist-dnn-hybrid-4bit"),
    (["train", "digits-fp", "--set", "lr=fast"], "lr takes a value of type float"),
    (["train", "digits-quantized-2bit", "--set", "bits=9", *SMALL], "a symmetric grid needs 2 to 8 bits"),
    (["train", "digits-quantized-2bit", "--set", "lr=3", *SMALL], "give a number from 0 to 1"),
    (["eval", "nowhere"], "is not a run folder"),
    (["data", "fetch", "cifar"], "no data set 'cifar'"),
    (["reproduce", "table-9"], "no table 'table-9'"),
], ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "")
def test_mistakes_get_one_sentence(arguments, says, tmp_path):
    done = gft(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not any(tmp_path.iterdir())  # a mistake leaves nothing behind that a second try would trip over


def test_train_then_eval(tmp_path):
    done = gft("train", "digits-hybrid-4bit", "--steps", 30, "--out", "run", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    value = json.loads((tmp_path / "run" / "result.json").read_text())["value"]
    assert f"accuracy {value:.2f} on the val split" in gft("eval", "run", "--device", "cpu", cwd=tmp_path).stdout


def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path):
    gft("train", "digits-quantized-2bit", "--steps", 5, "--out", "run", *SMALL, cwd=tmp_path)
    checkpoint = tmp_path / "run" / "checkpoint" / "state.safetensors"
    damaged = checkpoint.read_bytes()[:-100]
    checkpoint.write_bytes(damaged)
    done = gft("eval", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "damaged or cut short" in done.stderr
    assert checkpoint.read_bytes() == damaged


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    arguments = ["train", "digits-hybrid-4bit", "--steps", "160", "--checkpoint-every", "3", "--seed", "5", "--set",
                 "dropout=0.1", *SMALL]
    assert gft(*arguments, "--out", "whole", cwd=tmp_path).returncode == 0
    kills = 0
    for wanted in (20, 90):  # killed twice, somewhere after these steps
        process = subprocess.Popen([*COMMAND, *arguments, "--out", "killed", "--resume"], cwd=tmp_path,
                                   stdout=subprocess.DEVNULL)
        wait_for_step(tmp_path / "killed" / "metrics.jsonl", wanted, process)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills == 2
    assert not (tmp_path / "killed" / "result.json").exists()
    assert gft(*arguments, "--out", "killed", "--resume", cwd=tmp_path).returncode == 0

    whole, killed = (read_checkpoint(tmp_path / name / "checkpoint" / "state.safetensors") for name in ("whole", "killed"))
    assert whole["extra"]["step"] == killed["extra"]["step"] == 160
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
