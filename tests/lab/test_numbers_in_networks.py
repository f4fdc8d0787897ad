"""NaN, inf and overflow at any layer of the networks that are trained here: no integer leaves its grid, no running scale is
lost, and the step after is a step again."""

import math

import pytest
import torch

import gft
from gft.lab.models import DNN, GPT, ResNet, ViT
from gft.layers import quantized_layers

NETWORKS = {
    "DNN": (lambda: DNN(20, 5, width=16, depth=4), lambda: torch.randn(6, 20)),
    "GPT": (lambda: GPT(11, context=8, width=16, depth=1, heads=2), lambda: torch.randint(0, 11, (3, 8))),
    "ViT": (lambda: ViT((3, 8, 8), 5, patch=4, width=16, depth=1, heads=2), lambda: torch.randn(3, 3, 8, 8)),
    "ResNet": (lambda: ResNet(3, 5, width=4, blocks=(1, 1)), lambda: torch.randn(3, 3, 8, 8)),
}


def position(layer):
    """Where votes have carried the weights. A level that lags behind may follow in any step, with votes or without."""
    storage, values = layer.storage, layer.qweight.short()
    levels = storage.value_levels(layer.qweight).short()
    return levels * storage.resolution + values - levels * storage.unit


def spoilt(module, where, bad):
    """Put a bad value into what a layer gives, or into the gradient that comes back to it, of one sample or of all."""

    def change(values):
        values = values.clone()
        (values[:1] if where == "one output" else values).fill_(bad)
        return values

    if where == "gradients":
        return module.register_forward_hook(lambda _, __, y: y.register_hook(change) and None)
    return module.register_forward_hook(lambda _, __, y: y + (change(y) - y).detach())


@pytest.mark.parametrize("where", ["one output", "outputs", "gradients"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:.*were NaN or inf")
def test_a_bad_number_at_any_layer_costs_its_votes_and_no_more(name, where):
    build, data = NETWORKS[name]
    torch.manual_seed(2)
    model = gft.quantize_(build(), bits=3)
    optimizer = gft.GFT(gft.quantized(model), lr=0.5)
    layers = quantized_layers(model)

    def step():
        before = [position(layer) for layer in layers.values()]
        optimizer.zero_grad()
        y = model(data())
        ((y.float() - 1).square().mean() * 10).backward()
        optimizer.step()
        for layer in layers.values():
            assert layer.storage.holds(layer.qweight)
        for state in optimizer.state.values():
            assert all(bool(torch.isfinite(state[key]).all()) for key in ("x_rms", "grad_rms", "second_moment"))
        return [not torch.equal(position(layer), old) for layer, old in zip(layers.values(), before, strict=True)]

    assert any(step())
    assert len(layers) >= 3
    for number, layer in enumerate(layers.values()):
        bad = (math.nan, math.inf, -math.inf, 3e38)[number % 4]
        hook = spoilt(layer, where, bad)
        moved = step()
        hook.remove()
        if where == "gradients" and not math.isfinite(bad):
            assert not moved[number]
        for norm in (module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)):
            norm.reset_running_stats()
        assert any(step())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_loss_that_is_not_finite_moves_no_integer_and_is_reported(name):
    build, data = NETWORKS[name]
    torch.manual_seed(2)
    model = gft.quantize_(build(), bits=2)
    optimizer = gft.GFT(gft.quantized(model), lr=0.5)
    before = [position(layer) for layer in optimizer.layers()]
    (model(data()).float().sum() * math.nan).backward()
    with pytest.warns(UserWarning, match="values of grad_output were NaN or inf"):
        optimizer.step()
    assert all(torch.equal(position(layer), old) for layer, old in zip(optimizer.layers(), before, strict=True))
