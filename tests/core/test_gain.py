"""Gains: one learnt number a layer, for networks in which nothing else lets integer layers grow."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gft
from gft.convert import batch_normed, has_norms
from gft.layers import quantized_layers

layers = pytest.mark.parametrize("layer", [
    lambda gain: (gft.QuantLinear(13, 7, bits=3, bias=True, gain=gain), torch.randn(5, 13)),
    lambda gain: (gft.QuantConv2d(3, 5, (3, 2), bits=2, stride=2, bias=True, gain=gain), torch.randn(2, 3, 9, 8)),
], ids=["linear", "conv"])


def mlp(*, norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 48), norm or nn.Identity(), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5))


def has_gains(model: nn.Module) -> set[bool]:
    return {layer.log_gain is not None for layer in quantized_layers(model).values()}


@layers
def test_a_gain_multiplies_the_product_and_not_the_bias(layer):
    plain, x = layer(False)
    with_gain, _ = layer(True)
    missing = with_gain.load_state_dict(plain.state_dict())  # of a time before there were gains
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    assert torch.equal(with_gain(x), plain(x))
    with torch.no_grad():
        with_gain.log_gain.fill_(0.3 / with_gain.columns**0.5)
    bias = plain.bias.detach().view(-1, 1, 1) if x.dim() == 4 else plain.bias.detach()
    torch.testing.assert_close(with_gain(x), (plain(x) - bias) * torch.tensor(0.3).exp() + bias)
    torch.testing.assert_close(with_gain.to_float()(x), with_gain(x))
    assert not with_gain.float_weight().requires_grad
    assert "gain=True" in repr(with_gain)
    assert "gain" not in repr(plain)


def gradients_of(layer: nn.Module, x: torch.Tensor, vote: gft.votes.Vote, seeds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """log_gain's gradient by each of some seeds, and the exact one of the chain rule over the root of the layer's size."""
    with torch.no_grad():
        layer.log_gain.fill_(-0.05)
        product = layer(x) - layer._shaped_bias()
    grad_output = product / product.std() + torch.randn_like(product)
    found = []
    for seed in range(seeds):
        layer.log_gain.grad = None
        optimizer = gft.GFT(gft.quantized(layer), vote=vote, seed=seed)
        layer(x).backward(grad_output)
        found.append(layer.log_gain.grad[0])
        optimizer.release()
    return torch.stack(found), (product * grad_output).sum() / (layer.rows * layer.columns) ** 0.5


@pytest.mark.parametrize("vote", [gft.Int8(), gft.Int4()], ids=["int8", "int4"])
@pytest.mark.parametrize(("layer", "shape"), [
    (lambda: gft.QuantLinear(13, 7, bits=3, bias=True, gain=True), (50, 13)),
    (lambda: gft.QuantConv2d(3, 5, (3, 2), bits=2, stride=2, bias=True, gain=True), (4, 3, 9, 8)),
    (lambda: gft.QuantConv2d(6, 12, 3, bits=4, groups=2, memory=False, bias=True, gain=True), (4, 6, 5, 6)),
], ids=["linear", "conv", "groups"])
def test_the_gains_gradient_is_that_of_the_chain_rule_in_the_mean(layer, shape, vote):
    x = torch.randn(shape) * torch.linspace(0.2, 3, shape[1]).view(-1, *[1] * (len(shape) - 2))  # each feature on its scale
    found, exact = gradients_of(layer(), x, vote, seeds=60)
    error = found.mean() - exact
    assert abs(error) < 4 * found.std() / 60**0.5
    assert abs(error) < 0.03 * abs(exact)
    assert found.std() < 0.1 * abs(exact)


@layers
def test_the_gains_gradient_is_exact_with_sign_votes(layer):
    found, exact = gradients_of(*layer(True), gft.Sign(), seeds=2)
    torch.testing.assert_close(found, exact.expand(2))


@layers
def test_a_gain_learns_in_float64_as_in_float32(layer):
    quantized, x = layer(True)
    found = []
    for dtype in (torch.float32, torch.float64):
        optimizer = gft.GFT(gft.quantized(quantized.to(dtype)), seed=3)
        y = quantized(x.to(dtype))
        y.backward(torch.linspace(-1, 2, y.numel()).view_as(y).to(dtype))
        assert quantized.log_gain.grad.dtype is dtype
        found.append(quantized.log_gain.grad.float())
        quantized.log_gain.grad = None
        optimizer.release()
    assert found[0].any()
    torch.testing.assert_close(*found, rtol=1e-2, atol=0)


@layers
def test_a_gain_changes_no_sign_of_a_vote(layer):
    votes, grad_output = [], None
    plain, x = layer(False)
    for gain in (False, True):
        quantized, _ = layer(gain)
        quantized.load_state_dict(plain.state_dict())
        if gain:
            with torch.no_grad():
                quantized.log_gain.fill_(0.4)
        optimizer = gft.GFT(gft.quantized(quantized), vote=gft.Sign())
        y = quantized(x)
        grad_output = torch.randn_like(y) if grad_output is None else grad_output
        y.backward(grad_output)
        votes.append(quantized.votes.votes)
        optimizer.release()
    assert torch.equal(*votes)
    assert votes[0].any()


@pytest.mark.parametrize(("norm", "settings", "expected"), [
    (None, {}, True),
    (None, {"bits": 2}, True),
    (None, {"gain": False}, False),
    (None, {"bias": False}, False),
    (None, {"init": "paper"}, False),
    (None, {"init": "variance"}, True),
    (nn.LayerNorm(48), {}, False),
    (nn.LayerNorm(48), {"bits": 2}, True),
    (nn.LayerNorm(48), {"bits": 2, "bias": False}, False),
    (nn.BatchNorm1d(48, affine=False), {}, False),
    (nn.LayerNorm(48), {"gain": True}, True),
], ids=["no norm", "2 bits", "gain=False", "bias=False", "paper", "variance", "LayerNorm", "LayerNorm, 2 bits",
        "2 bits, bias=False", "BatchNorm", "gain=True"])
def test_ternary_layers_and_models_without_norms_have_gains_by_default(norm, settings, expected):
    assert has_gains(gft.quantize_(mlp(norm=norm), **{"bits": 4, **settings})) == {expected}


@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d], ids=lambda conv: conv.__name__)
def test_a_layer_has_no_gain_where_a_batch_norm_would_divide_by_it(conv):
    """Not where something stands between them, the channels are others, or the norm is of another kind."""
    norm, dims = (nn.BatchNorm1d, 1) if conv is nn.Conv1d else (nn.BatchNorm2d, 2)
    model = nn.Sequential(nn.Sequential(conv(3, 8, 3), norm(8), nn.ReLU()),
                          nn.Sequential(conv(8, 8, 1), nn.ReLU(), norm(8)),
                          nn.ModuleList([conv(8, 6, 1), norm(8), nn.Flatten()]),
                          nn.Sequential(conv(8, 8, 1), nn.GroupNorm(2, 8)),
                          nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5)),
                          nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5)))
    names = [f"{number}.0" for number in range(6)]
    assert batch_normed(model) == {"0.0", "4.0"}
    expected = [name not in ("0.0", "4.0") for name in names]
    quantized = gft.quantize_(copy.deepcopy(model), 2)
    assert [quantized.get_submodule(name).log_gain is not None for name in names] == expected
    asked = gft.quantize_(copy.deepcopy(model), 2, gain=True)[0]
    assert asked[0].log_gain is not None
    x = torch.randn(4, 3, *(9,) * dims)
    y = asked(x)
    with torch.no_grad():
        asked[0].log_gain.add_(0.1)  # by half or more
    torch.testing.assert_close(asked(x), y, rtol=1e-3, atol=1e-3)


def module_named(name: str) -> nn.Module:
    return type(name, (nn.Identity,), {})()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.RMSNorm(4), module_named("LlamaRMSNorm"), module_named("Norm"),
                                  module_named("norm_layer"), module_named("NormAndScale")],
                         ids=lambda module: type(module).__name__)
def test_a_norm_of_anybodys_is_one(norm):
    assert has_norms(nn.Sequential(nn.Linear(3, 3), norm))


@pytest.mark.parametrize("name", ["Normalize", "Normalise", "Normalization", "Abnormal"])
def test_what_only_prepares_images_is_no_norm(name):
    assert not has_norms(nn.Sequential(nn.Linear(3, 3), module_named(name)))
    assert has_gains(gft.quantize_(mlp(norm=module_named(name)), bits=4)) == {True}


def test_a_compiled_model_learns_its_gains_in_one_graph():
    torch.compiler.reset()
    models = [gft.quantize_(mlp(), bits=2) for _ in range(2)]
    x, gradients, optimizers = torch.randn(6, 20), [], []
    for model, run in zip(models, (models[0], torch.compile(models[1], backend="eager", fullgraph=True)), strict=True):
        optimizers.append(gft.GFT(gft.quantized(model)))
        run(x).square().sum().backward()
        gradients.append([layer.log_gain.grad for layer in quantized_layers(model).values()])
    torch.testing.assert_close(*gradients)
    assert all(gradient != 0 for gradient in gradients[0])


def test_gains_are_dense_parameters_and_are_saved_with_the_model(tmp_path):
    model = gft.quantize_(mlp(), bits=2)
    gains = [layer.log_gain for layer in quantized_layers(model).values()]
    assert all(any(gain is dense for dense in gft.dense(model)) for gain in gains)
    with torch.no_grad():
        for gain in gains:
            gain.fill_(0.02)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = gft.quantize_(mlp(), bits=2)
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    x = torch.randn(3, 20)
    assert torch.equal(other(x), model(x))
    floats = gft.dequantize_(copy.deepcopy(model))
    torch.testing.assert_close(floats(x), model(x))


STEPS = 80


def trained(gain: bool | None, dense: type[torch.optim.Optimizer], **settings) -> float:
    """The loss a ternary network without norms ends at on what a teacher says."""
    model = gft.quantize_(mlp(), bits=2, gain=gain)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model)), dense(gft.dense(model), **settings))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, 20, generator=draw)
    y = (x @ torch.randn(20, 5, generator=draw)).argmax(1)
    for step in range(STEPS):
        some = slice(step % 8 * 64, step % 8 * 64 + 64)
        loss = F.cross_entropy(model(x[some]), y[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return F.cross_entropy(model(x), y).item()


@pytest.mark.parametrize(("dense", "settings"), [
    (torch.optim.AdamW, {"lr": 6e-3}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})], ids=["AdamW", "SGD"])
def test_a_ternary_network_without_norms_learns_far_more_with_gains(dense, settings):
    assert trained(None, dense, **settings) < 0.4 * trained(False, dense, **settings)
