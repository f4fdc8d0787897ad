"""GPTQ: a rounding that changes a layer's outputs less than the nearest one does."""

import copy

import pytest
import torch
from torch import nn

import gft
from gft.calibrate import rounded_for_outputs
from gft.layers import quantized_layers


def correlated(n: int, columns: int) -> torch.Tensor:
    """Inputs as networks have them: few directions, of very different sizes."""
    generator = torch.Generator().manual_seed(8)
    mix = torch.randn(columns, columns, generator=generator) * torch.logspace(0.5, -1.5, columns)[:, None]
    return torch.randn(n, columns, generator=generator) @ mix + 0.3


def test_levels_lose_far_less_of_the_outputs_than_the_nearest_do():
    x, weight = correlated(2000, 70), torch.randn(20, 70)
    scale = torch.full((20, 70), 0.6)
    nearest = (weight / scale).round().clamp(-3, 3)
    levels = rounded_for_outputs(weight, scale, x.T @ x / 2000, 3, 0.01)
    assert torch.equal(levels, levels.round())
    assert levels.abs().max() <= 3

    def lost(chosen):
        return float((x @ (weight - chosen * scale).T).square().sum())

    assert lost(levels) < 0.35 * lost(nearest)


def test_without_correlation_it_is_the_nearest_level():
    weight, scale = torch.randn(6, 10), torch.full((6, 10), 0.5)
    levels = rounded_for_outputs(weight, scale, torch.eye(10), 7, 0.0)
    assert torch.equal(levels, (weight / scale).round().clamp(-7, 7))


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
@pytest.mark.parametrize("scales", ["tensor", "row", 9])
def test_a_network_loses_less_of_its_outputs(scales, memory):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding="same", groups=2, stride=1), nn.ReLU(), nn.Conv2d(8, 9, 3, stride=2),
                          nn.ReLU(), nn.Flatten(), nn.Linear(36, 18), nn.Tanh(), nn.Linear(18, 3))
    x = correlated(300, 4 * 36).view(-1, 4, 6, 6)
    expected, lost = model(x).detach(), {}
    model[6].train(False)
    for init in ("fit", gft.GPTQ([x[:100], (x[100:200],)])):
        one = gft.quantize_(copy.deepcopy(model), 3, memory=memory, scales=scales, init=init, gain=False)
        assert one.training
        assert not one[6].training
        lost[str(init)[:4]] = float((one.eval()(x[200:]) - expected[200:]).square().mean())
        assert all(layer.levels().abs().max() <= 3 for layer in quantized_layers(one).values())
    assert lost["GPTQ"] < 0.85 * lost["fit"]


def test_memory_does_not_undo_the_rounding():
    x, linear = correlated(500, 24), nn.Linear(24, 12)
    model = gft.quantize_(nn.Sequential(linear), 2, init=gft.GPTQ([x]), gain=False)
    levels = model[0].levels()
    nearest = gft.QuantLinear.from_float(linear, 2, init="fit").levels()
    assert not torch.equal(levels, nearest)
    optimizer = gft.GFT(gft.quantized(model), lr=1e-6, rule=gft.Rounding(inertia=0.5))
    for _ in range(10):
        model(x[:1]).sum().backward(); optimizer.step()
    assert float((model[0].levels() != levels).float().mean()) < 0.01


def test_inputs_by_name_and_refusals(refuses):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x):
            return self.used(x)

    model = gft.quantize_(Named(), 4, init=gft.GPTQ([{"x": torch.randn(40, 6)}]))
    assert len(quantized_layers(model)) == 2
    with refuses(TypeError, r"iterable of batches.*\[batch\]"):
        gft.GPTQ(torch.randn(3, 6))
    with refuses(ValueError, "damping=2"):
        gft.GPTQ([], damping=2.0)
    with torch.device("meta"):
        empty = Named()
    with refuses(ValueError, "meta device; load them first"):
        gft.quantize_(empty, 4, init=gft.GPTQ([{"x": torch.randn(40, 6)}]))
    fresh = Named()
    with refuses(ValueError, "no batch reached"):
        gft.quantize_(fresh, 4, init=gft.GPTQ([]))
    with refuses(ValueError, "NaN or inf"):
        gft.quantize_(fresh, 4, init=gft.GPTQ([{"x": torch.full((4, 6), torch.nan)}]))
    with refuses(ValueError, "init='near': choose"):
        gft.quantize_(fresh, 4, init="near")
    assert type(fresh.used) is nn.Linear
