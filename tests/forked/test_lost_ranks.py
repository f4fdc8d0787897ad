"""A rank that dies, takes fewer steps or is stopped: the others say so, within the time that was set."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gft
from gft import distributed

PATIENCE = 1.0


def train(rank: int, folder: Path, fault: str, ddp: bool) -> None:
    """Two ranks over gloo; the second comes to harm at its third step."""
    timeout = timedelta(seconds=PATIENCE) if ddp else None
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2, timeout=timeout)
    torch.manual_seed(0)
    model = gft.quantize_(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 5)), 4)
    optimizer = gft.GFT(gft.quantized(model))
    model = DistributedDataParallel(model) if ddp else model
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


def what_the_other_says(folder: Path, fault: str, ddp: bool = False) -> dict:
    ranks = []
    for rank in range(2):
        if not (number := os.fork()):
            try:
                train(rank, folder, fault, ddp)
            finally:
                os._exit(0)
        ranks.append(number)
    os.waitpid(ranks[0], 0)
    os.kill(ranks[1], signal.SIGKILL)
    os.waitpid(ranks[1], 0)
    return json.loads((folder / "said").read_text())


@pytest.mark.parametrize("fault", ["dies", "is stopped", "takes fewer steps"])
def test_a_rank_that_is_lost_is_noticed_in_time(fault, tmp_path, monkeypatch):
    monkeypatch.setenv("GFT_RANK_SECONDS", str(PATIENCE))
    said = what_the_other_says(tmp_path, fault)
    assert said["kind"] == "RankLost"
    assert said["step"] == 2
    assert said["said"].startswith("another rank has not come to this step")
    assert "\n" not in said["said"]
    assert said["seconds"] < PATIENCE + 2


@pytest.mark.parametrize("fault", ["dies", "is stopped"])
def test_under_ddp_torch_tells_of_a_lost_rank_in_backward_after_its_own_timeout(fault, tmp_path, monkeypatch):
    """DDP sends gradients before GFT.step comes to its votes; gft's patience plays no part there."""
    monkeypatch.setenv("GFT_RANK_SECONDS", "600")
    said = what_the_other_says(tmp_path, fault, ddp=True)
    assert said["kind"] in ("RuntimeError", "DistBackendError")
    assert said["step"] == 2
    assert said["seconds"] < PATIENCE + 2


def test_patience_is_a_number_of_seconds(monkeypatch, refuses):
    monkeypatch.setenv("GFT_RANK_SECONDS", "long")
    with refuses(gft.UsageError, "GFT_RANK_SECONDS='long': give seconds"):
        distributed.patience()
    monkeypatch.delenv("GFT_RANK_SECONDS")
    assert distributed.patience().total_seconds() == 600
