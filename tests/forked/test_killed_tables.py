"""A table that is killed: its runs save and stop."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from gft import files
from gft.errors import UsageError
from gft.lab import stopping, tables


def test_the_runs_of_a_killed_table_save_and_stop(tmp_path, monkeypatch):
    """Or the table, started again, would find them at work in their folders."""
    monkeypatch.setattr(tables, "START", "fork")  # as spawn, without the seconds that imports take
    asked = {"seeds": 2, "rows": ["depth-3"], "settings": ["width=16", "data=digits", "steps=100000"], "device": "cpu"}
    runs = [tmp_path / "mnist-dnn-depth-3" / f"seed-{seed}" for seed in range(2)]
    if not (table := os.fork()):
        tables.reproduce({"depth": tmp_path}, jobs=2, **asked)
        os._exit(0)
    wait_until(lambda: all((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size for run in runs))
    with pytest.raises(UsageError, match=f"is being written by process {table}; wait"):
        tables.reproduce({"depth": tmp_path}, **asked)
    os.kill(table, signal.SIGKILL)
    os.waitpid(table, 0)
    wait_until(lambda: all((run / "checkpoint" / "state.safetensors").exists() for run in runs))
    for run in runs:
        wait_until(lambda run=run: is_free(run))


@pytest.fixture
def _heard():
    """Signals are not ignored, as a shell lets what it runs in the background ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_a_worker_starts_stops_the_table_and_leaves_no_worker(name, tmp_path, monkeypatch):
    """A Ctrl-C was lost there, and a worker that no list had yet was waited for until it was done."""
    monkeypatch.setattr(tables, "START", "fork")
    process = multiprocessing.get_context("fork").Process
    start, started = process.start, []

    def signalled(worker) -> None:
        start(worker)
        started.append(worker)
        os.kill(os.getpid(), getattr(signal, name))

    monkeypatch.setattr(process, "start", signalled)
    settings = ["width=16", "data=digits", "steps=200"]
    with stopping.stoppable(), pytest.raises(stopping.Stopped, match=f"stopped by {name}; 0 of 2 runs are done"):
        tables.reproduce({"depth": tmp_path}, jobs=2, seeds=2, rows=["depth-3"], settings=settings, device="cpu")
    assert [worker.is_alive() for worker in started] == [False]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def is_free(folder: Path) -> bool:
    try:
        files.FolderLock(folder, "").release()
        return True
    except files.FolderInUse:
        return False


def wait_until(holds, seconds: float = 30) -> None:
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds
        time.sleep(0.02)
