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

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gft
from gft import distributed, optimizer, vote
from gft.capture import waits_for_others
from gft.directions import even_out
from gft.distributed import ALONE, Counts, Ranks, buckets, counts_of, fingerprint, ranks_of
from gft.vote import Ballot

WORLD = 3
STEPS = 4
TWO = Ranks(1, 2)


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


def told_of(model: nn.Module, own: gft.GFT) -> dict:
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
    "topk": ({"rule": "topk", "lr": 0.4, "p_min": 0.02}, {"bits": 3, "memory": False}),
    "rounding": ({"rule": "rounding", "lr": 0.3, "inertia": 0.7}, {"bits": 4, "memory": True}),
    "packed": ({"rule": "rounding", "lr": 0.5, "quorum": 1.1, "sizes": "running"}, {"bits": 2, "memory": False}),
}
PARTS = {"even": (8, 8), "uneven": (1, 5, 10), "one empty": (6, 0, 10)}


def by_signs(way: str, parts: tuple[int, ...] = (16,), micro_batches: int = 1, stop: int = STEPS, **settings) -> tuple:
    """Sign votes on this rank's part of each batch, in some micro-batches."""
    model, own_settings = integer_net(**WAYS[way][1]), WAYS[way][0]
    own = gft.GFT(gft.quantized(model), vote="sign", seed=5, **own_settings, **settings)
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
    told: dict = {"losses": []}
    for step, (x, y) in enumerate(batches_of(40, 15)):
        both.zero_grad()
        x, y = (x[:5], y[:5]) if step == 1 else (x.chunk(WORLD)[rank], y.chunk(WORLD)[rank])
        if step == 2:
            with wrapped.no_sync():  # a micro-batch more, whose votes and gradients wait
                F.cross_entropy(wrapped(x), y).backward()
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        if step == 1:  # all ranks vote on the same, with noise of their own
            told["votes"] = gft.quantized(model)[0].ballot.votes.clone()
        both.step()
        if step < 3:
            told[f"after {step}"] = copy.deepcopy(told_of(model, own))
        told["losses"].append(loss.item())
    return {**told, "end": told_of(model, own)}


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
    told = {}
    for step, (x, y) in enumerate(batches_of()):
        own.zero_grad()
        use_branch = rank == 2 if step < 2 else rank > 0
        F.cross_entropy(model(x.chunk(WORLD)[rank], use_branch), y.chunk(WORLD)[rank]).backward()
        own.step()
        told[f"after {step}"] = copy.deepcopy(told_of(model, own))
    moved = [not torch.equal(old, new) for old, new in zip(starts, gft.quantized(model), strict=True)]
    return {**told, "moved": moved, "names": [name for name, _ in model.named_parameters()]}


def united_votes(rank: int, int32_ceiling: int) -> dict:
    """The votes of all, with counts that pass the ceiling of int32 only together."""
    model = integer_net()
    own = gft.GFT(gft.quantized(model), vote="int8", seed=1)
    x, y = (part.chunk(WORLD)[rank] for part in batches_of()[0])
    with mock.patch.object(vote, "INT32_CEILING", int32_ceiling):
        F.cross_entropy(model(x), y).backward()
        before = [weight.ballot.votes.clone() for weight in gft.quantized(model)]
        distributed.unite(gft.quantized(model), [{}] * 3, own.ranks)
    after = [weight.ballot for weight in gft.quantized(model)]
    return {"before": before, "after": [ballot.votes for ballot in after], "tokens": [ballot.tokens for ballot in after]}


def some_votes() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(-99, 100, shape, dtype=torch.int32, generator=generator)
            for shape in ((5, 7), (7, 5), (1, 9), (5, 7), (12, 4))]


def evened_votes(rank: int) -> dict:
    with mock.patch.object(distributed, "even_out", wraps=even_out) as own:
        return {"all": distributed.even_out_over(Ranks(rank, WORLD), some_votes()), "own": len(own.call_args.args[0])}


def by_sequences(rank: int) -> dict:
    """One voice a sequence, as in the paper: signs of sums on running scales."""
    model = integer_net(2, False)
    own = gft.GFT(gft.quantized(model), **gft.PAPER, seed=4)
    for x, _ in batches_of(3, 24):
        own.zero_grad()
        model(x.view(6, 4, 6)[2 * rank : 2 * rank + 2]).square().sum().backward()
        own.step()
    return told_of(model, own)


def error_of(function, kind: type[Exception] = ValueError) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    return ""


def scenarios(rank: int, folder: Path) -> dict:
    pair = dist.new_group([0, 1])
    told: dict = {}
    for way in WAYS:
        for name, parts in PARTS.items():
            if len(parts) == WORLD:
                told[way, name] = told_of(*by_signs(way, parts))
            elif rank < 2:
                told[way, name] = told_of(*by_signs(way, parts, process_group=pair))
    # The second and third rank cut their parts into as many micro-batches.
    told["micro-batches"] = told_of(*by_signs("rounding", (4, 4, 8), rank + 1))
    told["hybrid"] = hybrid_under_ddp(rank)
    told["sequences"] = by_sequences(rank)
    told["branches"] = with_branches(rank)
    told["alone"] = told_of(*by_signs("rounding", (16,), process_group=False, in_backward=rank == 1))
    with mock.patch.object(distributed, "BUCKET", 700):  # the layers' votes are 576, 3168 and 660 bytes
        told["small buckets"] = told_of(*by_signs("topk", (6, 5, 5)))
    with mock.patch.object(vote, "INT32_CEILING", 12):
        told["int64"] = told_of(*by_signs("rounding", (6, 5, 5)))
    told["united"] = united_votes(rank, 12 * 127**2)
    told["evened"] = evened_votes(rank)
    told["even directions"] = told_of(*by_signs("rounding", (6, 5, 5), directions="even"))
    model, own = by_signs("rounding", (6, 5, 5))
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as collective:
        go_on(model, own, batches_of()[:1], (6, 5, 5))
    told["collectives"] = collective.call_count
    told["refused by DDP"] = error_of(lambda: DistributedDataParallel(model), RuntimeError) != ""

    # Two steps, then all go on from the first rank's file, in optimizers that knew nothing.
    model, own = by_signs("rounding", (6, 5, 5), stop=2)
    if rank == 0:
        gft.save_checkpoint(folder / "two-steps", model, own)
    dist.barrier()
    model = integer_net(seed=rank)
    own = gft.GFT(gft.quantized(model), lr=0.9)
    gft.load_checkpoint(folder / "two-steps", model, own)
    go_on(model, own, batches_of()[2:], (6, 5, 5))
    told["resumed"] = told_of(model, own)

    told["other weights"] = error_of(gft.GFT(gft.quantized(integer_net(seed=rank))).step)
    told["other seed"] = error_of(gft.GFT(gft.quantized(integer_net()), seed=rank).step)
    told["in_backward"] = error_of(lambda: gft.GFT(gft.quantized(integer_net()), in_backward=True))
    told["not in the group"] = error_of(lambda: gft.GFT(gft.quantized(integer_net()), process_group=pair))
    told["pickled"] = []
    for group in (None, False):
        model = integer_net()
        _, copied = pickle.loads(pickle.dumps((model, gft.GFT(gft.quantized(model), process_group=group))))
        told["pickled"].append(copied.ranks.world)
    return told


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    torch.save(scenarios(rank, Path(folder)), f"{folder}/told-{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    """What each rank has told."""
    mp.spawn(worker, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"told-{rank}", weights_only=True) for rank in range(WORLD)]


# ---------------------------------------------------------------------------------------------------- as one process


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parts", PARTS)
def test_sign_votes_of_parts_move_weights_as_the_whole_batch_does(way, parts, ranks):
    model, own = by_signs(way)
    assert own.flips() > 0
    for told in ranks[: len(PARTS[parts])]:
        assert_equal(told[way, parts], told_of(model, own))


@pytest.mark.parametrize(("scenario", "way"), [("micro-batches", "rounding"), ("small buckets", "topk"),
                                               ("int64", "rounding")])
def test_how_votes_arrive_makes_no_difference(scenario, way, ranks):
    alone = told_of(*by_signs(way))
    for told in ranks:
        assert_equal(told[scenario], alone)


def test_votes_that_pass_int32_only_together_are_summed_in_int64(ranks):
    for told in ranks:
        for number, votes in enumerate(told["united"]["after"]):
            assert votes.dtype == torch.int64
            own = [each["united"]["before"][number] for each in ranks]
            assert all(one.dtype == torch.int32 for one in own)
            assert torch.equal(votes, sum(one.long() for one in own))
        assert told["united"]["tokens"] == [16] * 3


def test_each_rank_evens_out_some_layers_for_all(ranks):
    assert [told["evened"]["own"] for told in ranks] == [2, 2, 1]
    for told in ranks:
        for one, first, alone in zip(told["evened"]["all"], ranks[0]["evened"]["all"], even_out(some_votes()), strict=True):
            assert torch.equal(one, first)
            assert (one - alone).abs().max() <= 2  # of 2^20: layers of one shape share their products when one has them all


def test_ranks_with_even_directions_take_the_same_steps(ranks):
    model, own = by_signs("rounding", directions="even")
    assert own.flips() > 0
    for told in ranks:
        assert_equal(told["even directions"], ranks[0]["even directions"])
    alone, voted = told_of(model, own), told_of(*by_signs("rounding"))
    same, as_cast = (torch.cat([(told["even directions"][key] == one[key]).flatten().float() for key in one
                                if key.startswith("parameter")]).mean() for one in (alone, voted))
    assert same > 0.99  # a float rounded otherwise may move a weight
    assert as_cast < 0.9


def test_a_step_of_small_layers_takes_two_collectives_for_signs(ranks):
    """Counts and votes; other votes have squares, too."""
    assert [told["collectives"] for told in ranks] == [2] * WORLD


def test_process_group_false_trains_alone(ranks):
    for rank in (0, 2):
        assert_equal(ranks[rank]["alone"], told_of(*by_signs("rounding")))
    assert_equal(ranks[1]["alone"], told_of(*by_signs("rounding", in_backward=True)))


def test_ranks_go_on_from_the_file_of_one_and_one_from_theirs(ranks, folder):
    whole = told_of(*by_signs("rounding"))
    for told in ranks:
        assert_equal(told["resumed"], whole)
    model = integer_net(seed=9)
    own = gft.GFT(gft.quantized(model), lr=0.9)
    gft.load_checkpoint(folder / "two-steps", model, own)
    go_on(model, own, batches_of()[2:])
    assert_equal(told_of(model, own), whole)


# ---------------------------------------------------------------------------------------------------- never apart


def test_a_hybrid_under_ddp_learns_and_its_ranks_stay_equal(ranks):
    first = ranks[0]["hybrid"]
    assert first["end"]["flips"] > 0
    assert {"0.x_rms", "0.delta_rms", "0.votes_square"} <= first["end"].keys()
    for told in ranks[1:]:
        for when in ("after 0", "after 1", "after 2", "end"):
            assert_equal(told["hybrid"][when], first[when])
    losses = torch.tensor([told["hybrid"]["losses"] for told in ranks]).mean(0)
    assert losses[-5:].mean() < 0.6 * losses[:5].mean()


def test_ranks_round_the_same_batch_by_noise_of_their_own(ranks):
    one, other, third = (told["hybrid"]["votes"] for told in ranks)
    assert not torch.equal(one, other)
    assert not torch.equal(other, third)
    assert torch.corrcoef(torch.stack((one, other)).view(2, -1).float())[0, 1] > 0.9


def test_layers_that_some_ranks_or_all_leave_out(ranks):
    for told in (told["branches"] for told in ranks):
        assert dict(zip(told["names"], told["moved"], strict=True)) == {
            "common.weight": True, "branch.weight": True, "idle.weight": False, "head.weight": True}
        for step in range(STEPS):
            assert_equal(told[f"after {step}"], ranks[0]["branches"][f"after {step}"])
        assert told["after 3"]["1.x_rms"].shape == (2,)
        assert not [key for key in told["after 3"] if key.startswith("2.") and key != "2.layer"]


def test_ranks_that_speak_by_sequences_stay_equal(ranks):
    first = ranks[0]["sequences"]
    assert first["flips"] > 0
    assert "0.x_rms" in first
    for told in ranks[1:]:
        assert_equal(told["sequences"], first)


def test_what_cannot_work_is_refused_on_every_rank(ranks):
    for told in ranks:
        assert told["refused by DDP"]  # so a model of integers alone goes without
        assert "DistributedDataParallel" in told["other weights"]
        assert "same settings" in told["other seed"]
        assert "process_group=False" in told["in_backward"]
        assert told["pickled"] == [WORLD, 1]
    assert [bool(told["not in the group"]) for told in ranks] == [False, False, True]


def test_readme_script_runs_under_torchrun(tmp_path):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (script,) = re.findall(r"```python\n(# train\.py.*?)```", readme, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(gft.__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, last = (float(line.split()[-1]) for line in done.stdout.splitlines()[-2:])
    assert last < 0.7 * first


# ---------------------------------------------------------------------------------------------------- without processes


@pytest.mark.parametrize(("sizes", "expected"), [
    ([], []),
    ([3, 3, 3], [[0, 1, 2]]),
    ([5, 5, 1], [[0, 1], [2]]),
    ([4, 99, 4], [[1], [0, 2]]),
    ([10, 9, 2, 8], [[0], [1], [2, 3]]),
], ids=["none", "one bucket", "exactly full", "a large one between", "mixed"])
def test_buckets_are_bounded_and_large_ones_stand_alone(sizes, expected):
    assert buckets(sizes, 10) == expected


def test_without_torch_distributed_a_process_is_alone(refuses):
    assert ranks_of(None) == ranks_of(False) == ALONE == Ranks(0, 1, None)
    with refuses(TypeError, "give a ProcessGroup"):
        ranks_of(True)
    with refuses(ValueError, "not in the process_group"):
        ranks_of(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


def test_calls_tell_ranks_and_micro_batches_apart():
    def call(rank: int, world: int, batches: int) -> int:
        return Ballot("int8", "token", "none", seed=0, layer=0, rank=rank, world=world, batches=batches).call

    assert [call(0, 1, batches) for batches in range(3)] == [0, 1, 2]
    assert sorted(call(rank, 3, batches) for rank in range(3) for batches in range(4)) == list(range(12))


def test_counts_say_who_spoke_and_how_long_the_scales_are():
    ballot = Ballot("int8", "token", "none", seed=0, layer=0)
    assert counts_of(ballot) == Counts(0, 0, 0, 0, 0, 0, 0)
    x = torch.ones(7, 4, dtype=torch.int8)
    ballot.cast(lambda q: [(slice(None), x, q)], torch.ones(4), torch.randn(7, 3), (3, 4), 1)
    assert counts_of(ballot) == Counts(7, 7, 1, 1, 4, 1, 3)
    of_two_ranks = Counts(14, 14, 2, 2, 8, 2, 6)
    assert [of_two_ranks.features_of(which) for which in distributed.SCALES] == [4, 3]


def test_fingerprints_differ_by_weight_order_and_setting():
    def number(seed: int = 0, swap: bool = False, **settings) -> int:
        model = integer_net(seed=seed)
        if swap:
            model[0].weight.data = model[0].weight.data.flip(1)
        return fingerprint(gft.quantized(model), [{"lr": 0.1, "seed": 3, **settings}])

    assert number() == number() == number(lr=torch.tensor(0.1, dtype=torch.float64))
    assert len({number(), number(seed=1), number(swap=True), number(lr=0.2), number(step=1)}) == 5


def test_a_group_that_comes_or_goes_later_is_told(monkeypatch, refuses):
    own = gft.GFT(gft.quantized(integer_net()))
    monkeypatch.setattr(optimizer, "ranks_of", lambda group: TWO)
    with refuses(ValueError, "make gft.GFT after init_process_group"):
        own.step()


def test_process_group_is_neither_setting_nor_state():
    own = gft.GFT(gft.quantized(integer_net()), process_group=False)
    assert "process_group" not in own.param_groups[0]
    assert "process_group" not in own.defaults
    assert own.state_dict().keys() == {"state", "param_groups"}


def test_graphs_and_moves_in_backward_are_refused_on_several_ranks(monkeypatch, refuses):
    monkeypatch.setattr(optimizer, "ranks_of", lambda group: ALONE if group is False else TWO)
    with refuses(ValueError, "in_backward=True"):
        gft.GFT(gft.quantized(integer_net()), in_backward=True)
    dense = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    assert waits_for_others(gft.Hybrid(gft.GFT(gft.quantized(integer_net())), dense))
    assert not waits_for_others(gft.Hybrid(gft.GFT(gft.quantized(integer_net()), process_group=False), dense))
    assert not waits_for_others(dense)
