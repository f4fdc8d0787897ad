"""optim.py: GFT as a torch optimizer: its steps, schedules, groups, settings that are used or refused."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import equal, hybrid_of, levels_of, train, weights_of
from torch import nn
from torch.optim import lr_scheduler

import gft
from gft.layers import quantized_layers
from gft.storage import Storage

# Rule, vote, bits and form: every setting away from its default somewhere, every pair of a kind at least once.
WAYS = {
    "rounding-int8-memory": (gft.Rounding(), gft.Int8(), 3, True),
    "inertia-ternary-memory": (gft.Rounding(inertia=0.4), gft.Ternary(), 4, True),
    "follow at once-int4-memory": (gft.Rounding(inertia=0.0), gft.Int4(), 2, True),
    "orthogonalize-int8-memory": (gft.Rounding(orthogonalize=True, inertia=0.7), gft.Int8(), 4, True),
    "threshold-sign-packed": (gft.Rounding(threshold=0.3), gft.Sign(), 3, False),
    "running-int8-packed": (gft.Rounding(second_moment="running", threshold=1.1), gft.Int8(), 2, False),
    "topk-sequence-packed": (gft.TopK(p_min=0.04), gft.Sign(per="sequence"), 4, False),
    "topk-int4-memory": (gft.TopK(p_min=0.2), gft.Int4(), 3, True),
    "topk-literal-packed": (gft.TopK(p_min=0.04), gft.Sign(literal_mask=True), 3, False),
}
ways = pytest.mark.parametrize("way", WAYS)
both_rules = pytest.mark.parametrize("rule", [gft.Rounding(), gft.TopK(p_min=0.02)], ids=["rounding", "topk"])


# ---------------------------------------------------------------------------------------------------- one step


@ways
def test_weights_stay_on_the_grid_and_some_move(way, tiny_net, batches):
    rule, vote, bits, memory = WAYS[way]
    model = tiny_net(bits=bits, memory=memory)
    optimizer = hybrid_of(model, rule=rule, vote=vote, lr=0.7)
    before = levels_of(model)
    train(model, optimizer, batches[:5])
    for layer, old in zip(quantized_layers(model).values(), before, strict=True):
        values = layer.storage.values(layer.qweight, layer.columns)
        assert layer.storage.lowest <= int(values.min()) <= int(values.max()) <= layer.storage.limit
        assert int(layer.levels().abs().max()) <= 2 ** (bits - 1) - 1
        assert not torch.equal(layer.levels(), old)
        assert layer.qweight.dtype == (torch.int8 if memory else torch.uint8)


def test_step_never_moves_a_weight_along_its_votes(tiny_net, batches):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model), lr=0.3)
    x, y = batches[0]
    F.cross_entropy(model(x), y).backward()
    layers = quantized_layers(model).values()

    def carried_to(layer):  # without what the level adds to the byte: it follows, by chance
        return layer.qweight.int() - (layer.levels().int() << layer.storage.memory_bits - 1)

    before = [(carried_to(layer), layer.votes.votes.clone()) for layer in layers]
    optimizer.step()
    for layer, (old, votes) in zip(layers, before, strict=True):
        along = (carried_to(layer) - old).sign() * votes.sign()
        assert int(along.max()) <= 0
        assert float((along < 0).float().mean()) > 0.7


@pytest.mark.parametrize("settings", [{}, gft.PAPER, {"vote": gft.Int4(), "lr": 0.2}], ids=["default", "paper", "int4"])
def test_training_reduces_the_loss(settings, tiny_net, batches):
    model = tiny_net(memory=settings is not gft.PAPER)
    optimizer = hybrid_of(model, **settings)
    scheduler = lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=48)

    def loss() -> float:
        with torch.no_grad():
            return float(sum(F.cross_entropy(model(x), y) for x, y in batches)) / len(batches)

    before = loss()
    train(model, optimizer, batches * 6, scheduler)
    assert loss() < 0.8 * before


def test_flips_counts_level_changes(tiny_net, batches):
    model = tiny_net(bits=3)
    optimizer = gft.GFT(gft.quantized(model), lr=0.6, vote=gft.Int4(), seed=2)
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


def test_a_step_at_lr_0_renews_second_moments_and_moves_nothing(tiny_net, batches):
    """On the host as on a GPU, where lr is a tensor nobody looks at."""
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model), lr=0.4)
    train(model, optimizer, batches[:1])
    before = [(weight.clone(), optimizer.state[weight]["second_moment"].clone()) for weight in gft.quantized(model)]
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, batches[1:2])
    for weight, (old, moment) in zip(gft.quantized(model), before, strict=True):
        assert torch.equal(weight, old)
        assert not torch.equal(optimizer.state[weight]["second_moment"], moment)


# ---------------------------------------------------------------------------------------------------- random numbers


@both_rules
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


def test_layers_draw_different_numbers_in_one_optimizer_or_two():
    """Two optimizers with the default seed, over layers of one model, share no random numbers either."""
    for chosen in ([("0", "1")], [("0",), ("1",)]):
        model = nn.Sequential(*[gft.QuantLinear(32, 32, memory=False) for _ in range(2)])
        model[1].load_state_dict(model[0].state_dict())
        parts = [gft.GFT(gft.quantized(model, lambda module, name, names=names: name in names), lr=0.5, vote=gft.Sign())
                 for names in chosen]
        for layer in model:
            layer(torch.eye(32)).backward(torch.ones(32, 32))
        assert torch.equal(model[0].votes.votes, model[1].votes.votes)
        for part in parts:
            part.step()
        assert all(part.flips() > 0 for part in parts)
        assert not torch.equal(model[0].qweight, model[1].qweight)


# ---------------------------------------------------------------------------------------------------- micro-batches


@both_rules
def test_four_micro_batches_of_sign_votes_equal_one_batch(rule, tiny_net, batches):
    x, y = batches[0]
    ends = []
    for parts in (1, 4):
        model = tiny_net(bits=2)
        optimizer = gft.GFT(gft.quantized(model), lr=0.5, rule=rule, vote=gft.Sign(), seed=4)
        for some_x, some_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(model(some_x), some_y) / parts).backward()
        optimizer.step()
        ends.append(levels_of(model))
    assert equal(ends[0], ends[1])
    assert not equal(levels_of(tiny_net(bits=2)), ends[0])


def test_micro_batches_of_int8_votes_draw_numbers_of_their_own(tiny_net, batches):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model))
    layers = list(quantized_layers(model).values())
    x, y = batches[0]
    F.cross_entropy(model(x), y).backward()
    first = [layer.votes.votes.clone() for layer in layers]
    F.cross_entropy(model(x), y).backward()
    for layer, votes in zip(layers, first, strict=True):
        second = layer.votes.votes - votes
        assert layer.votes.tokens == 32
        assert not torch.equal(second, votes)
        assert F.cosine_similarity(second.flatten().float(), votes.flatten().float(), dim=0) > 0.99
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize(("rule", "memory"), [(gft.Rounding(inertia=0.3), True), (gft.Rounding(inertia=0.0), True),
                                              (gft.Rounding(threshold=0.4), False), (gft.TopK(p_min=0.1), False)],
                         ids=["memory", "no inertia", "packed", "topk"])
def test_in_backward_gives_the_same_weights_and_stores_no_votes(rule, memory, tiny_net, batches):
    ends = []
    for in_backward in (False, True):
        model = tiny_net(memory=memory)
        optimizer = hybrid_of(model, rule=rule, in_backward=in_backward)
        for x, y in batches[:3]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            assert all((layer.votes.votes is None) == in_backward for layer in quantized_layers(model).values())
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


@pytest.mark.parametrize(("bad", "rule", "in_backward"), [(math.nan, gft.Rounding(), False), (math.inf, gft.TopK(), False),
                                                          (-math.inf, gft.Rounding(), True)], ids=str)
def test_errors_that_are_not_finite_cast_no_vote_and_are_reported(bad, rule, in_backward):
    layer = gft.QuantLinear(9, 7)
    optimizer = gft.GFT(gft.quantized(layer), lr=0.9, rule=rule, in_backward=in_backward)
    before = layer.qweight.clone()
    layer(torch.randn(4, 9)).backward(torch.full((4, 7), bad))
    with pytest.warns(UserWarning, match="28 values of grad_output were NaN or inf"):
        optimizer.step()
    assert torch.equal(layer.qweight, before)

    grad_output = torch.randn(4, 7)
    grad_output[:, 3] = bad
    optimizer.zero_grad()
    layer(torch.randn(4, 9)).backward(grad_output)
    with pytest.warns(UserWarning, match="4 values"):
        optimizer.step()
    assert torch.equal(layer.qweight[3], before[3])
    assert not torch.equal(layer.qweight, before)
    assert optimizer.not_finite() == 32


# ---------------------------------------------------------------------------------------------------- schedules, groups


def test_plateau_scheduler_lowers_lr(tiny_net):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model), lr=0.4)
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
    optimizer = gft.GFT([{"params": [first], "lr": 0.0},
                         {"params": [second], "rule": gft.TopK(), "vote": gft.Sign()}], lr=0.6)
    before = first.clone(), second.clone()
    train(model, optimizer, batches[:2])
    assert torch.equal(first, before[0])
    assert not torch.equal(second, before[1])
    assert "x_rms" in optimizer.state[first]
    assert "x_rms" not in optimizer.state[second]  # signs need no scale


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


# ---------------------------------------------------------------------------------------------------- used or refused

UNUSABLE = {
    "inertia, packed": (gft.Rounding(inertia=0.3), {"bits": 3, "memory": False}, "inertia=0.3 needs memory"),
    "inertia, 7 bits": (gft.Rounding(inertia=0.3), {"bits": 7, "memory": True}, "inertia=0.3 needs memory"),
    "second_moment, memory": (gft.Rounding(second_moment="step"), {"bits": 3, "memory": True}, "second_moment='step'"),
}
unusable = pytest.mark.parametrize("case", UNUSABLE)


@unusable
def test_a_setting_that_a_weight_could_only_ignore_is_refused(case, tiny_net, refuses):
    rule, form, match = UNUSABLE[case]
    model = tiny_net(**form)
    with refuses(ValueError, match):
        gft.GFT(gft.quantized(model), rule=rule)
    assert all(layer.votes is None for layer in quantized_layers(model).values())
    gft.GFT(gft.quantized(model))  # the refused one has left nothing behind


@unusable
@pytest.mark.parametrize("joined", [False, True], ids=["GFT", "Hybrid"])
def test_a_setting_changed_to_one_of_no_use_is_refused_before_any_weight_moves(case, joined, tiny_net, batches, refuses):
    rule, form, match = UNUSABLE[case]
    model = tiny_net(**form)
    optimizer = hybrid_of(model) if joined else gft.GFT(gft.quantized(model), lr=0.5)
    train(model, optimizer, batches[:1])
    before, old = weights_of(model), optimizer.param_groups[0]["rule"]
    optimizer.param_groups[0]["rule"] = rule
    with refuses(ValueError, match):
        train(model, optimizer, batches[1:2])
    assert equal(weights_of(model), before)
    optimizer.param_groups[0]["rule"] = old
    train(model, optimizer, batches[1:2])
    assert not equal(weights_of(model), before)


def test_inertia_changed_in_training_converts_the_storage_and_keeps_the_weights_in_place(tiny_net, batches):
    model = tiny_net(bits=3)
    optimizer = hybrid_of(model, rule=gft.Rounding(inertia=0.9), lr=0.5)
    train(model, optimizer, batches[:4])
    layers = quantized_layers(model).values()

    def positions() -> list[torch.Tensor]:
        return [layer.levels() + (layer.qweight.int() - layer.levels() * layer.storage.unit) / layer.storage.resolution
                for layer in layers]

    assert all(layer.storage == Storage(3, True, inertia=True) for layer in layers)
    before = positions()
    optimizer.param_groups[0].update(rule=gft.Rounding(inertia=0.0), lr=0.0)
    train(model, optimizer, batches[4:5])
    assert all(layer.storage == Storage(3, True, inertia=False) for layer in layers)
    for new, old in zip(positions(), before, strict=True):
        assert (new - old.clamp(-3, 3)).abs().max() <= 1 / 16  # half a unit of either encoding
    optimizer.param_groups[0]["lr"] = 0.5
    before = levels_of(model)
    train(model, optimizer, batches[5:])
    assert not equal(levels_of(model), before)


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in_backward"])
def test_a_vote_changed_in_training_counts_from_the_votes_after_the_next_step(in_backward, tiny_net, batches):
    """The votes of that step are still cast, and bounded, by the old one."""
    ends = []
    for change_after in (2, 3):
        model = tiny_net()
        optimizer = gft.GFT(gft.quantized(model), lr=0.5, rule=gft.TopK(p_min=0.1), in_backward=in_backward)
        train(model, optimizer, batches[:2])
        if change_after == 2:
            optimizer.param_groups[0].update(vote=gft.Int4(), seed=9)
        train(model, optimizer, batches[2:3])
        if change_after == 3:  # by hand
            for layer in quantized_layers(model).values():
                layer.votes.vote, layer.votes.seed = gft.Int4(), 9
            optimizer.param_groups[0].update(vote=gft.Int4(), seed=9)
        train(model, optimizer, batches[3:6])
        ends.append(weights_of(model))
    assert equal(ends[0], ends[1])


@pytest.mark.parametrize(("settings", "match"), [
    ({"lr": -0.1}, r"lr=-0\.1.*from 0 to 1"), ({"lr": 1.5}, r"lr=1\.5"), ({"lr": math.nan}, "lr=nan"),
    ({"lr": 1.5, "rule": gft.TopK()}, "k, the fraction"), ({"rule": "adam"}, r"rule='adam'.*gft\.Rounding\(\)"),
    ({"rule": gft.rules.Rule()}, "rule="), ({"vote": "int8"}, r"vote='int8'.*gft\.Int8\(\)"), ({"seed": -1}, "seed=-1"),
    ({"seed": 2**64}, "seed=1844"), ({"seed": 0.5}, r"seed=0\.5"), ({"seed": True}, "seed=True")], ids=str)
def test_gft_refuses_settings_no_rule_can_work_with(settings, match, tiny_net, refuses):
    model = tiny_net()
    with refuses(ValueError, match):
        gft.GFT(gft.quantized(model), **settings)


@pytest.mark.parametrize(("build", "match"), [
    (lambda: gft.Rounding(inertia=1.0), "inertia=1.*0.999"), (lambda: gft.Rounding(threshold=3.5), "threshold=3.5"),
    (lambda: gft.Rounding(threshold="2"), "threshold='2'"), (lambda: gft.Rounding(second_moment="both"), "'both'.*'step'"),
    (lambda: gft.Rounding(orthogonalize="yes"), "orthogonalize='yes'"), (lambda: gft.TopK(p_min=-0.1), r"p_min=-0\.1"),
    (lambda: gft.TopK(p_min=math.nan), "p_min=nan"), (lambda: gft.Sign(per="batch"), "per='batch'.*'token'")],
    ids=["inertia", "threshold", "type", "second_moment", "orthogonalize", "p_min", "nan", "per"])
def test_rules_and_votes_refuse_settings_out_of_range(build, match, refuses):
    with refuses(ValueError, match):
        build()


def test_gft_refuses_what_is_not_a_quantized_weight(tiny_net, refuses):
    model = tiny_net()
    with refuses(TypeError, r"float32 tensor of shape.*gft\.quantized\(model\)"):
        gft.GFT(model.parameters())
    with refuses(TypeError, r"not str"):
        gft.GFT(["weight"])


@pytest.mark.parametrize(("loose", "mend"), [({"inertia": 0.5}, r"rule=gft\.Rounding\(inertia=0\.5\)"),
                                             ({"p_min": 0.1}, r"rule=gft\.TopK"), ({"per": "sequence"}, r"vote=gft\.Sign")])
def test_a_setting_of_a_rule_beside_the_rule_is_refused(tiny_net, refuses, loose, mend):
    model = tiny_net()
    with refuses(ValueError, mend):
        gft.GFT([{"params": gft.quantized(model), **loose}])
    gft.GFT([{"params": gft.quantized(model), "name": "a label"}])


def test_a_layer_whose_optimizer_is_gone_counts_no_votes_and_says_so(tiny_net, batches):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model))
    x, y = batches[0]
    F.cross_entropy(model(x), y).backward()
    del optimizer
    with pytest.warns(UserWarning, match="has no optimizer"):
        F.cross_entropy(model(x), y).backward()
    assert all(layer.votes is None for layer in quantized_layers(model).values())


def test_in_backward_changed_in_a_group_counts_from_the_next_step(tiny_net, batches):
    """Votes that are there when it is switched on still move the weights."""
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model), lr=0.5)
    for in_backward in (True, False):
        for switched in (False, True):
            before, flips = levels_of(model), optimizer.flips()
            F.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
            moved_in_backward = not equal(before, levels_of(model))
            assert moved_in_backward == (switched == in_backward)
            optimizer.param_groups[0]["in_backward"] = in_backward
            optimizer.step()
            assert optimizer.flips() > flips


def test_a_step_whose_layers_or_weights_have_been_replaced_is_refused(refuses):
    def network():
        model = gft.quantize_(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)))
        return model, gft.GFT(gft.quantized(model))

    model, optimizer = network()
    gft.dequantize_(model)
    with refuses(ValueError, "are gone.*new optimizer"):
        optimizer.step()
    model, optimizer = network()
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    with refuses(ValueError, r"assign=True.*gft\.quantized"):
        optimizer.step()
