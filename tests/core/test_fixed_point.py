"""Products of x and levels in fixed point, where a processor multiplies bytes fast: as exact as float32, and the same bits
however the work is shared out. Here by the definition and by the machine's own kernels, whatever its processor."""

import copy

import pytest
import torch
from torch import nn

import gft
from gft import ops
from gft.ops import lowprecision

INPUTS, OUTPUTS, TOKENS = 130, 70, 33


@pytest.fixture
def fixed(monkeypatch):
    """A processor that prefers fixed point, in layers of any size."""
    monkeypatch.setattr(lowprecision, "_has_tiles", lambda: True)
    monkeypatch.setattr(lowprecision, "REPAYS_FIXED", 1)


@pytest.fixture(params=["kernels", "definition"])
def way(request, monkeypatch):
    if request.param == "definition":
        monkeypatch.setattr("gft.ops.operation.twins", lambda device_type: {})


def a_layer(bits=4, scales="tensor", gain=False, bias=False):
    torch.manual_seed(1)
    layer = gft.QuantLinear(INPUTS, OUTPUTS, bits, bias, gain=gain, scales=scales)
    if scales == "row":
        layer.set_scale_(torch.rand(OUTPUTS, 1) + 0.1)
    if gain:
        layer.log_gain.data.fill_(0.07)
    return layer


def values(*shape):
    return torch.randn(shape) * torch.exp(torch.randn(shape[-1]))


def trained(layer, x, grad):
    """y, x's gradient, the votes and the gain's gradient of one pass."""
    layer = copy.deepcopy(layer)
    optimizer = gft.GFT(gft.quantized(layer), seed=3)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    assert optimizer.flips() == 0
    return y.detach(), x.grad, layer.votes.votes, None if layer.log_gain is None else layer.log_gain.grad


@pytest.mark.parametrize(("bits", "scales", "gain"), [(2, "tensor", True), (4, "tensor", False), (4, "row", False),
                                                      (8, "row", True)])
def test_products_are_as_near_to_the_truth_as_those_of_float32(fixed, way, bits, scales, gain):
    layer = a_layer(bits, scales, gain)
    x, grad, weight = values(TOKENS, INPUTS), values(TOKENS, OUTPUTS), layer.float_weight().detach()
    y, grad_input, *_ = trained(layer, x, grad)
    each = layer.scales_by_group()[:, :1].double()
    levels = weight.double() / each  # the last bit of a float weight is its own, not the product's
    for got, exact, floats in ((y, x.double() @ (levels * each).T, x @ weight.T),
                               (grad_input, grad.double() @ (levels * each), grad @ weight)):
        assert got.dtype is torch.float32
        assert (got - exact).norm() < 2 * (floats - exact).norm()


@pytest.mark.parametrize(("scales", "gain"), [("tensor", False), ("row", True)])
def test_votes_are_those_of_float_products(monkeypatch, scales, gain):
    layer, x, grad = a_layer(2, scales, gain), values(TOKENS, INPUTS), values(TOKENS, OUTPUTS)
    *wanted, slope = trained(layer, x, grad)
    monkeypatch.setattr(lowprecision, "_has_tiles", lambda: True)
    monkeypatch.setattr(lowprecision, "REPAYS_FIXED", 1)
    *got, its_slope = trained(layer, x, grad)
    assert not torch.equal(got[0], wanted[0])  # it was another product
    torch.testing.assert_close(got[:2], wanted[:2], rtol=1e-4, atol=1e-4)
    assert torch.equal(got[2], wanted[2])
    assert got[2].any()
    if gain:
        assert torch.equal(its_slope, slope)


def test_bits_depend_on_neither_threads_nor_the_rest_of_the_batch_nor_kernels(fixed, monkeypatch):
    layer, x, grad = a_layer(gain=True, bias=True), values(3 * TOKENS, INPUTS), values(3 * TOKENS, OUTPUTS)
    wanted = trained(layer, x, grad)
    for some in (x[:TOKENS], x[TOKENS:]):
        rows = slice(0, TOKENS) if len(some) == TOKENS else slice(TOKENS, None)
        y, grad_input, *_ = trained(layer, x[rows], grad[rows])
        assert torch.equal(y, wanted[0][rows])
        assert torch.equal(grad_input, wanted[1][rows])
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    try:
        for got, its in zip(trained(layer, x, grad), wanted, strict=True):
            assert torch.equal(got, its)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr("gft.ops.operation.twins", lambda device_type: {})
    for got, its in zip(trained(layer, x, grad)[:3], wanted[:3], strict=True):  # the gain's gradient is a sum of floats
        assert torch.equal(got, its)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_spoils_its_token_alone(fixed, way, bad):
    x = values(TOKENS, INPUTS)
    x[2, 5] = bad
    y = a_layer()(x)
    assert y.isnan().all(1).tolist() == [token == 2 for token in range(TOKENS)]


def test_a_network_learns(fixed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 5))
    gft.quantize_(model, 2)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), rule=gft.Rounding(warmup=0)),
                           torch.optim.AdamW(gft.dense(model), lr=1e-2))
    x, losses = torch.randn(256, 24), []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_what_fixed_point_would_not_serve_stays_float(fixed, monkeypatch):
    x, whole = torch.randn(TOKENS, INPUTS), gft.QuantLinear.rounded_to
    assert whole(a_layer(), x) is ops.FIXED
    assert whole(a_layer(scales="row"), x) is ops.FIXED
    assert whole(a_layer(), x.double()) is whole(a_layer(), x.bfloat16()) is None
    assert whole(gft.QuantLinear(128, OUTPUTS, scales=64), torch.randn(TOKENS, 128)) is None
    monkeypatch.setattr(lowprecision, "REPAYS_FIXED", INPUTS * OUTPUTS + 1)
    assert whole(a_layer(), x) is None
    layer = a_layer()
    layer.compute = "int8"
    assert whole(layer, x) is ops.INT8
    monkeypatch.setattr(lowprecision, "_has_tiles", lambda: False)
    monkeypatch.setattr(lowprecision, "REPAYS_FIXED", 1)
    assert whole(a_layer(), x) is None
