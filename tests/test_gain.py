"""Gains: one learnt number a layer, for networks in which nothing else lets integer layers grow."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gft
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
        with_gain.log_gain.fill_(0.3 / with_gain.grid.columns**0.5)
    bias = plain.bias.detach().view(-1, 1, 1) if x.dim() == 4 else plain.bias.detach()
    torch.testing.assert_close(with_gain(x), (plain(x) - bias) * torch.tensor(0.3).exp() + bias)
    torch.testing.assert_close(with_gain.to_float()(x), with_gain(x))
    assert not with_gain.float_weight().requires_grad
    assert "gain=True" in repr(with_gain)
    assert "gain" not in repr(plain)


@layers
def test_its_gradient_is_the_chain_rules_over_the_root_of_the_layers_size(layer):
    quantized, x = layer(True)
    gft.GFT(gft.quantized(quantized))
    with torch.no_grad():
        quantized.log_gain.fill_(-0.05)
    y = quantized(x)
    delta = torch.randn_like(y)
    y.backward(delta)
    bias = quantized._shaped_bias().detach()
    through = ((y.detach() - bias) * delta).sum()  # the gradient of the gain's logarithm
    torch.testing.assert_close(quantized.log_gain.grad, through / quantized.weight.grid.rows**0.5
                               / quantized.weight.grid.columns**0.5)


@layers
def test_a_gain_changes_no_sign_of_a_vote(layer):
    votes, delta = [], None
    plain, x = layer(False)
    for gain in (False, True):
        quantized, _ = layer(gain)
        quantized.load_state_dict(plain.state_dict())
        if gain:
            with torch.no_grad():
                quantized.log_gain.fill_(0.4)
        gft.GFT(gft.quantized(quantized), vote="sign")
        y = quantized(x)
        delta = torch.randn_like(y) if delta is None else delta
        y.backward(delta)
        votes.append(quantized.ballot.votes)
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


def test_a_norm_of_anybodys_is_one():
    class LlamaRMSNorm(nn.Module):
        def forward(self, x):
            return F.rms_norm(x, x.shape[-1:])

    assert has_gains(gft.quantize_(mlp(norm=LlamaRMSNorm()), bits=4)) == {False}


def test_a_compiled_model_learns_its_gains_in_one_graph():
    models = [gft.quantize_(mlp(), bits=2) for _ in range(2)]
    x, gradients = torch.randn(6, 20), []
    for model, run in zip(models, (models[0], torch.compile(models[1], backend="eager", fullgraph=True)), strict=True):
        gft.GFT(gft.quantized(model))
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


def trained(gain: bool | None, dense: type[torch.optim.Optimizer], **settings) -> float:
    """The loss a ternary network without norms ends at on what a teacher says."""
    model = gft.quantize_(mlp(), bits=2, gain=gain)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model)), dense(gft.dense(model), **settings))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 300)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, 20, generator=draw)
    y = (x @ torch.randn(20, 5, generator=draw)).argmax(1)
    for step in range(300):
        some = slice(step % 8 * 64, step % 8 * 64 + 64)
        loss = F.cross_entropy(model(x[some]), y[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return F.cross_entropy(model(x), y).item()


@pytest.mark.parametrize(("dense", "settings"), [(torch.optim.AdamW, {"lr": 2e-3}), (torch.optim.AdamW, {"lr": 2e-2}),
                                                 (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})],
                         ids=["AdamW", "AdamW, ten times the rate", "SGD"])
def test_a_ternary_network_without_norms_learns_far_more_with_gains(dense, settings):
    assert trained(None, dense, **settings) < 0.2 * trained(False, dense, **settings)
