"""summary.py, and what quantize_ says of itself: what became integers, what did not, and why."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import gft


class Own(nn.Linear):
    """Which its parent may use in ways of its own."""


class Table(nn.Module):
    """Holds a matrix by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(5, 8))


def build() -> nn.ModuleDict:
    model = nn.ModuleDict({
        "embed": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False), "up": nn.Linear(8, 32),
        "down": nn.Linear(32, 8, bias=False), "conv": nn.Conv1d(8, 4, 3), "norm": nn.LayerNorm(8), "rnn": nn.LSTM(8, 8),
        "own": Own(8, 8, bias=False), "table": Table(), "attention": nn.MultiheadAttention(8, 2),
    })
    model["head"].weight = model["embed"].weight
    return model


def test_summary_counts_every_weight_once():
    model = build()
    weights, size = (sum(getattr(p, what) for p in model.parameters()) for what in ("nbytes", "nbytes"))
    weights //= 4
    before = gft.summary(model)
    assert (before.share, before.integer_weights, before.float_weights, before.bytes) == (0.0, 0, weights, size)

    gft.quantize_(model, bits=3, memory=False, skip_tied=True)
    after = gft.summary(model)
    integers = 8 * 32 + 32 * 8 + 4 * 24 + 4 * 64
    assert after.integer_weights == integers
    assert after.float_weights == weights - integers
    assert after.share == pytest.approx(integers / weights)
    assert after.bytes_before == size
    scales = 7 * 4
    assert after.bytes == size - 4 * integers + integers // 2 + scales
    kinds = {(kind.name, kind.bits): (kind.layers, kind.weights) for kind in after.integers}
    assert kinds == {("QuantLinear", 3): (6, integers - 96), ("QuantConv1d", 3): (1, 96)}


def test_summary_says_why_layers_are_float():
    model = gft.quantize_(build(), filter_fn=lambda _, name: name not in ("down", "head"))
    why = {kind.largest: kind.why for kind in gft.summary(model).floats}
    assert why["embed"] == "its rows are looked up, not multiplied"
    assert why["down"] == "left out by filter_fn"
    assert why["head"] == "its weight is another layer's, too"
    assert why["norm"] == "a vector, not a matrix"
    assert "one kernel" in why["rnn"]
    assert "subclass of Linear" in why["own"]
    assert "does not know" in why["table"]
    assert why["conv"] == "bias or gain"


def test_summary_is_a_table():
    text = str(gft.summary(gft.quantize_(build(), skip_tied=True)))
    lines = text.splitlines()
    assert lines[0].split() == ["layers", "of", "type", "bits", "weights", "bytes", "in", "float", "why", "float"]
    assert any(line.split()[:4] == ["6", "QuantLinear", "4", "768"] for line in lines)
    assert lines[-1].split()[1] == "integers"
    assert max(len(line) for line in lines) < 125
    assert str(gft.summary(nn.Sequential(nn.ReLU())))  # of nothing, too


def test_quantize_logs_one_line(caplog):
    caplog.set_level(logging.INFO, logger="gft")
    gft.quantize_(build(), skip_tied=True)
    (record,) = caplog.records
    assert record.levelname == "WARNING"  # most of this model cannot be integers, and all of it was asked for
    assert "the largest part left float is rnn (LSTM), torch runs all of it as one kernel" in record.message
    caplog.clear()
    gft.quantize_(build(), filter_fn=lambda _, name: name == "up")
    (record,) = caplog.records
    assert record.levelname == "INFO"
    caplog.clear()
    gft.quantize_(nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)), bits=2, memory=False)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.message.startswith("98.9% of 5,562 weights are integers, in 2 layers; 21.7 kB -> 1.6 kB; float: ")


def test_a_parametrized_weight_is_left_float_and_named():
    model = nn.Sequential(weight_norm(nn.Linear(30, 30)), nn.Linear(30, 40))
    gft.quantize_(model)
    assert type(model[1]) is gft.QuantLinear
    kinds = {kind.name: kind for kind in gft.summary(model).floats}
    assert kinds["ParametrizationList"].weights == 930
    assert "computed anew before each forward pass (weight_norm" in kinds["ParametrizationList"].why


def test_a_layer_without_weights_yet_is_left_and_named():
    model = gft.quantize_(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3, bias=False)), gain=False)
    (left,) = gft.summary(model).floats
    assert (left.name, left.weights, left.why) == ("LazyLinear", 0, "has no weights before its first input")


def test_an_integer_weight_refuses_a_parametrization(refuses):
    layer = gft.QuantLinear(4, 3)
    with refuses(ValueError, "does not have a parameter.* .weight."):
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())


def test_integers_refuse_to_require_gradients(refuses):
    """model.requires_grad_(True) is torch's to refuse: nothing but a subclass of Parameter could answer it."""
    model = nn.Sequential(nn.Linear(4, 3), gft.QuantLinear(3, 2, bias=True))
    model.requires_grad_(False)
    with refuses(RuntimeError, "only Tensors of floating point dtype can require gradients"):
        model.requires_grad_(True)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())  # the way that works
    assert len(gft.dense(model)) == 3
