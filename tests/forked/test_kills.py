"""Runs that are killed, stopped, written by two, and left without room; `make torture` does the same two hundred times."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torture

from gft import cli, files
from gft.checkpoint import save_checkpoint
from gft.errors import UsageError
from gft.lab import recipes, train
from gft.lab.stopping import Stopped, stoppable

TRAIN = ["train", "digits-hybrid-4bit", "--device", "cpu", "--set", "width=16", "--no-tensorboard",
         "--checkpoint-every", "7"]


class Process(NamedTuple):
    """A gft command in a forked process."""

    number: int
    said: Path  # stdout and stderr

    def ended(self) -> tuple[int, list[str]]:
        return torture.finished(self.number), self.said.read_text().splitlines()


@pytest.fixture
def gft(tmp_path, monkeypatch):
    """gft("train", …, before=…) -> the process, after `before` was called in it. None outlives the test."""
    monkeypatch.chdir(tmp_path)
    started = []

    def start(*arguments: str, before: Callable[[], object] = bool) -> Process:
        said = tmp_path / f"said-{len(started)}"
        number = os.fork()
        if number:
            started.append(number)
            return Process(number, said)
        code: object = 1
        try:
            out = os.open(said, os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            sys.argv = ["gft", *arguments]
            signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background of a shell
            before()
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    yield start
    for number in started:
        try:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def has_trained(run: Path, seconds: float = 30) -> None:
    """Wait until a run has logged something."""
    deadline = time.monotonic() + seconds
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------------------- kills and signals


@pytest.mark.slow
def test_a_dozen_kills_change_no_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("GFT_COMMIT", "")  # set by the torture, and taken back here
    tmp_path.chmod(0o755)
    recipe = recipes.find("digits-hybrid-4bit").changed([*torture.SMALL, "steps=60", "width=16", "dropout=0.1"])
    count = torture.kills(12, seed=1, folders=[tmp_path], chosen=[recipe])
    assert count.kills == 12
    assert count.while_writing


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_saves_says_so_and_exits(name, gft, tmp_path):
    number = getattr(signal, name)
    # Heard also where the tests themselves run under nohup.
    run = gft(*TRAIN, "--steps", "100000", "--out", "run", before=lambda: signal.signal(number, signal.SIG_DFL))
    has_trained(tmp_path / "run")
    os.kill(run.number, number)
    code, said = run.ended()
    assert code == 128 + number
    assert said[-1].startswith(f"stopped by {name}; step ")
    assert said[-1].endswith("is saved in run; --resume goes on from there")
    assert not any("Traceback" in line for line in said)
    step = int(said[-1].split("step ")[1].split()[0])
    extra = torture.read_checkpoint(tmp_path / "run" / "checkpoint" / "state.safetensors")["extra"]
    assert extra["step"] == step  # of the signal's, not the last multiple of seven
    assert files.FolderLock(tmp_path / "run", "").release() is None


def test_a_signal_that_is_ignored_stays_so(gft, tmp_path):
    """As nohup ignores SIGHUP."""
    run = gft(*TRAIN, "--steps", "60", "--out", "run", before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    has_trained(tmp_path / "run")
    os.kill(run.number, signal.SIGHUP)
    assert run.ended()[0] == 0


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("GFT_COMMIT", "torture")
    recipe = recipes.find("digits-quantized-2bit").changed(["width=16", "steps=50", "batch=64"])
    for _ in train.training(recipe, tmp_path / "whole", device="cpu"):
        pass
    for step in (13, 31):
        run = train.training(recipe, tmp_path / "stopped", device="cpu", resume=True)
        with stoppable(), pytest.raises(Stopped, match=f"step {step + 1} of 50 is saved"):  # noqa: PT012
            for progress in run:
                if progress.step == step:
                    os.kill(os.getpid(), signal.SIGTERM)
    for _ in train.training(recipe, tmp_path / "stopped", device="cpu", resume=True):
        pass
    torture.same(tmp_path / "whole", tmp_path / "stopped")


# ---------------------------------------------------------------------------------------------------- one writer


def test_a_second_writer_is_refused_and_told_who_the_first_is(gft, tmp_path):
    first = gft(*TRAIN, "--steps", "100000", "--out", "run")
    has_trained(tmp_path / "run")
    code, said = gft(*TRAIN, "--steps", "100000", "--out", "run", "--resume").ended()
    assert code == 2
    assert said == [f"error: run is being written by process {first.number}; wait for it to end, or give another --out"]
    os.kill(first.number, signal.SIGKILL)
    assert first.ended()[0] == -signal.SIGKILL
    after = gft(*TRAIN, "--steps", "100000", "--out", "run", "--resume")  # the lock that it had has ended with it
    lines = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    while (tmp_path / "run" / "metrics.jsonl").stat().st_size <= lines:
        assert os.waitpid(after.number, os.WNOHANG) == (0, 0)
        time.sleep(0.01)


def test_two_that_begin_at_once_are_told_apart(tmp_path, refuses):
    recipe = recipes.find("digits-fp").changed(["width=16", "steps=40"])
    ahead, behind = (train.RunFolder(tmp_path / "run", recipe, seed=0, resume=False) for _ in range(2))  # both find nothing
    ahead.start(0, tensorboard=False)
    with refuses(train.TrainingError, f"is being written by process {os.getpid()}"):
        behind.start(0, tensorboard=False)
    ahead.close()
    with refuses(train.TrainingError, "was taken by another run just now"):
        behind.start(0, tensorboard=False)


# ---------------------------------------------------------------------------------------------------- places


def test_a_disk_that_fills_up_is_said_in_a_sentence(gft, tmp_path):
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    code, said = gft(*TRAIN, "--steps", "200", "--out", "run", before=no_room).ended()
    assert code == 2
    assert [line for line in said if "error" in line] == [said[-1]]
    assert "run/checkpoint/state.safetensors cannot be written (File too large); allow larger files" in said[-1]
    assert [file.name for file in (tmp_path / "run" / "checkpoint").iterdir()] == []


def test_what_a_kill_left_unfinished_is_removed_and_what_is_being_written_stays(tmp_path):
    left = tmp_path / ".state.safetensors.abc.unfinished"
    left.mkdir()
    (left / ".tmpXyz").write_text("what safetensors leaves")
    with files.written_atomically(tmp_path / "state.safetensors") as ours:
        assert not left.exists()
        with files.written_atomically(tmp_path / "state.safetensors") as others:  # another thread's, say
            others.write_text("second")
        ours.write_text("first")
    assert (tmp_path / "state.safetensors").read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


def test_files_and_their_folders_are_flushed(tmp_path, monkeypatch, tiny_net):
    flushed = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}")) or real(number))
    files.write_text(tmp_path / "a" / "b" / "note.txt", "text")
    save_checkpoint(tmp_path / "a" / "state.safetensors", tiny_net())
    assert [Path(path).name for path in flushed] == ["a", tmp_path.name, "note.txt", "b", "state.safetensors", "a"]


@pytest.mark.parametrize("place", ["a file", "a folder"])
def test_what_is_in_the_way_is_said_in_a_sentence(place, tmp_path, refuses):
    (tmp_path / "there").mkdir() if place == "a folder" else (tmp_path / "there").write_text("")
    with refuses(UsageError, "there.* cannot be written"):
        files.write_text(tmp_path / "there" if place == "a folder" else tmp_path / "there" / "file", "")
