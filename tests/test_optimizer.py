"""optimizer.py: GFT and Hybrid as torch optimizers: schedules, groups, resuming, and what they refuse."""

import copy
import io
import math
import pickle
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import gft
from gft.layers import quantized_layers


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data, scheduler=None) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def hybrid_of(model: nn.Module, **settings) -> gft.Hybrid:
    return gft.Hybrid(gft.GFT(gft.quantized(model), **{"lr": 0.4, "seed": 11, **settings}),
                      torch.optim.AdamW(gft.dense(model), lr=3e-3))


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def levels_of(model: nn.Module) -> list[torch.Tensor]:
    return [layer.levels().clone() for layer in quantized_layers(model).values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def through_file(state):
    """A state_dict as it comes back from a file, with nothing unpickled but tensors and numbers."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ---------------------------------------------------------------------------------------------------- one step

COMBINATIONS = list(product(("rounding", "topk"), ("int8", "int4", "ternary", "sign"), ("memory", "packed")))


@pytest.mark.parametrize(("rule", "vote", "form"), COMBINATIONS, ids="-".join)
def test_weights_stay_on_the_grid_and_some_move(rule, vote, form, tiny_net, batches):
    model = tiny_net(bits=3, memory=form == "memory")
    optimizer = hybrid_of(model, rule=rule, vote=vote, lr=0.7, p_min=0.04)
    before = levels_of(model)
    train(model, optimizer, batches)
    for layer, old in zip(quantized_layers(model).values(), before, strict=True):
        values = layer.grid.values(layer.weight)
        assert layer.grid.lowest <= int(values.min()) <= int(values.max()) <= layer.grid.limit
        assert int(layer.levels().abs().max()) <= 3
        assert not torch.equal(layer.levels(), old)
        assert layer.weight.dtype == (torch.int8 if form == "memory" else torch.uint8)


def test_step_never_moves_a_weight_along_its_votes(tiny_net, batches):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model), lr=0.3)
    x, y = batches[0]
    F.cross_entropy(model(x), y).backward()
    before = [(weight.int(), weight.ballot.votes.clone()) for weight in gft.quantized(model)]
    optimizer.step()
    for weight, (old, votes) in zip(gft.quantized(model), before, strict=True):
        along = (weight.int() - old).sign() * votes.sign()
        assert int(along.max()) <= 0
        assert float((along < 0).float().mean()) > 0.7


@pytest.mark.parametrize("settings", [{}, gft.PAPER, {"vote": "int4", "lr": 0.2}], ids=["default", "paper", "int4"])
def test_training_reduces_the_loss(settings, tiny_net, batches):
    model = tiny_net(memory=settings is not gft.PAPER)
    optimizer = hybrid_of(model, **settings)
    scheduler = lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=64)

    def loss() -> float:
        with torch.no_grad():
            return float(sum(F.cross_entropy(model(x), y) for x, y in batches)) / len(batches)

    before = loss()
    train(model, optimizer, batches * 8, scheduler)
    assert loss() < 0.75 * before


def test_paper_settings_are_those_of_the_paper(tiny_net):
    optimizer = gft.GFT(gft.quantized(tiny_net()), **gft.PAPER)
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in ("lr", "rule", "vote", "p_min", "mask")} == {
        "lr": 0.75, "rule": "topk", "vote": "sign", "p_min": 0.001, "mask": "none"}


def test_flips_counts_level_changes(tiny_net, batches):
    model = tiny_net(bits=3)
    optimizer = gft.GFT(gft.quantized(model), lr=0.6, vote="int4", seed=2)
    counted = 0
    for batch in batches[:4]:
        before = levels_of(model)
        train(model, optimizer, [batch])
        counted += sum(int((new != old).sum()) for new, old in zip(levels_of(model), before, strict=True))
    assert optimizer.flips() == counted > 0


def test_zero_grad_forgets_votes(tiny_net, batches):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model), lr=0.9)
    x, y = batches[0]
    before = weights_of(model)
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert equal(weights_of(model), before)
    assert optimizer.flips() == 0


def test_step_without_votes_only_counts(tiny_net):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model), lr=0.9)
    before = weights_of(model)
    optimizer.step()
    assert equal(weights_of(model), before)
    assert optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize("joined", [False, True], ids=["GFT", "Hybrid"])
def test_step_takes_a_closure(joined, tiny_net, batches):
    x, y = batches[0]
    results = []
    for with_closure in (False, True):
        model = tiny_net()
        optimizer = hybrid_of(model) if joined else gft.GFT(gft.quantized(model), lr=0.4, seed=11)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure) if with_closure else closure()
        if not with_closure:
            optimizer.step()
        results.append((float(loss.detach()), weights_of(model)))
    assert results[0][0] == results[1][0]
    assert equal(results[0][1], results[1][1])
    assert not equal(weights_of(tiny_net()), results[0][1])


# ---------------------------------------------------------------------------------------------------- random numbers


@pytest.mark.parametrize("rule", ["rounding", "topk"])
def test_equal_seeds_give_equal_weights_and_others_do_not(rule, tiny_net, batches, rng_untouched):
    ends = []
    for seed in (7, 7, 2**63 + 5):
        torch.manual_seed(len(ends))  # of no importance
        model = tiny_net(memory=False)
        optimizer = gft.GFT(gft.quantized(model), lr=0.4, rule=rule, seed=seed)
        with rng_untouched():
            train(model, optimizer, batches[:2])
        ends.append(weights_of(model))
    assert equal(ends[0], ends[1])
    assert not equal(ends[0], ends[2])


@pytest.mark.parametrize("done", [0, 2], ids=["before the first step", "between steps"])
def test_forward_without_backward_leaves_no_trace(done, tiny_net, batches):
    """A look at the loss with gradients on: a resumed run, which did not look, must end with the same weights."""
    ends = []
    for looks in (0, 3):
        model = tiny_net()
        optimizer = hybrid_of(model)
        train(model, optimizer, batches[:done])
        for x, _ in batches[-looks:] if looks else []:
            model(x)
        train(model, optimizer, batches[done : done + 2])
        ends.append(weights_of(model))
    assert equal(ends[0], ends[1])


def test_layers_draw_different_numbers():
    model = nn.Sequential(gft.QuantLinear(32, 32, memory=False), gft.QuantLinear(32, 32, memory=False))
    model[1].load_state_dict(model[0].state_dict())
    optimizer = gft.GFT(gft.quantized(model), lr=0.5, vote="sign")
    for layer in model:
        layer(torch.eye(32)).backward(torch.ones(32, 32))
    assert torch.equal(model[0].ballot.votes, model[1].ballot.votes)
    optimizer.step()
    assert not torch.equal(model[0].weight, model[1].weight)


# ---------------------------------------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("rule", ["rounding", "topk"])
def test_four_micro_batches_of_sign_votes_equal_one_batch(rule, tiny_net, batches):
    x, y = batches[0]
    ends = []
    for parts in (1, 4):
        model = tiny_net(bits=2)
        optimizer = gft.GFT(gft.quantized(model), lr=0.5, rule=rule, vote="sign", seed=4)
        for some_x, some_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(model(some_x), some_y) / parts).backward()
        optimizer.step()
        ends.append(weights_of(model))
    assert equal(ends[0], ends[1])
    assert not equal(weights_of(tiny_net(bits=2)), ends[0])


def test_micro_batches_of_int8_votes_draw_numbers_of_their_own(tiny_net, batches):
    model = tiny_net()
    gft.GFT(gft.quantized(model))
    layers = list(quantized_layers(model).values())
    x, y = batches[0]
    F.cross_entropy(model(x), y).backward()
    first = [layer.ballot.votes.clone() for layer in layers]
    F.cross_entropy(model(x), y).backward()
    for layer, votes in zip(layers, first, strict=True):
        second = layer.ballot.votes - votes
        assert layer.ballot.tokens == 32
        assert not torch.equal(second, votes)
        assert F.cosine_similarity(second.flatten().float(), votes.flatten().float(), dim=0) > 0.99


@pytest.mark.parametrize("rule", ["rounding", "topk"])
@pytest.mark.parametrize("memory", [False, True], ids=["packed", "memory"])
def test_in_backward_gives_the_same_weights_and_stores_no_votes(rule, memory, tiny_net, batches):
    ends = []
    for in_backward in (False, True):
        model = tiny_net(memory=memory)
        optimizer = hybrid_of(model, rule=rule, in_backward=in_backward)
        for x, y in batches[:3]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            assert all((layer.ballot.votes is None) == in_backward for layer in quantized_layers(model).values())
            optimizer.step()
        ends.append((weights_of(model), optimizer.optimizers[0].flips()))
    assert equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] > 0


def test_in_backward_moves_the_weights_with_each_micro_batch(tiny_net, batches):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model), lr=0.6, in_backward=True)
    trail = [levels_of(model)]
    for x, y in batches[:3]:
        F.cross_entropy(model(x), y).backward()
        trail.append(levels_of(model))
    assert all(not equal(one, other) for one, other in pairwise(trail))
    optimizer.step()
    assert equal(levels_of(model), trail[-1])


# ---------------------------------------------------------------------------------------------------- NaN and inf


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in_backward"])
@pytest.mark.parametrize("rule", ["rounding", "topk"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_errors_that_are_not_finite_cast_no_vote_and_are_counted(bad, rule, in_backward):
    layer = gft.QuantLinear(9, 7)
    optimizer = gft.GFT(gft.quantized(layer), lr=0.9, rule=rule, in_backward=in_backward)
    before = layer.weight.clone()
    layer(torch.randn(4, 9)).backward(torch.full((4, 7), bad))
    optimizer.step()
    assert torch.equal(layer.weight, before)
    assert optimizer.not_finite() == 28

    delta = torch.randn(4, 7)
    delta[:, 3] = bad
    optimizer.zero_grad()
    layer(torch.randn(4, 9)).backward(delta)
    optimizer.step()
    assert torch.equal(layer.weight[3], before[3])
    assert not torch.equal(layer.weight, before)
    assert optimizer.not_finite() == 32


def test_not_finite_is_zero_in_a_healthy_run(tiny_net, batches):
    model = tiny_net()
    optimizer = hybrid_of(model)
    train(model, optimizer, batches[:2])
    assert optimizer.optimizers[0].not_finite() == 0


# ---------------------------------------------------------------------------------------------------- schedules, groups

SCHEDULERS = {
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=6),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 6, eta_min=0.001),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, [g["lr"] for g in opt.param_groups], total_steps=9,
                                                      cycle_momentum=False),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.3, 2), lr_scheduler.ExponentialLR(opt, 0.8)], [2]),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_drive_lr_as_they_do_that_of_sgd(kind, tiny_net, batches):
    model = tiny_net()
    optimizer = hybrid_of(model)
    twin = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.4, 3e-3)])
    scheduler, twin_scheduler = SCHEDULERS[kind](optimizer), SCHEDULERS[kind](twin)
    start = [group["lr"] for group in optimizer.param_groups]
    for batch in batches[:6]:
        train(model, optimizer, [batch], scheduler)
        twin.step()
        twin_scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in twin.param_groups]
    assert optimizer.optimizers[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != start[0]


def test_plateau_scheduler_lowers_lr(tiny_net):
    optimizer = gft.GFT(gft.quantized(tiny_net()), lr=0.4)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in_backward"])
def test_scheduler_that_leaves_the_range_moves_no_weight(in_backward, tiny_net, batches, refuses):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model), lr=0.5, in_backward=in_backward)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 + 2 * step)
    train(model, optimizer, batches[:1], scheduler)
    before = weights_of(model)
    with refuses(ValueError, r"lr=1\.5.*from 0 to 1"):
        train(model, optimizer, batches[1:2])
    assert equal(weights_of(model), before)


def test_param_groups_have_settings_of_their_own(tiny_net, batches):
    model = tiny_net()
    first, second = gft.quantized(model)
    optimizer = gft.GFT([{"params": [first], "lr": 0.0}, {"params": [second], "rule": "topk", "vote": "sign"}], lr=0.6)
    before = first.clone(), second.clone()
    train(model, optimizer, batches[:2])
    assert torch.equal(first, before[0])
    assert not torch.equal(second, before[1])
    assert (first.ballot.vote, second.ballot.vote) == ("int8", "sign")


def test_add_param_group_joins_a_running_optimizer(tiny_net, batches):
    model = tiny_net()
    first, second = gft.quantized(model)
    optimizer = gft.GFT([first], lr=0.5)
    model.block["mlp"][2].eval()
    train(model, optimizer, batches[:1])
    before = second.clone()
    optimizer.add_param_group({"params": [second], "lr": 0.8})
    train(model, optimizer, batches[1:3])
    assert not torch.equal(second, before)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.8]
    assert first.ballot.layer != second.ballot.layer


def test_hybrid_add_param_group_sends_parameters_to_the_part_that_trains_them(tiny_net):
    model, more = tiny_net(), tiny_net(seed=1)
    optimizer = hybrid_of(model)
    gft_part, adamw = optimizer.optimizers
    optimizer.add_param_group({"params": gft.quantized(more), "lr": 0.1})
    optimizer.add_param_group({"params": more.head.parameters(), "lr": 0.01})  # a generator, as modules give it
    optimizer.add_param_group({"params": more.embed.weight})
    assert [len(group["params"]) for group in gft_part.param_groups] == [2, 2]
    assert [len(group["params"]) for group in adamw.param_groups] == [len(gft.dense(model)), 2, 1]
    with pytest.raises(ValueError, match="no part of this Hybrid"):
        gft.Hybrid(gft_part).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_both_are_torch_optimizers(tiny_net):
    optimizer = hybrid_of(tiny_net())
    for one in (optimizer, optimizer.optimizers[0]):
        assert isinstance(one, torch.optim.Optimizer)
        assert "lr" in repr(one)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 3e-3]
    assert optimizer.param_groups[0] is optimizer.optimizers[0].param_groups[0]


def test_step_hooks_of_hybrid_are_called(tiny_net, batches):
    model = tiny_net()
    optimizer = hybrid_of(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, batches[:1])
    assert calls == ["before", "after"]


# ---------------------------------------------------------------------------------------------------- layers together


@pytest.fixture
def joined(monkeypatch):
    """A function after which weights move together, as on a GPU, by Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("kernels of a GPU take no tensors of the CPU")
    fused = pytest.importorskip("gft.kernels.fused")
    monkeypatch.setattr(fused.alike, "MOST_LAYERS", 2)
    return lambda: monkeypatch.setattr(gft.kernels, "joint_of", lambda weight: fused if weight.numel() else None)


def all_of(optimizer: gft.GFT) -> list[torch.Tensor]:
    """Weights and state."""
    return [tensor.clone() for weight in optimizer.param_groups[0]["params"]
            for tensor in (weight, *optimizer.state[weight].values()) if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in_backward"])
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
def test_training_moves_weights_together_as_it_does_each_by_itself(joined, in_backward, memory, tiny_net, batches):
    ends = []
    for together in (False, True):
        if together:
            joined()
        model = tiny_net(bits=3, memory=memory)
        optimizer = gft.GFT(gft.quantized(model), lr=0.7, seed=11, inertia=0.6, in_backward=in_backward)
        for pair in (batches[:2], batches[2:4], batches[4:6]):
            for x, y in pair:  # two micro-batches
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append(all_of(optimizer))
        assert optimizer.flips() > 0
    assert equal(*ends)


def test_layers_of_several_kinds_move_together_as_each_by_itself(joined):
    shapes = [(9, 8), (9, 8), (5, 7), (9, 8), (9, 8), (3, 0), (9, 8), (5, 7)]  # (in, out)
    ends = []
    for together in (False, True):
        if together:
            joined()
        torch.manual_seed(0)
        layers = [gft.QuantLinear(*shape, bits=2 + number % 2, memory=number != 3) for number, shape in enumerate(shapes)]
        for number, layer in enumerate(layers):
            layer.scale.mul_(1 + number / 4)
        optimizer = gft.GFT([layer.weight for layer in layers], lr=0.8, seed=5, inertia=0.2, quorum=0.3, sizes="running")
        for step, lr in enumerate((0.8, 0.0, 0.6, 0.6)):
            optimizer.param_groups[0]["lr"] = lr
            for number, layer in enumerate(layers):
                if (number, step) != (4, 3):  # one hears nothing
                    layer.weight.ballot.votes = torch.randint(-99, 100, shapes[number][::-1], dtype=torch.int32)
                    layer.weight.ballot.tokens = 1
            optimizer.step()
        ends.append(all_of(optimizer))
        assert optimizer.flips() > 0
        assert int(optimizer.state[layers[4].weight]["last_flips"]) == 0
    assert equal(*ends)


# ---------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("joined", [False, True], ids=["GFT", "Hybrid"])
@pytest.mark.parametrize("transport", [lambda state: state, through_file], ids=["in memory", "through a file"])
def test_state_dict_continues_bit_for_bit(joined, transport, tiny_net, batches):
    def build(seed: int):
        model = tiny_net(seed=seed)
        # A resumed run takes its settings from the file.
        settings = {"lr": 0.35, "seed": 21, "vote": "int4"} if seed == 0 else {}
        return model, hybrid_of(model, **settings) if joined else gft.GFT(gft.quantized(model), **settings)

    whole, optimizer = build(0)
    train(whole, optimizer, batches)

    half, optimizer = build(0)
    train(half, optimizer, batches[:4])
    saved = transport({"model": half.state_dict(), "optimizer": optimizer.state_dict()})
    resumed, second = build(1)
    resumed.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, batches[4:])

    assert equal(weights_of(resumed), weights_of(whole))
    assert not equal(weights_of(half), weights_of(whole))
    gft_part = second.optimizers[0] if joined else second
    assert gft_part.param_groups[0]["step"] == 8
    assert gft_part.flips() > 0


def test_state_dict_keeps_running_scales_in_float(tiny_net, batches):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model))
    train(model, optimizer, batches[:2])
    other = gft.GFT(gft.quantized(tiny_net(seed=1)))
    other.load_state_dict(optimizer.state_dict())
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        for key in ("x_rms", "delta_rms"):
            assert two[key].dtype == torch.float32
            assert torch.equal(one[key], two[key])


def test_hybrid_refuses_the_state_of_other_optimizers(tiny_net, refuses):
    optimizer = hybrid_of(tiny_net())
    with refuses(ValueError, "not of a Hybrid of 2 optimizers"):
        optimizer.load_state_dict(optimizer.optimizers[0].state_dict())


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("settings", "match"), [
    ({"lr": -0.1}, r"lr=-0\.1.*from 0 to 1"), ({"lr": 1.5}, r"lr=1\.5"), ({"lr": math.nan}, "lr=nan"),
    ({"lr": 1.5, "rule": "topk"}, "k, the fraction"), ({"rule": "adam"}, "rule='adam'.*rounding, topk"),
    ({"vote": "int2"}, "vote='int2'.*sign, ternary, int4, int8"), ({"sample": "batch"}, "sample='batch'.*token"),
    ({"mask": "all"}, "mask='all'.*none, literal"), ({"p_min": -0.1}, "p_min=-0.1"), ({"p_min": 1.1}, "p_min=1.1"),
    ({"p_min": math.nan}, "p_min=nan"), ({"seed": -1}, "seed=-1"), ({"seed": 2**64}, "seed=1844"),
    ({"seed": 0.5}, r"seed=0\.5")], ids=str)
def test_gft_refuses_settings_no_rule_can_work_with(settings, match, tiny_net, refuses):
    with refuses(ValueError, match):
        gft.GFT(gft.quantized(tiny_net()), **settings)


def test_gft_refuses_what_is_not_a_quantized_weight(tiny_net, refuses):
    model = tiny_net()
    with refuses(TypeError, r"float32 tensor of shape.*gft\.quantized\(model\)"):
        gft.GFT(model.parameters())
    with refuses(TypeError, r"not str"):
        gft.GFT(["weight"])


def test_hybrid_refuses_quantized_weights_in_adamw(tiny_net, refuses):
    model = tiny_net()
    with refuses(ValueError, r"AdamW was given a quantized weight.*gft\.dense\(model\)"):
        gft.Hybrid(gft.GFT(gft.quantized(model)), torch.optim.AdamW(model.parameters()))


def test_hybrid_refuses_parameters_with_two_optimizers(tiny_net, refuses):
    model = tiny_net()
    with refuses(ValueError, "AdamW and SGD share a parameter"):
        gft.Hybrid(torch.optim.AdamW(gft.dense(model)), torch.optim.SGD([model.head.weight]))
    with refuses(ValueError, "GFT and GFT share a parameter"):
        gft.Hybrid(gft.GFT(gft.quantized(model)), gft.GFT(gft.quantized(model)[:1]))


def test_hybrid_refuses_what_is_no_optimizer(refuses):
    with refuses(ValueError, "at least one"):
        gft.Hybrid()
    with refuses(TypeError, "not Linear"):
        gft.Hybrid(nn.Linear(2, 2))


def test_pickled_optimizer_goes_on_alike_and_a_deep_copy_says_what_to_do(tiny_net, batches, refuses):
    model = tiny_net(bits=3)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.4, seed=3), torch.optim.AdamW(gft.dense(model), lr=0.01))
    twin, twin_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    for one, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        train(one, its_optimizer, batches)
    weights = gft.quantized(model)
    assert all(torch.equal(a, b) for a, b in zip(weights, gft.quantized(twin), strict=True))
    with refuses(ValueError, "deep copy of weights"):
        copy.deepcopy((model, optimizer))
