"""statistics.py: known layers give known numbers."""

import pytest
import torch
from torch import nn

import gft
from gft.layers import quantized_layers


def layer_of(levels: list[list[int]], bits: int, memory: bool) -> gft.QuantLinear:
    layer = gft.QuantLinear(len(levels[0]), len(levels), bits, memory=memory)
    layer.qweight.copy_(layer.storage.store(torch.tensor(levels)))
    return layer


@pytest.mark.parametrize("memory", [False, True], ids=["packed", "memory"])
def test_statistics_of_a_known_layer(memory):
    model = nn.Sequential(nn.Linear(4, 5), layer_of([[-3, 0, 0, 1, 3], [2, 0, -1, -3, 0]], 3, memory))
    report = gft.statistics(model)
    assert list(report) == ["1"]
    assert report["1"]["histogram"] == pytest.approx([0.2, 0, 0.1, 0.4, 0.1, 0.1, 0.1])
    assert report["1"]["zeros"] == pytest.approx(0.4)
    assert report["1"]["edges"] == pytest.approx(0.3)
    assert report["1"].keys() == {"histogram", "zeros", "edges"}


def test_statistics_of_ternary_weights():
    (row,) = gft.statistics(nn.Sequential(layer_of([[-1, 1, 1, 0]], 2, False))).values()
    assert row["histogram"] == pytest.approx([0.25, 0.25, 0.5])
    assert row["edges"] == pytest.approx(0.75)


@pytest.mark.parametrize(("errors", "margin"), [([1.0, 1.0, 1.0, 1.0], 1.0), ([1.0, -1.0, 1.0, -1.0], 0.0),
                                               ([1.0, 1.0, 1.0, -1.0], 0.5)], ids=["unanimous", "even split", "3 to 1"])
def test_margin_says_how_one_sided_the_votes_were(errors, margin):
    layer = gft.QuantLinear(3, 2)
    model = nn.Sequential(layer)
    optimizer = gft.GFT(gft.quantized(model), vote=gft.Sign())
    layer(torch.ones(4, 3)).backward(torch.tensor(errors)[:, None].expand(4, 2))
    assert gft.statistics(model)["0"]["margin"] == pytest.approx(margin)
    optimizer.step()
    assert "margin" not in gft.statistics(model)["0"]


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_margin_of_unanimous_sequences_is_one(kind):
    layer = gft.QuantLinear(3, 2) if kind == "linear" else gft.QuantConv2d(3, 2, 2)
    x = torch.ones(4, 5, 3) if kind == "linear" else torch.ones(4, 3, 3, 4)
    optimizer = gft.GFT(gft.quantized(layer), vote=gft.Sign(per="sequence"))
    y = layer(x)
    y.backward(torch.ones_like(y))
    assert int(layer.votes.votes.min()) == 4
    (row,) = gft.statistics(nn.Sequential(layer), optimizer).values()
    assert row["margin"] == pytest.approx(1)


def test_flip_rate_is_the_share_the_last_step_changed(tiny_net, batches):
    model = tiny_net(bits=3)
    parts = gft.GFT(gft.quantized(model), lr=0.7), torch.optim.AdamW(gft.dense(model))
    optimizer = gft.Hybrid(*parts)
    assert all("flip_rate" not in row for row in gft.statistics(model, optimizer).values())
    for x, y in batches[:3]:
        before = [layer.levels().clone() for layer in quantized_layers(model).values()]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    layers = quantized_layers(model)
    for name, old in zip(layers, before, strict=True):
        changed = float((layers[name].levels() != old).double().mean())
        assert changed > 0
        assert gft.statistics(model, optimizer)[name]["flip_rate"] == pytest.approx(changed)
        assert gft.statistics(model, parts[0])[name]["flip_rate"] == pytest.approx(changed)
        assert "flip_rate" not in gft.statistics(model)[name]


def test_statistics_of_a_float_model_is_empty():
    assert gft.statistics(nn.Sequential(nn.Linear(2, 3))) == {}
