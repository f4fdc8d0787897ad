"""`Rounding(momentum=…)`: weights follow a running mean of their votes, of which each keeps a byte."""


import pytest
import torch
import torch.nn.functional as F
from helpers import integer_net, losses_step_by_step_and_captured, moved, steps
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gft
from gft import reference
from gft.ops import KeptMean
from gft.philox import NoiseKey
from gft.rules import matrices
from gft.rules.matrices import BOUND
from gft.rules.mean import MEAN, SCALE, State
from gft.rules.momentum import Momentum
from gft.rules.orthogonalize import orthogonalized

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(5, 9), (9, 5), (1, 7), (7, 1), (1, 1), (12, 30)]
CPU = torch.device("cpu")


def some_votes(shape: tuple[int, int], steps: int = 1) -> list[torch.Tensor]:
    return [torch.randint(-999, 1000, shape, dtype=torch.int32) for _ in range(steps)]


def renewed(kept: Momentum, steps: list[torch.Tensor], seed: int = 0) -> tuple[list[torch.Tensor], State]:
    """What moves the weights in each step, and what is kept in the end."""
    state = kept.start(*steps[0].shape, steps[0].device)
    return [kept.renew([one], [state], [NoiseKey(seed, step, 3)])[0] for step, one in enumerate(steps)], state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_what_moves_weights_is_nesterovs_mean_up_to_the_rounding_of_the_mean(shape, device):
    steps = some_votes(shape, 6)
    moves, _ = renewed(Momentum(0.8), [one.to(device) for one in steps])
    wanted = reference.nesterov([one.tolist() for one in steps], 0.8)
    for move, one in zip(moves, map(torch.tensor, wanted), strict=True):
        assert move.dtype == torch.int32
        assert move.abs().max() <= BOUND
        # In its own unit. A rounding is off by less than 999/127 a step, those of steps before by 0.8, 0.64, … of as much.
        unit = float((move.cpu() * one).sum() / (one * one).sum())
        assert (move.cpu() / unit - one).abs().max() <= 2 * 0.8 * 5 * 999 / 127


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))
def test_the_mean_is_rounded_without_bias_and_lies_within_its_units(rows, columns, seed):
    torch.manual_seed(seed)
    votes, kept = some_votes((rows, columns))[0], Momentum(0.9)
    means = []
    for draw in range(40):
        _, state = renewed(kept, [votes], draw)
        means.append(KeptMean(state[MEAN], state[SCALE]).floats())
        assert (means[-1] - 0.1 * votes).abs().max() <= state[SCALE].max()
    deviation = state[SCALE].max() / 2 / 40**0.5
    assert (torch.stack(means).mean(0) - 0.1 * votes).abs().max() <= 6 * deviation + 1e-3


def test_no_votes_leave_no_mean_and_one_column_does_not_look_at_another():
    none, kept = torch.zeros(4, 5, dtype=torch.int32), Momentum(0.95)
    (move,), state = renewed(kept, [none])
    assert not move.any()
    assert not state[MEAN].any()
    one = none.clone()
    one[:, 2] = torch.tensor([1, -2, 3, 0])
    small = none.clone()
    small[:, 2], small[:, 0] = one[:, 2], 2**30
    (_, state), (_, beside) = (renewed(kept, [votes]) for votes in (one, small))
    assert torch.equal(state[MEAN][:, 2], beside[MEAN][:, 2])
    assert state[MEAN][:, 2].abs().max() == 127
    wide = torch.full((3, 4), 2**62)
    (move,), _ = renewed(kept, [wide])
    assert (move - BOUND).abs().max() <= 1
    assert [one.shape for one in renewed(kept, [torch.zeros(0, 4, dtype=torch.int32)])[0]] == [(0, 4)]


def test_what_steps_agree_on_is_found_among_noise():
    agreed = torch.randn(60, 80)
    noisy = [(100 * (agreed * 0.3 + torch.randn(60, 80))).to(torch.int32) for _ in range(60)]
    moves, _ = renewed(Momentum(0.95), noisy)
    likeness = [float(F.cosine_similarity(one.float().flatten(), agreed.flatten(), 0)) for one in (moves[-1], noisy[-1])]
    assert likeness[0] > likeness[1] + 0.4


@pytest.mark.gpu
def test_a_gpu_keeps_the_same_bits():
    steps = some_votes((33, 70), 5)
    (moves, state), (others, other) = (renewed(Momentum(0.95), [one.to(device) for one in steps])
                                       for device in ("cpu", "cuda"))
    assert all(torch.equal(one, another.cpu()) for one, another in zip(moves, others, strict=True))
    assert all(torch.equal(state[name], other[name].cpu()) for name in state)


# ---------------------------------------------------------------------------------------------------- in the optimizer


RULE = gft.Rounding(momentum=0.9, orthogonalize=True)


@pytest.mark.parametrize(("settings", "rule", "in_backward"), [
    ({}, RULE, False), ({"bits": 4}, gft.Rounding(momentum=0.9), True),
    ({"memory": "half"}, RULE, False), ({"memory": False}, gft.Rounding(momentum=0.9, threshold=0.6), False),
    ({"bits": 3}, gft.Rounding(momentum=0.9, inertia=0.5), False)],
    ids=["orthogonalized", "as they are, in backward", "half a byte", "packed", "with inertia"])
def test_networks_learn_by_it(settings, rule, in_backward):
    model = integer_net(**settings)
    own = gft.GFT(gft.quantized(model), 0.2, rule, in_backward=in_backward, seed=3)
    losses = steps(model, gft.Hybrid(own, torch.optim.AdamW(gft.dense(model), lr=1e-3)), 60)
    assert losses[-1] < 0.7 * losses[0]
    assert own.flips() > 0


def test_layers_that_take_turns_move_as_they_do_together(monkeypatch):
    ends, together, step = [], [], gft.Rounding.step
    monkeypatch.setattr(gft.Rounding, "step",
                        lambda rule, weights, lr: together.append(len(weights)) or step(rule, weights, lr))
    for at_once in (matrices.AT_ONCE, 1):
        monkeypatch.setattr(matrices, "AT_ONCE", at_once)
        torch.manual_seed(2)
        layers = [gft.QuantLinear(12, 12, bits=4) for _ in range(4)]
        optimizer = gft.GFT([layer.qweight for layer in layers], 0.3, gft.Rounding(momentum=0.9, warmup=0), seed=5)
        before = [layer.qweight.clone() for layer in layers]
        for layer in layers:
            layer.votes.votes, layer.votes.tokens = some_votes((12, 12))[0], BOUND
        optimizer.step()
        ends.append([layer.qweight for layer in layers])
        assert not any(torch.equal(one, other) for one, other in zip(before, ends[-1], strict=True))
    assert together == [4, 1, 1, 1, 1]
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [RULE, gft.Rounding(momentum=0.9)], ids=str)
def test_a_captured_step_learns_by_it(rule):
    one_by_one, captured = losses_step_by_step_and_captured(integer_net(4), 0.2, rule)
    assert captured[-1] < 0.8 * captured[0]
    assert captured == pytest.approx(one_by_one, rel=0.1, abs=0.05)


def test_state_is_a_byte_a_weight_and_a_float_a_column():
    model = integer_net()
    optimizer = gft.GFT(gft.quantized(model), rule=RULE)
    steps(model, optimizer, 1)
    for weight, shape in zip(gft.quantized(model), [(40, 24), (41, 40)], strict=True):
        mean, scale = optimizer.state[weight][MEAN], optimizer.state[weight][SCALE]
        assert (mean.dtype, scale.dtype) == (torch.int8, torch.float32)
        assert (tuple(mean.shape), tuple(scale.shape)) == (shape, shape[1:])


@pytest.mark.parametrize(("memory", "plain_lr"), [(True, 0.2), (False, 0.4)])  # packed and without momentum, lr counts half
def test_weights_move_by_a_quarter_of_lr_as_if_the_mean_had_been_cast(memory, plain_lr):
    votes = some_votes((8, 12))[0]
    (mean,), _ = renewed(Momentum(0.9), [votes])
    plain = gft.Rounding(inertia=0.0 if memory else None)
    alone = moved(gft.Rounding(momentum=0.9), 0.8, votes, memory=memory)
    both = moved(RULE, 0.8, votes, memory=memory)
    assert torch.equal(alone, moved(plain, plain_lr, mean, memory=memory))
    assert torch.equal(both, moved(plain, plain_lr, orthogonalized([mean], alone=True)[0], memory=memory))
    assert not torch.equal(alone, both)


def test_layers_and_steps_round_their_means_by_numbers_of_their_own():
    """Two layers with the same votes, and one layer with the same votes in two micro-batches."""
    torch.manual_seed(1)
    layers = nn.ModuleList(gft.QuantLinear(12, 8, bits=4) for _ in range(2))
    optimizer = gft.GFT(gft.quantized(layers), rule=RULE, seed=5)
    votes = some_votes((8, 12))[0]
    for layer in layers:
        layer.votes.votes, layer.votes.tokens = votes, BOUND
    optimizer.step()
    one, other = (optimizer.state[layer.qweight][MEAN] for layer in layers)
    assert not torch.equal(one, other)
    assert (one - other).abs().max() <= 1


def test_a_mean_of_another_shape_or_damaged_is_refused_and_changes_nothing(refuses):
    model = integer_net()
    optimizer = gft.GFT(gft.quantized(model), 0.2, RULE)
    steps(model, optimizer, 2)
    before = optimizer.state[model[0].qweight][MEAN].clone()
    for name, change, words in ((MEAN, lambda mean: mean[1:], r"int8 of shape \(40, 24\)"),
                                (MEAN, lambda mean: mean.float(), "int8"), (SCALE, lambda scale: None, "None"),
                                (SCALE, lambda scale: scale * float("nan"), "not finite")):
        state = optimizer.state_dict()
        state["state"][0][name] = change(state["state"][0][name])
        with refuses(ValueError, f"a {name} of votes.*{words}"):
            optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[model[0].qweight][MEAN], before)


def test_a_rule_that_keeps_another_mean_starts_anew_and_one_without_keeps_none():
    model = integer_net(memory=False)
    optimizer = gft.GFT(gft.quantized(model), 0.2, RULE)
    weight = model[0].qweight
    for rule, shape in ((RULE, (40, 24)), (gft.Rounding(momentum_rank=2), (64, 2)), (RULE, (40, 24)),
                        (gft.Rounding(momentum_rank=3), (64, 3))):
        optimizer.param_groups[0]["rule"] = rule
        optimizer.load_state_dict(optimizer.state_dict())  # saved before the rule took a step
        steps(model, optimizer, 1)
        assert optimizer.state[weight][MEAN].shape == shape
    assert SCALE not in optimizer.state[weight]
    optimizer.param_groups[0]["rule"] = gft.Rounding()
    optimizer.load_state_dict(optimizer.state_dict())
    assert MEAN not in optimizer.state[weight]


def test_what_cannot_be_is_refused(refuses):
    for wrong in (-0.1, 1, 1.5, "0.9", None, float("nan")):
        with refuses((ValueError, TypeError), "momentum="):
            gft.Rounding(momentum=wrong)
    with refuses(ValueError, "momentum and momentum_rank.*choose one"):
        gft.Rounding(momentum=0.9, momentum_rank=4)
