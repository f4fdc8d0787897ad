"""A rank that dies, takes fewer steps or is stopped: the others say so, within the time that was set."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gft
from gft import distributed

PATIENCE = 1.0


def train(rank: int, folder: Path, fault: str) -> None:
    """Two ranks over gloo; the second comes to harm at its third step."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = gft.quantize_(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 5)), 4)
    optimizer = gft.GFT(gft.quantized(model))
    for step in range(6):
        if rank == 1 and step == 2:
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "takes fewer steps":
                time.sleep(3 * PATIENCE)  # alive, and at something else
                return
        started = time.monotonic()
        try:
            optimizer.zero_grad(); model(torch.randn(8, 6)).square().sum().backward(); optimizer.step()
        except Exception as error:
            said = {"kind": type(error).__name__, "said": str(error), "step": step, "seconds": time.monotonic() - started}
            (folder / "said").write_text(json.dumps(said))
            return


@pytest.mark.parametrize("fault", ["dies", "is stopped", "takes fewer steps"])
def test_a_rank_that_is_lost_is_noticed_in_time(fault, tmp_path, monkeypatch):
    monkeypatch.setenv("GFT_RANK_SECONDS", str(PATIENCE))
    ranks = []
    for rank in range(2):
        if not (number := os.fork()):
            try:
                train(rank, tmp_path, fault)
            finally:
                os._exit(0)
        ranks.append(number)
    os.waitpid(ranks[0], 0)
    os.kill(ranks[1], signal.SIGKILL)
    os.waitpid(ranks[1], 0)
    said = json.loads((tmp_path / "said").read_text())
    assert said["kind"] == "RankLost"
    assert said["step"] == 2
    assert said["said"].startswith("another rank has not come to this step")
    assert "\n" not in said["said"]
    assert said["seconds"] < PATIENCE + 2


def test_patience_is_a_number_of_seconds(monkeypatch, refuses):
    monkeypatch.setenv("GFT_RANK_SECONDS", "long")
    with refuses(gft.UsageError, "GFT_RANK_SECONDS='long': give seconds"):
        distributed.patience()
    monkeypatch.delenv("GFT_RANK_SECONDS")
    assert distributed.patience().total_seconds() == 600
