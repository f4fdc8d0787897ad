"""optim.py: what an optimizer keeps: its state_dict, whose weights they are, and that nothing outlives its model."""

import copy
import gc
import io
import math
import pickle
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from helpers import all_of, equal, hybrid_of, same, train, weights_of
from torch import nn
from torch.optim import lr_scheduler

import gft
from gft.layers import quantized_layers


def through_file(state):
    """A state_dict as it comes back from a file, with nothing unpickled but tensors and numbers."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ---------------------------------------------------------------------------------------------------- going on

RUNS = {
    "memory": ({"rule": gft.Rounding(inertia=0.6), "vote": gft.Int4(), "lr": 0.35}, True),
    "packed": ({"rule": gft.Rounding(threshold=0.4, second_moment="running"), "vote": gft.Int8(), "lr": 0.6}, False),
    "auto": ({"rule": gft.Rounding(threshold="auto"), "vote": gft.Int8(), "lr": 0.6}, True),
    "topk": ({"rule": gft.TopK(p_min=0.03), "vote": gft.Sign(per="sequence"), "lr": 0.5}, False),
    "no inertia": ({"rule": gft.Rounding(inertia=0.0), "vote": gft.Ternary(), "lr": 0.2}, True),
}


@pytest.mark.parametrize("way", RUNS)
@pytest.mark.parametrize(("joined", "transport"), [(False, through_file), (True, lambda state: state)],
                         ids=["GFT, through a file", "Hybrid, in memory"])
def test_state_dict_continues_bit_for_bit(way, joined, transport, tiny_net, batches):
    settings, memory = RUNS[way]

    def build(seed: int):
        model = tiny_net(seed=seed, bits=3, memory=memory)
        # A resumed run takes its settings from the file.
        given = {**settings, "seed": 21} if seed == 0 else {}
        return model, hybrid_of(model, **given) if joined else gft.GFT(gft.quantized(model), **given)

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
    assert gft_part.param_groups[0]["rule"] == settings["rule"]
    assert gft_part.flips() > 0


def leaves(value):
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in (key, *leaves(item))]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("way", RUNS)
def test_state_dict_holds_only_numbers_strings_and_tensors(way, tiny_net, batches):
    settings, memory = RUNS[way]
    model = tiny_net(bits=3, memory=memory)
    optimizer = gft.GFT(gft.quantized(model), **settings)
    train(model, optimizer, batches[:2])
    plain = (torch.Tensor, int, float, str, bool, type(None))
    assert {type(leaf) for leaf in leaves(optimizer.state_dict())} <= set(plain)


def test_state_dict_keeps_running_scales_in_float(tiny_net, batches):
    model, other_model = tiny_net(), tiny_net(seed=1)
    optimizer = gft.GFT(gft.quantized(model))
    train(model, optimizer, batches[:2])
    other = gft.GFT(gft.quantized(other_model))
    other.load_state_dict(optimizer.state_dict())
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        for key in ("x_rms", "grad_rms", "second_moment"):
            assert two[key].dtype == torch.float32
            assert torch.equal(one[key], two[key])


# ---------------------------------------------------------------------------------------------------- what does not fit


def trained_layer(inputs: int, vote: gft.votes.Vote) -> tuple[gft.QuantLinear, gft.GFT]:
    layer = gft.QuantLinear(inputs, 12, bits=3)
    optimizer = gft.GFT(gft.quantized(layer), lr=0.5, vote=vote)
    for _ in range(2):
        layer(torch.randn(6, inputs)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer, optimizer


@pytest.mark.parametrize("vote", [gft.Sign(), gft.Int8()], ids=["sign", "int8"])
@pytest.mark.parametrize(("saved", "loaded"), [(16, 256), (256, 16)])
def test_state_of_a_layer_of_another_width_is_refused_and_changes_nothing(vote, saved, loaded, refuses):
    _, small = trained_layer(saved, vote)
    layer, optimizer = trained_layer(loaded, vote)
    before = all_of(layer, optimizer)
    with refuses(ValueError, rf"shape \(\d+,\), where a weight of shape \(12, {loaded}\) needs float32.*this model"):
        optimizer.load_state_dict(copy.deepcopy(small.state_dict()))
    assert same(all_of(layer, optimizer), before)
    layer(torch.randn(6, loaded)).square().sum().backward()  # and training goes on
    optimizer.step()
    assert not same(all_of(layer, optimizer), before)


@pytest.mark.parametrize(("name", "spoil", "match"), [
    ("x_rms", lambda t: t.double(), "x_rms that is torch.float64"),
    ("grad_rms", lambda t: t.half(), "grad_rms that is torch.float16"),
    ("second_moment", lambda t: t.long(), "second_moment that is torch.int64"),
    ("x_rms", lambda t: t[None], r"x_rms that is torch.float32 of shape \(1, 16\)"),
    ("second_moment", lambda t: t[:-1], r"second_moment .* of shape \(28,\)"),
    ("grad_rms", lambda t: t.tolist(), "grad_rms that is list"),
    ("x_rms", lambda t: t * math.nan, "x_rms with negative or not finite"),
    ("grad_rms", lambda t: -t, "grad_rms with negative or not finite"),
    ("second_moment", lambda t: t + math.inf, "second_moment with negative or not finite"),
], ids=["float64", "float16", "int64", "rank", "length", "list", "nan", "negative", "inf"])
def test_damaged_scales_are_refused_and_change_nothing(name, spoil, match, refuses):
    layer, optimizer = trained_layer(16, gft.Int8())
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0][name] = spoil(state["state"][0][name])
    before = all_of(layer, optimizer)
    with refuses(ValueError, match):
        optimizer.load_state_dict(state)
    assert same(all_of(layer, optimizer), before)


@pytest.mark.parametrize(("key", "value", "match"), [
    ("rule", "rounding", "other settings"), ("rule", {"name": "Momentum"}, "'Momentum' is not a Rule"),
    ("rule", {"name": "TopK", "temperature": 2}, "TopK has other settings"), ("vote", {"name": "Int2"}, "'Int2' is not a"),
    ("rule", {"name": "Rounding", "second_moment": "step"}, "second_moment='step'"), ("lr", 7.0, "lr=7"),
    ("seed", -3, "seed=-3")], ids=str)
def test_settings_that_do_not_fit_are_refused_and_change_nothing(key, value, match, refuses):
    layer, optimizer = trained_layer(16, gft.Int8())
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][key] = value
    before = all_of(layer, optimizer)
    with refuses(ValueError, match):
        optimizer.load_state_dict(state)
    assert same(all_of(layer, optimizer), before)


# ---------------------------------------------------------------------------------------------------- whose weights


def test_a_second_optimizer_on_the_same_weights_is_refused(tiny_net, batches, refuses):
    model = tiny_net()
    first = gft.GFT(gft.quantized(model), lr=0.5)
    with refuses(ValueError, r"trained by another gft\.GFT already.*release\(\)"):
        gft.GFT(gft.quantized(model)[1:])
    before = weights_of(model)
    train(model, first, batches[:1])  # the first has kept its votes
    assert not equal(weights_of(model), before)


@pytest.mark.parametrize("how", ["deleted", "deleted with its scheduler", "released"])
def test_a_second_optimizer_is_welcome_once_the_first_is_gone(how, tiny_net, batches):
    model = tiny_net()
    first = gft.GFT(gft.quantized(model), lr=0.5)
    scheduler = lr_scheduler.LinearLR(first, 1.0, 0.1, 9) if "scheduler" in how else None
    train(model, first, batches[:1], scheduler)
    if how == "released":
        first.release()
    else:
        del first, scheduler
    before = weights_of(model)
    second = gft.GFT(gft.quantized(model), lr=0.6)
    train(model, second, batches[1:2])
    assert second.flips() > 0
    assert not equal(weights_of(model), before)


def test_a_released_optimizer_moves_nothing_any_more(tiny_net, batches):
    model = tiny_net()
    optimizer = gft.GFT(gft.quantized(model), lr=0.5)
    x, y = batches[0]
    F.cross_entropy(model(x), y).backward()
    optimizer.release()
    before = weights_of(model)
    optimizer.step()
    assert equal(weights_of(model), before)


# ---------------------------------------------------------------------------------------------------- what is kept alive


@contextmanager
def without_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in_backward"])
@pytest.mark.parametrize("joined", [False, True], ids=["GFT", "Hybrid"])
def test_deleting_a_model_and_its_optimizer_frees_the_weights_at_once(in_backward, joined, tiny_net, batches):
    with without_garbage_collector():
        model = tiny_net()
        settings = {"lr": 0.5, "in_backward": in_backward}
        optimizer = hybrid_of(model, **settings) if joined else gft.GFT(gft.quantized(model), **settings)
        train(model, optimizer, batches[:2])
        layer = quantized_layers(model)["block.mlp.0"]
        kept = [weakref.ref(layer), weakref.ref(layer.qweight), weakref.ref(optimizer), weakref.ref(layer.votes)]
        assert all(one() is not None for one in kept)
        del model, optimizer, layer
        assert [one() for one in kept] == [None] * 4


def test_deleting_a_layer_frees_it_at_once():
    with without_garbage_collector():
        layer = gft.QuantLinear(9, 7)
        kept = [weakref.ref(layer), weakref.ref(layer.qweight)]
        layer(torch.randn(2, 9)).sum()
        del layer
        assert [one() for one in kept] == [None, None]


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in_backward"])
def test_a_pickled_or_copied_layer_carries_no_optimizer_and_casts_no_vote(in_backward):
    model = nn.Sequential(gft.QuantLinear(30, 20), gft.QuantLinear(20, 4))
    optimizer = gft.GFT(gft.quantized(model), lr=0.5, in_backward=in_backward)
    data = pickle.dumps(model[0])
    assert b"gft.optim" not in data
    assert b"gft.votes" not in data
    assert len(data) < 30 * 20 + 4000  # not the other layer, not the votes
    start = weights_of(model)
    for twin in (pickle.loads(data), copy.deepcopy(model[0])):
        twin.eval()(torch.randn(3, 30).requires_grad_()).sum().backward()
        assert torch.equal(twin.qweight, model[0].qweight)
    optimizer.step()
    assert equal(weights_of(model), start)
    assert optimizer.flips() == 0
