"""distributed.py: ranks that share a batch move their weights as one process would, and never drift apart.

Three gloo processes are spawned once and run every scenario below; two of them also train as a group of their own. What they
return is compared here with a single process.
"""

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import no_warmup  # noqa: F401
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gft
from gft import distributed, votes
from gft.distributed import Ranks
from gft.layers import quantized_layers
from gft.rules.orthogonalize import orthogonalized

WORLD = 3
STEPS = 4
ORTHOGONALIZED = gft.Rounding(inertia=0.7, orthogonalize=True)
LOW_RANK = gft.Rounding(momentum_rank=3)
WITH_MOMENTUM = gft.Rounding(momentum=0.8)


def batches_of(steps: int = STEPS, size: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(steps, size, 6, generator=generator)
    return list(zip(x, (x @ torch.randn(6, 5, generator=generator)).argmax(-1), strict=True))


def integer_net(bits: int = 4, memory: bool = True, seed: int = 0) -> nn.Module:
    """Nothing in it requires grad."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first, second, third = (nn.Linear(*shape, bias=False) for shape in ((6, 24), (24, 33), (33, 5)))
        return gft.quantize_(nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third), bits, memory=memory, gain=False)


def end_of(model: nn.Module, own: gft.GFT) -> dict:
    """All that must be equal on all ranks."""
    state = {f"{number}.{name}": value for number, weight in enumerate(gft.quantized(model))
             for name, value in own.state[weight].items()}
    return {"flips": own.flips(), **state,
            **{f"parameter.{number}": parameter.detach().clone() for number, parameter in enumerate(model.parameters())}}


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key


# ---------------------------------------------------------------------------------------------------- what ranks run

# Settings, and the form of the weights: neither default nor zero.
WAYS = {
    "topk": ({"rule": gft.TopK(p_min=0.02), "lr": 0.4}, {"bits": 3, "memory": False}),
    "rounding": ({"rule": gft.Rounding(inertia=0.7), "lr": 0.3}, {"bits": 4, "memory": True}),
    "packed": ({"rule": gft.Rounding(threshold=0.9, second_moment="running", warmup=2), "lr": 0.5},
               {"bits": 2, "memory": False}),
}
PARTS = {"even": (8, 8), "uneven": (1, 5, 10), "one empty": (6, 0, 10)}


def by_signs(way: str, parts: tuple[int, ...] = (16,), micro_batches: int = 1, stop: int = STEPS, **settings) -> tuple:
    """Sign votes on this rank's part of each batch, in some micro-batches."""
    model, own_settings = integer_net(**WAYS[way][1]), WAYS[way][0]
    own = gft.GFT(gft.quantized(model), **{"vote": gft.Sign(), "seed": 5, **own_settings, **settings})
    go_on(model, own, batches_of()[:stop], parts, micro_batches)
    return model, own


def go_on(model: nn.Module, own: gft.GFT, data, parts: tuple[int, ...] = (16,), micro_batches: int = 1) -> None:
    for x, y in data:
        x, y = x.split(parts)[own.ranks.rank], y.split(parts)[own.ranks.rank]
        own.zero_grad()
        for some_x, some_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            # Not cross entropy: its errors sum to 0, so where all levels of a column are equal the sign of what flows down
            # is chance, and how many rows a product has may decide it.
            (model(some_x) - F.one_hot(some_y, 5)).square().sum().backward()
        own.step()


def hybrid_under_ddp(rank: int) -> dict:
    with torch.random.fork_rng():
        torch.manual_seed(rank)  # DistributedDataParallel has all start from the first rank's
        model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5))
    gft.quantize_(model, 4, lambda module, name: name == "2")
    wrapped = DistributedDataParallel(model)
    assert model[2].scale_number() == float(model[2].scale)
    own = gft.GFT(gft.quantized(model), lr=0.2, seed=7)
    both = gft.Hybrid(own, torch.optim.AdamW(gft.dense(model), lr=1e-2))
    result: dict = {"losses": []}
    for step, (x, y) in enumerate(batches_of(40, 15)):
        both.zero_grad()
        x, y = (x[:5], y[:5]) if step == 1 else (x.chunk(WORLD)[rank], y.chunk(WORLD)[rank])
        if step == 2:
            with wrapped.no_sync():  # a micro-batch more, whose votes and gradients wait
                F.cross_entropy(wrapped(x), y).backward()
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        if step == 1:  # all ranks vote on the same, with noise of their own
            result["votes"] = model[2].votes.votes.clone()
        both.step()
        if step < 3:
            result[f"after {step}"] = copy.deepcopy(end_of(model, own))
        result["losses"].append(loss.item())
    return {**result, "end": end_of(model, own)}


class Branches(nn.Module):
    """One layer for all, one that ranks may leave out (a convolution, whose x has its own length), one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.branch = nn.Linear(6, 18, False), nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.idle, self.head = nn.Linear(6, 6, False), nn.Linear(18, 5, False)

    def forward(self, x: torch.Tensor, use_branch: bool) -> torch.Tensor:
        h = torch.tanh(self.common(x))
        if use_branch:
            h = h + self.branch(h.view(-1, 2, 3, 3)).view(-1, 2, 18).sum(1)
        return self.head(h)


def with_branches(rank: int) -> dict:
    torch.manual_seed(0)
    model = gft.quantize_(Branches(), 4, gain=False)
    own = gft.GFT(gft.quantized(model), lr=0.3, seed=2)
    if rank == 0:  # a batch that is given up leaves scales behind, which are this rank's alone
        F.cross_entropy(model(batches_of()[1][0], True), batches_of()[1][1]).backward()
        model.idle(batches_of()[1][0]).sum().backward()
    starts = [weight.clone() for weight in gft.quantized(model)]
    result = {}
    for step, (x, y) in enumerate(batches_of()):
        own.zero_grad()
        use_branch = rank == 2 if step < 2 else rank > 0
        F.cross_entropy(model(x.chunk(WORLD)[rank], use_branch), y.chunk(WORLD)[rank]).backward()
        own.step()
        result[f"after {step}"] = copy.deepcopy(end_of(model, own))
    moved = [not torch.equal(old, new) for old, new in zip(starts, gft.quantized(model), strict=True)]
    return {**result, "moved": moved, "names": [name for name, _ in model.named_parameters()]}


def summed_votes(rank: int, int32_bound: int) -> dict:
    """The votes of all, with counts that pass the bound of int32 only together."""
    model = integer_net()
    own = gft.GFT(gft.quantized(model), seed=1)
    layers = list(quantized_layers(model).values())
    x, y = (part.chunk(WORLD)[rank] for part in batches_of()[0])
    with mock.patch.object(votes, "INT32_BOUND", int32_bound):
        F.cross_entropy(model(x), y).backward()
        before = [layer.votes.votes.clone() for layer in layers]
        distributed.all_reduce_votes(layers, [{}] * 3, own.ranks)
    return {"before": before, "after": [layer.votes.votes for layer in layers],
            "tokens": [layer.votes.tokens for layer in layers]}


def some_votes() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(-99, 100, shape, dtype=torch.int32, generator=generator)
            for shape in ((5, 7), (7, 5), (1, 9), (5, 7), (12, 4))]


def shared_out_votes(rank: int) -> dict:
    with mock.patch.object(distributed, "orthogonalized", wraps=orthogonalized) as own:
        return {"all": distributed.orthogonalized_over(Ranks(rank, WORLD), some_votes()), "own": len(own.call_args.args[0])}


def by_sequences(rank: int) -> dict:
    """One vote a sequence, as in the paper: signs of sums on running scales."""
    model = integer_net(2, False)
    own = gft.GFT(gft.quantized(model), **gft.PAPER, seed=4)
    for x, _ in batches_of(3, 24):
        own.zero_grad()
        model(x.view(6, 4, 6)[2 * rank : 2 * rank + 2]).square().sum().backward()
        own.step()
    return end_of(model, own)


def error_of(function, kind: type[Exception] = ValueError) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    return ""


def scenarios(rank: int, folder: Path) -> dict:
    pair = dist.new_group([0, 1])
    result: dict = {}
    for way in WAYS:
        for name, parts in PARTS.items():
            if len(parts) == WORLD:
                result[way, name] = end_of(*by_signs(way, parts))
            elif rank < 2:
                result[way, name] = end_of(*by_signs(way, parts, process_group=pair))
    # The second and third rank cut their parts into as many micro-batches.
    result["micro-batches"] = end_of(*by_signs("rounding", (4, 4, 8), rank + 1))
    result["hybrid"] = hybrid_under_ddp(rank)
    result["sequences"] = by_sequences(rank)
    result["branches"] = with_branches(rank)
    result["alone"] = end_of(*by_signs("rounding", (16,), process_group=False, in_backward=rank == 1))
    with mock.patch.object(distributed, "BUCKET", 700):  # the layers' votes are 576, 3168 and 660 bytes
        result["small buckets"] = end_of(*by_signs("topk", (6, 5, 5)))
    with mock.patch.object(votes, "INT32_BOUND", 12):
        result["int64"] = end_of(*by_signs("rounding", (6, 5, 5)))
    result["summed"] = summed_votes(rank, 12 * 127**2)
    result["shared out"] = shared_out_votes(rank)
    result["orthogonalize"] = end_of(*by_signs("rounding", (6, 5, 5), rule=ORTHOGONALIZED))
    result["low rank"] = end_of(*by_signs("packed", (6, 5, 5), rule=LOW_RANK))
    result["momentum"] = end_of(*by_signs("rounding", (6, 5, 5), rule=WITH_MOMENTUM))
    model, own = by_signs("rounding", (6, 5, 5))
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as collective:
        go_on(model, own, batches_of()[:1], (6, 5, 5))
    result["collectives"] = collective.call_count
    result["refused by DDP"] = error_of(lambda: DistributedDataParallel(model), RuntimeError) != ""

    # Two steps, then all go on from the first rank's file, in optimizers that knew nothing.
    model, own = by_signs("rounding", (6, 5, 5), stop=2)
    if rank == 0:
        gft.save_checkpoint(folder / "two-steps", model, own)
    dist.barrier()
    model = integer_net(seed=rank)
    own = gft.GFT(gft.quantized(model), lr=0.9)
    gft.load_checkpoint(folder / "two-steps", model, own)
    go_on(model, own, batches_of()[2:], (6, 5, 5))
    result["resumed"] = end_of(model, own)

    models = [integer_net(seed=rank), *(integer_net() for _ in range(4))]
    first, second, third, fourth, fifth = (gft.quantized(model) for model in models)
    result["other weights"] = error_of(gft.GFT(first).step)
    result["other seed"] = error_of(gft.GFT(second, seed=rank).step)
    result["other rule"] = error_of(gft.GFT(third, rule=gft.Rounding(inertia=0.5 + rank / 8)).step)
    result["in_backward"] = error_of(lambda: gft.GFT(fourth, in_backward=True))
    result["not in the group"] = error_of(lambda: gft.GFT(fifth, process_group=pair))
    result["pickled"] = []
    for group in (None, False):
        model = integer_net()
        _, copied = pickle.loads(pickle.dumps((model, gft.GFT(gft.quantized(model), process_group=group))))
        result["pickled"].append(copied.ranks.world)
    return result


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    torch.save(scenarios(rank, Path(folder)), f"{folder}/result-{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    """What each rank has result."""
    mp.spawn(worker, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"result-{rank}", weights_only=True) for rank in range(WORLD)]


# ---------------------------------------------------------------------------------------------------- as one process


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parts", PARTS)
def test_sign_votes_of_parts_move_weights_as_the_whole_batch_does(way, parts, ranks):
    model, own = by_signs(way)
    assert own.flips() > 0
    for result in ranks[: len(PARTS[parts])]:
        assert_equal(result[way, parts], end_of(model, own))


@pytest.mark.parametrize(("scenario", "way"), [("micro-batches", "rounding"), ("small buckets", "topk"),
                                               ("int64", "rounding")])
def test_how_votes_arrive_makes_no_difference(scenario, way, ranks):
    alone = end_of(*by_signs(way))
    for result in ranks:
        assert_equal(result[scenario], alone)


def test_votes_that_pass_int32_only_together_are_summed_in_int64(ranks):
    for result in ranks:
        for number, summed in enumerate(result["summed"]["after"]):
            assert summed.dtype == torch.int64
            own = [each["summed"]["before"][number] for each in ranks]
            assert all(one.dtype == torch.int32 for one in own)
            assert torch.equal(summed, sum(one.long() for one in own))
        assert result["summed"]["tokens"] == [16] * 3


def test_each_rank_orthogonalizes_some_layers_for_all(ranks):
    assert [result["shared out"]["own"] for result in ranks] == [2, 2, 1]
    for result in ranks:
        for one, first, alone in zip(result["shared out"]["all"], ranks[0]["shared out"]["all"],
                                     orthogonalized(some_votes()), strict=True):
            assert torch.equal(one, first)
            assert (one - alone).abs().max() <= 2  # of 2^20: layers of one shape share their products when one has them all


@pytest.mark.parametrize(("name", "way", "rule"), [
    ("orthogonalize", "rounding", ORTHOGONALIZED), ("low rank", "packed", LOW_RANK)])
def test_ranks_that_look_at_whole_matrices_take_the_same_steps(name, way, rule, ranks):
    model, own = by_signs(way, rule=rule)
    assert own.flips() > 0
    for result in ranks:
        assert_equal(result[name], ranks[0][name])
    alone, as_they_are = end_of(model, own), end_of(*by_signs(way))
    same, as_cast = (torch.cat([(result[name][key] == one[key]).flatten().float() for key in one
                                if key.startswith("parameter")]).mean() for one in (alone, as_they_are))
    assert same > 0.99  # a float rounded otherwise may move a weight
    assert as_cast < 0.9


def test_momentum_is_the_same_to_the_bit_on_one_rank_and_several(ranks):
    alone = end_of(*by_signs("rounding", rule=WITH_MOMENTUM))
    assert any(name.endswith("momentum") for name in alone)
    for result in ranks:
        assert_equal(result["momentum"], alone)


def test_a_step_of_small_layers_takes_two_collectives_for_signs(ranks):
    """Counts and votes; other votes have squares, too."""
    assert [result["collectives"] for result in ranks] == [2] * WORLD


def test_process_group_false_trains_alone(ranks):
    for rank in (0, 2):
        assert_equal(ranks[rank]["alone"], end_of(*by_signs("rounding")))
    assert_equal(ranks[1]["alone"], end_of(*by_signs("rounding", in_backward=True)))


def test_ranks_go_on_from_the_file_of_one_and_one_from_theirs(ranks, folder):
    whole = end_of(*by_signs("rounding"))
    for result in ranks:
        assert_equal(result["resumed"], whole)
    model = integer_net(seed=9)
    own = gft.GFT(gft.quantized(model), lr=0.9)
    gft.load_checkpoint(folder / "two-steps", model, own)
    go_on(model, own, batches_of()[2:])
    assert_equal(end_of(model, own), whole)


# ---------------------------------------------------------------------------------------------------- never apart


def test_a_hybrid_under_ddp_learns_and_its_ranks_stay_equal(ranks):
    first = ranks[0]["hybrid"]
    assert first["end"]["flips"] > 0
    assert {"0.x_rms", "0.grad_rms", "0.second_moment"} <= first["end"].keys()
    for result in ranks[1:]:
        for when in ("after 0", "after 1", "after 2", "end"):
            assert_equal(result["hybrid"][when], first[when])
    losses = torch.tensor([result["hybrid"]["losses"] for result in ranks]).mean(0)
    assert losses[-5:].mean() < 0.6 * losses[:5].mean()


def test_ranks_round_the_same_batch_by_noise_of_their_own(ranks):
    one, other, third = (result["hybrid"]["votes"] for result in ranks)
    assert not torch.equal(one, other)
    assert not torch.equal(other, third)
    assert torch.corrcoef(torch.stack((one, other)).view(2, -1).float())[0, 1] > 0.9


def test_layers_that_some_ranks_or_all_leave_out(ranks):
    for result in (result["branches"] for result in ranks):
        assert dict(zip(result["names"], result["moved"], strict=True)) == {
            "common.qweight": True, "branch.qweight": True, "idle.qweight": False, "head.qweight": True}
        for step in range(STEPS):
            assert_equal(result[f"after {step}"], ranks[0]["branches"][f"after {step}"])
        assert result["after 3"]["1.x_rms"].shape == (2,)
        assert not [key for key in result["after 3"] if key.startswith("2.") and key != "2.number"]


def test_ranks_that_vote_by_sequences_stay_equal(ranks):
    first = ranks[0]["sequences"]
    assert first["flips"] > 0
    assert "0.x_rms" in first
    for result in ranks[1:]:
        assert_equal(result["sequences"], first)


def test_what_cannot_work_is_refused_on_every_rank(ranks):
    for result in ranks:
        assert result["refused by DDP"]  # so a model of integers alone goes without
        assert "DistributedDataParallel" in result["other weights"]
        assert "same settings" in result["other seed"]
        assert "same settings" in result["other rule"]
        assert "process_group=False" in result["in_backward"]
        assert result["pickled"] == [WORLD, 1]
    assert [bool(result["not in the group"]) for result in ranks] == [False, False, True]


def test_the_guides_script_learns_under_torchrun(tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    (script,) = re.findall(r"```python\n(# train\.py.*?)```", guide, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    path = os.pathsep.join([str(Path(gft.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, last = (float(line.split()[-1]) for line in done.stdout.splitlines()[-2:])
    assert last < 0.7 * first
