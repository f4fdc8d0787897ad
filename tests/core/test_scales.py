"""Scales of rows and groups: one float for each row of a weight, or for each group of its columns."""

import copy
import math

import pytest
import torch
from torch import nn

import gft
from gft.initialize import fitted_scale, scale_of
from gft.layers import quantized_layers

SCALES = [("tensor", ()), ("row", (10, 1)), (4, (10, 6)), (24, (10, 1))]


def uneven_linear(inputs: int = 24, outputs: int = 10, bias: bool = True) -> nn.Linear:
    """Rows, and columns by fours, of very different sizes."""
    torch.manual_seed(3)
    linear = nn.Linear(inputs, outputs, bias)
    with torch.no_grad():
        linear.weight *= torch.logspace(-1, 1, outputs)[:, None] * torch.tensor([1.0, 0.2]).repeat_interleave(4).repeat(3)
    return linear


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
@pytest.mark.parametrize(("scales", "shape"), SCALES, ids=lambda value: str(value))
def test_forward_and_backward_are_those_of_the_float_weight(scales, shape, memory):
    layer = gft.QuantLinear.from_float(uneven_linear(), 3, memory=memory, scales=scales, gain=True)
    assert layer.scale.shape == shape
    assert layer.scale.dtype == (torch.float16 if shape else torch.float32)
    assert layer.scales_by_group().shape == (10, 24 // layer.group)
    nn.init.constant_(layer.log_gain, 0.05)
    plain, x = layer.to_float(), torch.randn(5, 24, requires_grad=True)
    y, expected = layer(x), plain(x)
    assert torch.allclose(y, expected, atol=1e-5)
    (grad,), (grad_expected,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, expected))
    assert torch.allclose(grad, grad_expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_gain_is_that_of_the_float_weight():
    layer = gft.QuantLinear.from_float(uneven_linear(bias=False), 4, scales=8, gain=True)
    optimizer = gft.GFT(gft.quantized(layer))
    x = torch.randn(4000, 24)  # votes are rounded by chance: many samples
    layer(x).square().sum().backward()
    gain = torch.ones((), requires_grad=True)
    nn.functional.linear(x, layer.float_weight() * gain).square().sum().backward()
    slope = 1 / (24 * math.sqrt(10)) * math.sqrt(24)  # what layer.gain() takes of it
    assert layer.log_gain.grad.item() == pytest.approx(gain.grad.item() * slope, rel=0.02)
    optimizer.zero_grad()


@pytest.mark.parametrize("bits", [2, 4])
def test_finer_scales_lose_less_of_a_float_weight_and_fitted_ones_less_still(bits):
    weight, losses = uneven_linear().weight.detach(), []
    for init in ("keep", "fit"):
        for scales, _ in SCALES[:3]:
            layer = gft.QuantLinear.from_float(uneven_linear(), bits, init=init, scales=scales)
            losses.append(float((layer.float_weight() - weight).square().sum() / weight.square().sum()))
    assert losses[0] > losses[1]  # a group of four is too few to tell a deviation by
    assert losses[3] > losses[4] > losses[5]
    assert all(fit <= keep + 1e-6 for keep, fit in zip(losses[:3], losses[3:], strict=True))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_fitted_scale_loses_no_more_than_any_other(bits):
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)) ** 3  # heavy tails
    largest = 2 ** (bits - 1) - 1

    def loss(scale):
        return (weight - (weight / scale).round().clamp(-largest, largest) * scale).square().sum(1)

    best = loss(fitted_scale(weight, bits, "row").float())
    for factor in torch.linspace(0.2, 3, 200):
        assert (best <= loss(scale_of(weight, bits, "row").float() * factor) * 1.02 + 1e-6).all()


def test_scales_too_small_for_float16_are_float32():
    tiny = uneven_linear()
    tiny.weight.data *= 1e-6
    layer = gft.QuantLinear.from_float(tiny, 4, init="fit", scales="row")
    assert layer.scale.dtype is torch.float32
    other = gft.QuantLinear(24, 10, 4, bias=True, scales="row")
    assert other.scale.dtype is torch.float16
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.float_weight(), layer.float_weight())


@pytest.mark.parametrize("scales", ["row", 9])
def test_convolutions_have_scales_too_and_train(scales):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
                          nn.Linear(6 * 25, 3))
    float_model, x = copy.deepcopy(model), torch.randn(64, 4, 5, 5)
    gft.quantize_(model, 8, lambda module, name: name == "0", scales=scales, init="fit")
    assert torch.allclose(model(x), float_model(x), atol=0.1)
    y = x.mean((1, 2, 3)).gt(0).long()
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.3), torch.optim.AdamW(gft.dense(model), lr=1e-2))
    before, losses = model[0].qweight.clone(), []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(model[0].qweight, before)


def test_a_step_moves_all_rows_by_as_many_levels_whatever_their_scales():
    """A move is a share of what a row's weights are, so rows of any size learn alike."""
    torch.manual_seed(1)
    layer = gft.QuantLinear.from_float(nn.Linear(256, 10, bias=False), 6, scales="row")
    layer.scale.mul_(torch.logspace(-1, 1, 10)[:, None])
    optimizer = gft.GFT(gft.quantized(layer), lr=1.0, rule=gft.Rounding(inertia=0.0))
    before = layer.storage.values(layer.qweight, 256).int()
    layer(torch.randn(400, 256)).square().sum().backward()
    optimizer.step()
    moves = (layer.storage.values(layer.qweight, 256).int() - before).float().square().mean(1).sqrt()
    assert moves.min() > 0
    assert float(moves.max() / moves.min()) < 1.5


def test_state_dict_keeps_scales_and_refuses_those_of_another_kind(refuses):
    one = gft.QuantLinear.from_float(uneven_linear(), 4, scales=8)
    same, other = gft.QuantLinear(24, 10, 4, bias=True, scales=8), gft.QuantLinear(24, 10, 4, bias=True, scales="row")
    same.load_state_dict(one.state_dict())
    assert torch.equal(same.float_weight(), one.float_weight())
    before = copy.deepcopy(other.state_dict())
    with refuses(ValueError, r"scales of shape \(10, 3\).*same scales="):
        other.load_state_dict(one.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


@pytest.mark.parametrize(("scales", "match"), [("column", "scales='column': choose"), (0, "scales=0"),
                                               (7, "does not divide"), (True, "scales=True")])
def test_scales_that_cannot_be_are_refused(scales, match, refuses):
    model = nn.Sequential(nn.Linear(24, 10), nn.ReLU())
    with refuses(ValueError, match):
        gft.quantize_(model, scales=scales)
    assert type(model[0]) is nn.Linear


def test_scales_of_groups_pass_through_compile_and_checkpoints(tmp_path):
    def build():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 10))
        gft.quantize_(model, 2, scales=8)
        return model, gft.GFT(gft.quantized(model), lr=0.5)

    x = torch.randn(32, 24)
    plain, optimizer = build()
    compiled, of_compiled = build()
    forward = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        for run, one in ((plain, optimizer), (forward, of_compiled)):
            run(x).square().sum().backward(); one.step(); one.zero_grad()
    for one, other in zip(quantized_layers(plain).values(), quantized_layers(compiled).values(), strict=True):
        assert torch.equal(one.qweight, other.qweight)
    with torch.no_grad():
        assert torch.allclose(torch.compile(compiled, backend="aot_eager")(x), plain(x), atol=1e-5)
    gft.save_checkpoint(tmp_path / "one", plain, optimizer)
    again, of_again = build()
    gft.load_checkpoint(tmp_path / "one", again, of_again)
    assert torch.equal(again(x), plain(x))
