"""distributed.py without processes: buckets, counts, fingerprints, and what is refused on several ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gft
from gft import distributed, optim
from gft.capture import waits_for_others
from gft.distributed import ALONE, Counts, Ranks, buckets, counts_of, fingerprint, ranks_of
from gft.layers import quantized_layers
from gft.ops import Quantized
from gft.sharding import column_sums
from gft.votes import VoteAccumulator

TWO = Ranks(1, 2)


def integer_net(bits: int = 4, memory: bool = True, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first, second, third = (nn.Linear(*shape, bias=False) for shape in ((6, 24), (24, 33), (33, 5)))
        return gft.quantize_(nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third), bits, memory=memory, gain=False)


@pytest.mark.parametrize(("bytes_each", "expected"), [
    ([], []),
    ([3, 3, 3], [[0, 1, 2]]),
    ([5, 5, 1], [[0, 1], [2]]),
    ([4, 99, 4], [[1], [0, 2]]),
    ([10, 9, 2, 8], [[0], [1], [2, 3]]),
], ids=["none", "one bucket", "exactly full", "a large one between", "mixed"])
def test_buckets_are_bounded_and_large_ones_stand_alone(bytes_each, expected):
    assert buckets(bytes_each, 10) == expected


def test_without_torch_distributed_a_process_is_alone(refuses):
    assert ranks_of(None) == ranks_of(False) == ALONE == Ranks(0, 1, None)
    with refuses(TypeError, "give a ProcessGroup"):
        ranks_of(True)
    with refuses(ValueError, "not in the process_group"):
        ranks_of(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


def test_calls_tell_ranks_and_micro_batches_apart():
    def call(rank: int, world: int, batches: int) -> int:
        votes = VoteAccumulator(gft.Int8(), seed=0, number=0)
        votes.rank, votes.world = rank, world
        return votes.call(batches)

    assert [call(0, 1, batches) for batches in range(3)] == [0, 1, 2]
    assert sorted(call(rank, 3, batches) for rank in range(3) for batches in range(4)) == list(range(12))


def test_counts_say_who_has_votes_and_how_long_the_scales_are():
    votes = VoteAccumulator(gft.Int8(), seed=0, number=0)
    assert counts_of(votes) == Counts(0, 0, 0, 0, 0, 0, 0)
    x = torch.ones(7, 4, dtype=torch.int8)
    _, grad = votes.quantize_grad(torch.randn(7, 3), 1)
    votes.cast(lambda q: [(slice(None), x, q)], Quantized(x, torch.ones(1, 4)), grad, (3, 4), 1)
    assert counts_of(votes) == Counts(7, 7, 1, 1, 4, 1, 3)
    of_two_ranks = Counts(14, 14, 2, 2, 8, 2, 6)
    assert [of_two_ranks.features_of(which) for which in distributed.SCALES] == [4, 3]


def test_fingerprints_differ_by_weight_order_and_setting():
    def number(seed: int = 0, swap: bool = False, branches: int | None = None, **settings) -> int:
        model = integer_net(seed=seed)
        if swap:
            model[0].qweight.data = model[0].qweight.data.flip(1)
        model[0].branches = branches
        layers = quantized_layers(model).values()
        return fingerprint(layers, [column_sums(layer.qweight) for layer in layers], [{"lr": 0.1, "seed": 3, **settings}])

    assert number() == number() == number(lr=torch.tensor(0.1, dtype=torch.float64))
    assert len({number(), number(seed=1), number(swap=True), number(branches=2), number(lr=0.2), number(step=1)}) == 6


def test_a_group_that_comes_or_goes_later_is_refused(monkeypatch, refuses):
    model = integer_net()
    own = gft.GFT(gft.quantized(model))
    monkeypatch.setattr(optim, "ranks_of", lambda group: TWO)
    with refuses(ValueError, "make gft.GFT after init_process_group"):
        own.step()


def test_process_group_is_neither_setting_nor_state():
    model = integer_net()
    own = gft.GFT(gft.quantized(model), process_group=False)
    assert "process_group" not in own.param_groups[0]
    assert "process_group" not in own.defaults
    assert own.state_dict().keys() == {"state", "param_groups"}


def test_graphs_and_moves_in_backward_are_refused_on_several_ranks(monkeypatch, refuses):
    monkeypatch.setattr(optim, "ranks_of", lambda group: ALONE if group is False else TWO)
    with refuses(ValueError, "in_backward=True"):
        gft.GFT(gft.quantized(integer_net()), in_backward=True)
    dense = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    assert waits_for_others(gft.Hybrid(gft.GFT(gft.quantized(integer_net())), dense))
    assert not waits_for_others(gft.Hybrid(gft.GFT(gft.quantized(integer_net()), process_group=False), dense))
    assert not waits_for_others(dense)


def test_a_layer_that_some_ranks_leave_out_cannot_be_shared_out(refuses):
    model = integer_net()
    optimizer = gft.GFT(gft.quantized(model))
    for layer in quantized_layers(model).values():
        layer.votes.scatter = lambda votes, key: votes
    layers = list(quantized_layers(model).values())
    none, some = Counts(0, 0, 0, 0, 0, 0, 0), Counts(7, 7, 1, 1, 4, 1, 3)
    distributed._sum_votes(layers, [none] * len(layers), TWO)
    with refuses(gft.UsageError, "1 of 2 ranks have used a layer.*same layers on every rank"):
        distributed._sum_votes(layers, [none] * (len(layers) - 1) + [some], TWO)
    del optimizer
