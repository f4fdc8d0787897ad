"""A group of one process: what ranks send each other, over gloo on a CPU and over NCCL on one GPU. A sum over one rank is
what it was, so training ends with the bits of a process without a group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import no_warmup  # noqa: F401
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gft
from gft import distributed, votes
from gft.distributed import Ranks
from gft.philox import NoiseKey
from gft.sharding import all_rows, scatter_of

ONE = Ranks(0, 1)  # which gft.GFT itself would take for no group at all
STEPS = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def group(device: str, folder: Path) -> Iterator[None]:
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0,
                            world_size=1, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(params=DEVICES)
def device(request, tmp_path) -> Iterator[str]:
    with group(request.param, tmp_path):
        yield request.param


def net(device: str) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 5))
    return gft.quantize_(model, 4, gain=True).to(device)


def losses_on(device: str, model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 6, generator=generator).to(device), torch.randn(16, 5, generator=generator).to(device)
    return (model(x) - y).square().mean()


def end_of(model: nn.Module, own: gft.GFT) -> list[torch.Tensor]:
    state = [value for weight in gft.quantized(model) for _, value in sorted(own.state[weight].items())
             if isinstance(value, torch.Tensor)]
    return [*(all_rows(weight).clone() for weight in gft.quantized(model)), *(value.clone() for value in state)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def trained(device: str, vote: gft.votes.Vote, sums: bool) -> list[torch.Tensor]:
    model = net(device)
    own = gft.GFT(gft.quantized(model), lr=0.4, vote=vote)
    layers = own.layers()
    for layer in layers:
        layer.votes.world = 2  # as where there are others: such steps are not recorded
    for step in range(STEPS):
        own.zero_grad()
        losses_on(device, model, step).backward()
        if sums:  # as GFT.step does there
            if step == 0:
                distributed.check_alike(ONE, 4711, torch.device(device))
            distributed.all_reduce_votes(layers, [own.state[weight] for weight in gft.quantized(model)], ONE)
        own.step()
    assert own.flips() > 0
    return end_of(model, own)


@pytest.mark.parametrize("vote", [gft.Int8(), gft.Sign(), gft.Ternary()], ids=str)
def test_sums_over_one_rank_change_no_bit(vote, device):
    assert same(trained(device, vote, sums=True), trained(device, vote, sums=False))


def test_neither_small_buckets_nor_wide_votes_change_a_bit(device):
    alone = trained(device, gft.Int8(), sums=False)
    with mock.patch.object(distributed, "BUCKET", 700):
        assert same(trained(device, gft.Int8(), sums=True), alone)
    with mock.patch.object(votes, "INT32_BOUND", 12):
        assert same(trained(device, gft.Int8(), sums=True), alone)


def test_under_ddp_a_hybrid_trains_as_without(device):
    ends = []
    for wrapped in (False, True):
        model = net(device)
        outer = DistributedDataParallel(model) if wrapped else model
        own, dense = gft.GFT(gft.quantized(model), lr=0.4), torch.optim.AdamW(gft.dense(model), lr=1e-2)
        both = gft.Hybrid(own, dense)
        for step in range(STEPS):
            both.zero_grad()
            losses_on(device, outer, step).backward()
            both.step()
        ends.append([*end_of(model, own), *(weight.detach().clone() for weight in gft.dense(model))])
    assert same(*ends)


def test_votes_on_rows_that_ranks_share_out_arrive_as_int32_and_as_bytes(device):
    mesh = init_device_mesh(device, (1,))
    scatter = scatter_of(distribute_tensor(torch.zeros(25, 17, device=device), mesh, [Shard(0)]))
    generator = torch.Generator().manual_seed(1)
    large = torch.randint(-2**24, 2**24, (25, 17), generator=generator).int().to(device)
    small = large // 2**18
    assert torch.equal(scatter(large.clone(), None), large)
    assert torch.equal(scatter(small.clone(), NoiseKey(1, 0, 2, 0)), small)  # which a byte holds
    arrived = torch.stack([scatter(large.clone(), NoiseKey(1, step, 2, 0)) for step in range(40)])
    unit = 2.0**18  # of the least power of two that makes them fit
    assert (arrived - large).abs().max() <= unit
    assert ((arrived.double().mean(0) - large).abs().max()) < 0.5 * unit


@pytest.mark.skipif(torch.__version__ < "2.12", reason="fully_shard takes no integers before torch 2.12")
@pytest.mark.parametrize("wire", ["int32", "int8"])
def test_fully_shard_over_one_rank_trains_as_without(wire, device):
    ends = []
    for shares in (False, True):
        model = net(device)
        if shares:
            mesh = init_device_mesh(device, (1,))
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        own = gft.GFT([{"params": gft.quantized(model), **({"wire": wire} if shares else {})}], lr=0.4, vote=gft.Sign())
        for step in range(STEPS):
            own.zero_grad()
            losses_on(device, model, step).backward()
            own.step()
        ends.append(end_of(model, own))
    assert same(*ends)  # 16 signs fit in a byte


# ---------------------------------------------------------------------------------------------------- one that does not come


def wait_in_vain(_: int, folder: str) -> None:
    """The GPU is kept busy before the sum, as a rank that never comes would keep it."""
    with group("cuda", Path(folder)):
        distributed.all_reduce(torch.ones(1, device="cuda"), None, host_waits=True)  # the first makes connections
        torch.cuda._sleep(20_000_000_000)  # cycles: some ten seconds
        try:
            distributed.all_reduce(torch.ones(1, device="cuda"), None, host_waits=True)
            said = "nothing"
        except distributed.RankLost as error:
            said = str(error)
        (Path(folder) / "said").write_text(said)
        os._exit(0)  # its group has ended already


@pytest.mark.gpu
def test_a_sum_that_does_not_come_is_told_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("GFT_RANK_SECONDS", "1")
    mp.spawn(wait_in_vain, (str(tmp_path),), nprocs=1)
    assert (tmp_path / "said").read_text().startswith("another rank has not come to this step")
