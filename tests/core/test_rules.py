"""Rules as an optimizer uses them: what they refuse, what lr means, a rule of one's own, and lr = 0."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers import train

import gft
from gft import ops
from gft.initialize import SPACING
from gft.ops.rounding import MULTIPLES, SUITED, RoundingJob
from gft.philox import NoiseKey
from gft.rules import Rounding, Rule, StepResult, TopK, WeightStep
from gft.rules.rounding import levels_per_step
from gft.storage import Storage

STORAGES = [Storage(bits, memory) for bits in range(2, 9) for memory in (True, False)]


def name_of(storage: Storage) -> str:
    return f"{storage.bits}bit-" + ("memory" if storage.memory else "packed")


def weight_of(storage: Storage, votes: torch.Tensor, step: int = 0, **rest) -> WeightStep:
    values = torch.randint(storage.lowest, storage.limit + 1, votes.shape, dtype=torch.int8)
    return WeightStep(storage.from_values(values).clone(), votes, int(votes.abs().max()), storage, 0.05,
                      NoiseKey(9, step, stream=6), **rest)


# ---------------------------------------------------------------------------------------------------- any rule, any storage


@pytest.mark.parametrize("rule", [Rounding(), TopK(p_min=0.05)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("storage", STORAGES, ids=name_of)
def test_a_step_stays_on_the_grid_and_moves_weights_against_their_votes(rule, storage):
    storage = rule.storage_for(storage)
    weight = weight_of(storage, torch.randint(-40, 41, (63, 65), dtype=torch.int32))
    old = storage.values(weight.stored, 65).clone()

    result, = rule.step([weight], 0.8)

    new = storage.values(weight.stored, 65)
    assert storage.lowest <= int(new.min())
    assert int(new.max()) <= storage.limit
    levels, before = weight.levels(), storage.value_levels(old)
    assert int(levels.abs().max()) <= storage.largest
    assert int(result.flips) == int((levels != before).sum()) > 0
    moved = levels != before
    against = (before - levels).sign() == weight.votes.sign()
    assert float(against[moved].double().mean()) > (0.5 if storage.inertia else 0.85)  # with inertia past votes count, too


@pytest.mark.parametrize("rule", [Rounding(second_moment="running"), TopK(0.05)], ids=lambda rule: type(rule).__name__)
def test_many_weights_in_one_step_move_as_each_would_alone(rule):
    storages = [Storage(2, memory=False), Storage(4, memory=False), Storage(8)]
    votes = [torch.randint(-40, 41, shape, dtype=torch.int32) for shape in [(5, 9), (1, 64), (63, 65)]]
    weights = [weight_of(storage, one) for storage, one in zip(storages, votes, strict=True)]
    alone = [WeightStep(one.stored.clone(), one.votes, one.bound, one.storage, one.scale, one.key) for one in weights]
    together = rule.step(weights, 0.7)
    for one, other, result in zip(weights, alone, together, strict=True):
        by_itself, = rule.step([other], 0.7)
        assert torch.equal(one.stored, other.stored)
        assert int(result.flips) == int(by_itself.flips)


# ---------------------------------------------------------------------------------------------------- what Rounding needs


@pytest.mark.parametrize(("rule", "storage", "message"), [
    (Rounding(inertia=0.5), Storage(4, memory=False), "inertia=0.5 needs memory.*memory=True"),
    (Rounding(inertia=0.5), Storage(8), "inertia=0.5 needs memory.*at most 6 bits"),
    (Rounding(second_moment="running"), Storage(4), "second_moment='running'.*leave second_moment out.*memory=False"),
    (Rounding(second_moment="step"), Storage(6), "second_moment='step' is for weights without memory"),
], ids=str)
def test_settings_that_a_weight_could_only_ignore_are_refused(rule, storage, message, refuses):
    with refuses(ValueError, message):
        rule.storage_for(storage)


def test_the_optimizer_refuses_settings_that_a_weight_could_only_ignore(tiny_net, refuses):
    packed, model = tiny_net(memory=False), tiny_net()
    with refuses(ValueError, "inertia=0.5 needs memory"):
        gft.GFT(gft.quantized(packed), rule=Rounding(inertia=0.5))
    optimizer = gft.GFT(gft.quantized(model))
    optimizer.param_groups[0]["rule"] = Rounding(second_moment="step")
    with refuses(ValueError, "second_moment='step' is for weights without memory"):
        optimizer.step()


@pytest.mark.parametrize(("storage", "threshold"), [
    (Storage(2, memory=False), 1.9584), (Storage(3, memory=False), 0.5654), (Storage(4, memory=False), 0.5654),
    (Storage(8), 0.0494), (Storage(2), 0.0), (Storage(6), 0.0)], ids=str)
def test_the_default_threshold_grows_with_the_spacing_of_what_moves(storage, threshold):
    assert Rounding().threshold_for(storage) == pytest.approx(threshold, abs=1e-4)


@pytest.mark.parametrize(("rms", "less"), [(0.3, 0.8), (0.02, 0.6)])
def test_an_automatic_threshold_keeps_the_mean_of_moves_and_takes_noise_out(rms, less):
    """Votes with a mean of a fifth of their deviation; moves of so many units of memory."""
    storage, votes = Storage(4, inertia=False), (1000 * (torch.randn(1000, 1600) + 0.2)).int()
    means, squares = [], []
    for threshold in (None, 0.0):
        job = RoundingJob(torch.zeros(1000, 1600, dtype=torch.int8), votes, storage, NoiseKey(1, 2, 3), 65536 * rms,
                          int(votes.abs().max()), threshold)
        ops.round_many([job], 1.0)
        means.append(-job.stored.float().mean().item())
        squares.append(job.stored.float().square().mean().item())
    assert means[0] == pytest.approx(means[1], rel=0.1)
    assert squares[0] < less * squares[1]


def test_thresholds_that_suit_are_those_of_least_noise():
    """SUITED and MULTIPLES beside the formulas of rules/rounding.py, in the middle of each octave."""
    def beyond(t):
        return math.erfc(t / math.sqrt(2))

    def noise(r, t):
        density, p = math.exp(-t * t / 2) / math.sqrt(2 * math.pi), beyond(t)
        mean, square = 2 * density - t * p, (1 + t * t) * p - 2 * t * density
        return r * mean / p + r * r * square / p**2

    for octave, (threshold, multiple) in enumerate(zip(SUITED, MULTIPLES, strict=True)):
        r = math.sqrt(2) * 2.0 ** (1 - octave)
        least = min(noise(r, place / 200) for place in range(500))
        assert noise(r, threshold) < 1.02 * least
        assert multiple == pytest.approx(1 / beyond(threshold), rel=1e-3)


def test_defaults_for_the_storage_move_as_the_same_settings_given_do():
    votes = torch.randint(-40, 41, (63, 65), dtype=torch.int32) ** 3
    for storage, given in ((Storage(2, memory=False), Rounding(threshold=1.6 * 1.2240, second_moment="step")),
                           (Storage(4), Rounding(inertia=0.9))):
        torch.manual_seed(1)
        one = weight_of(Rounding().storage_for(storage), votes)
        torch.manual_seed(1)
        other = weight_of(given.storage_for(storage), votes)
        start = one.stored.clone()
        Rounding().step([one], 0.6)
        given.step([other], 0.6)
        assert torch.equal(one.stored, other.stored)
        assert not torch.equal(one.stored, start)


@pytest.mark.parametrize(("inertia", "storage"), [(None, Storage(4)), (0.5, Storage(4)), (0.0, Storage(4, inertia=False))])
def test_inertia_chooses_the_encoding_of_memory(inertia, storage):
    for start in (Storage(4), Storage(4, inertia=False)):
        assert Rounding(inertia=inertia).storage_for(start) == storage


def test_packed_weights_keep_second_moments_only_where_they_run():
    votes = torch.randint(-40, 41, (6, 9), dtype=torch.int32)
    for storage, rule, kept in ((Storage(4, memory=False), Rounding(), False), (Storage(4), Rounding(), True),
                                (Storage(4, memory=False), Rounding(second_moment="running"), True)):
        result, = rule.step([weight_of(storage, votes)], 0.5)
        assert (result.second_moment is not None) == kept


def test_running_second_moments_change_what_packed_weights_do():
    """Rows and columns by all steps so far, the step as a whole by its own votes."""
    ends = []
    for second_moment in ("step", "running"):
        torch.manual_seed(0)
        layer = gft.QuantLinear(9, 8, bits=4, memory=False)
        optimizer = gft.GFT([layer.qweight], lr=0.8, rule=Rounding(threshold=0.1, second_moment=second_moment), seed=5)
        for _ in range(3):
            layer.votes.votes, layer.votes.tokens = torch.randint(-99, 100, (8, 9), dtype=torch.int32), 1
            optimizer.step()
        assert ("second_moment" in optimizer.state[layer.qweight]) == (second_moment == "running")
        assert optimizer.flips() > 0
        ends.append(layer.levels())
    assert not torch.equal(*ends)


# ---------------------------------------------------------------------------------------------------- lr


@pytest.mark.parametrize("bits", range(2, 9), ids="{}bit".format)
def test_lr_measures_a_move_in_weights_not_in_levels(bits):
    for inputs, growth in ((9, 1.0), (128, 1.0), (512, 2.0)):
        own = SPACING[bits] / math.sqrt(inputs)  # the scale of a layer that preserves variance
        wanted = 0.3 * SPACING[4] / math.sqrt(inputs) / growth
        for scale in (own, own / 3, own * 5):
            assert 0.3 * levels_per_step(scale, bits, inputs) * scale == pytest.approx(wanted)
        assert 0.3 * levels_per_step(own / 40, bits, inputs) * own / 40 == pytest.approx(wanted / 10)


def test_lr_is_the_rms_move_in_levels_of_a_4_bit_layer_of_128_inputs():
    storage, votes = Storage(4, inertia=False), (1000 * torch.randn(300, 128)).int()
    weight = WeightStep(torch.zeros(300, 128, dtype=torch.int8), votes, 10**4, storage, SPACING[4] / math.sqrt(128),
                        NoiseKey(9, 0, 6))
    Rounding(inertia=0.0).step([weight], 0.5)
    assert float((weight.stored / storage.unit).square().mean().sqrt()) == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("lr", [-0.1, 1.5, math.nan, math.inf])
@pytest.mark.parametrize(("rule", "meaning"), [(Rounding(), "the rms move"), (TopK(), "k, the fraction")], ids=str)
def test_impossible_learning_rates_are_refused(rule, meaning, lr, refuses):
    with refuses(ValueError, f"lr={lr:g}.*{meaning}.*0 to 1"):
        rule.check_lr(lr)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize(("rule", "storage"), [
    (Rounding(inertia=0.5), Storage(4)), (Rounding(inertia=0.0), Storage(2)),
    (Rounding(threshold=0.3, second_moment="running"), Storage(3, memory=False))], ids=["inertia", "no inertia", "packed"])
def test_at_lr_zero_second_moments_are_renewed_and_no_weight_moves(rule, storage, lr):
    storage, votes = rule.storage_for(storage), torch.randint(-40, 41, (63, 65), dtype=torch.int32)
    before = torch.rand(63 + 65 + 1) + 100
    weight, other = (weight_of(storage, votes, step=4, second_moment=before) for _ in range(2))
    start = weight.stored.clone()
    at_zero, = rule.step([weight], lr)
    moving, = rule.step([other], 0.3)
    assert torch.equal(weight.stored, start)
    assert int(at_zero.flips) == 0 < int(moving.flips)
    assert torch.equal(at_zero.second_moment, moving.second_moment)
    assert not torch.equal(at_zero.second_moment, before)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_the_optimizer_at_lr_zero_renews_second_moments_and_moves_nothing(lr, tiny_net, batches):
    model = tiny_net(bits=2)
    optimizer = gft.GFT(gft.quantized(model), lr=0.5)
    train(model, optimizer, batches[:2])
    optimizer.param_groups[0]["lr"] = lr
    weights = [weight.clone() for weight in gft.quantized(model)]
    moments = [optimizer.state[weight]["second_moment"].clone() for weight in gft.quantized(model)]
    flips = optimizer.flips()
    train(model, optimizer, batches[2:3])
    assert all(torch.equal(weight, old) for weight, old in zip(gft.quantized(model), weights, strict=True))
    assert not any(torch.equal(optimizer.state[weight]["second_moment"], old)
                   for weight, old in zip(gft.quantized(model), moments, strict=True))
    assert optimizer.flips() == flips > 0


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_topk_at_lr_zero_moves_nothing(lr, tiny_net, batches):
    model = tiny_net(bits=3, memory=False)
    weights = [weight.clone() for weight in gft.quantized(model)]
    optimizer = gft.GFT(gft.quantized(model), lr=lr, rule=TopK(p_min=0.5))
    train(model, optimizer, batches[:2])
    assert all(torch.equal(weight, old) for weight, old in zip(gft.quantized(model), weights, strict=True))
    assert optimizer.flips() == 0


# ---------------------------------------------------------------------------------------------------- a rule of one's own


@dataclass(frozen=True)
class Always(Rule):
    """Every weight takes one level against its votes, in every step: the toy of rules/rule.py."""

    def step(self, weights, lr):
        results = []
        for weight in weights:
            old = weight.levels()
            new = weight.write_levels(old - weight.votes.sign())
            results.append(StepResult(flips=(new != old).sum()))
        return results


@pytest.mark.parametrize(("bits", "memory"), [(4, True), (2, False), (3, False)])
def test_a_toy_rule_in_one_file_trains(bits, memory, tiny_net, batches):
    model = tiny_net(bits=bits, memory=memory)
    layers = [module for module in model.modules() if isinstance(module, gft.QuantLinear)]
    optimizer = gft.GFT(gft.quantized(model), rule=Always())
    for x, y in batches[:3]:
        before = [layer.levels() for layer in layers]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        votes = [layer.votes.votes.clone() for layer in layers]
        optimizer.step()
        largest = 2 ** (bits - 1) - 1
        for layer, old, one in zip(layers, before, votes, strict=True):
            assert torch.equal(layer.levels(), (old - one.sign()).clamp(-largest, largest).to(torch.int8))
            assert not torch.equal(layer.levels(), old)
    assert optimizer.flips() > 0
    other = tiny_net(bits=bits, memory=memory)
    again = gft.GFT(gft.quantized(other))
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["rule"] == Always()


@pytest.mark.parametrize("given", ["rounding", Rounding, Rule(), None, gft.Int8()], ids=str)
def test_the_optimizer_refuses_what_is_not_a_rule(given, tiny_net, refuses):
    model = tiny_net()
    with refuses(TypeError, "rule=.*give gft.Rounding"):
        gft.GFT(gft.quantized(model), rule=given)
