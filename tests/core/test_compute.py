"""compute="bf16", "int8", "fp8": in which numbers a layer multiplies."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import gft
from gft import ops, reference
from gft.errors import UsageError
from gft.layers import quantized_layers

EIGHT = {"int8": ops.INT8, "fp8": ops.FP8}
eight_bits = pytest.mark.parametrize("compute", EIGHT)


def network(compute, bits=4, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 17))
    return gft.quantize_(model, bits, compute=compute, **settings)


def layer_and_twin(compute, bits=4, scales="tensor", gain=False):
    """A layer, and one with the same weight that multiplies floats."""
    torch.manual_seed(1)
    layer = gft.QuantLinear(30, 20, bits, gain=gain, scales=scales)
    if scales == "row":
        layer.set_scale_(torch.rand(20, 1) + 0.1)
    if gain:
        layer.log_gain.data.fill_(0.07)
    twin = copy.deepcopy(layer)
    layer.compute = compute
    return layer, twin


def wide_values(*shape):
    """From tiny to large, in every token."""
    return torch.randn(shape) * torch.exp(2 * torch.randn(shape))


# ---------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_every_level_is_exact_in_eight_bits(bits):
    levels = torch.arange(1 - 2 ** (bits - 1), 2 ** (bits - 1), dtype=torch.int8)
    assert torch.equal(levels.to(ops.FP8).float(), levels.float())


@eight_bits
def test_tokens_are_rounded_to_the_nearest_number_on_a_scale_of_their_own(compute):
    x = wide_values(6, 33)
    x[2] = 0
    tokens = ops.round_tokens(x, EIGHT[compute])
    for values, q, scale in zip(x.tolist(), tokens.q.float().tolist(), tokens.scale.tolist(), strict=True):
        expected, expected_scale = reference.round_token(values, compute)
        assert q == expected
        assert math.isclose(scale, expected_scale, rel_tol=1e-6)


def test_what_lies_half_way_is_rounded_to_even():
    """Also where the factor is no number of float32: 448 / 3 and 448 / 3.0625."""
    x = torch.tensor([[3.0, 1.125, 0.28125], [3.0625, 2.515625, -2.078125]])
    assert ops.round_tokens(x, ops.FP8).q.float().tolist() == [[448, 160, 40], [448, 384, -320]]


@eight_bits
def test_one_value_that_is_not_finite_spoils_its_token_and_no_other(compute):
    x = torch.randn(4, 8)
    x[1, 2], x[3, 0] = math.nan, -math.inf
    tokens = ops.round_tokens(x, EIGHT[compute])
    assert tokens.scale.isnan().tolist() == [False, True, False, True]
    assert not tokens.q.float().isnan().any()
    y = layer_and_twin(compute)[0](torch.cat([torch.randn(20, 30), torch.full((1, 30), math.inf)]))
    assert y.isnan().any(1).tolist() == [False] * 20 + [True]


@eight_bits
@pytest.mark.parametrize(("scales", "gain"), [("tensor", False), ("tensor", True), ("row", True)])
@pytest.mark.parametrize("tokens", [3, 40])
def test_a_product_and_its_gradient_are_those_of_rounded_tokens(compute, scales, gain, tokens):
    layer, twin = layer_and_twin(compute, scales=scales, gain=gain)
    x, grad = wide_values(2, tokens, 30).requires_grad_(), wide_values(2, tokens, 20)
    layer.requires_grad_(False)
    y = layer(x)
    y.backward(grad)
    weight = twin.float_weight().detach()

    def rounded(values):
        q, scale = ops.round_tokens(values.flatten(0, 1), EIGHT[compute])
        return (q.float() * scale[:, None]).view_as(values)

    torch.testing.assert_close(y, rounded(x.detach()) @ weight.T, rtol=1e-5, atol=1e-5)
    each = twin.scales_by_group()[:, 0]  # goes into grad_output before it is rounded
    torch.testing.assert_close(x.grad, rounded(grad * each) @ (weight / each[:, None]), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), y.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("compute", "bound"), [("bf16", 2**-8), ("int8", 0.012), ("fp8", 0.04)])
def test_what_rounding_changes_is_small(compute, bound):
    layer, twin = layer_and_twin(compute)
    x = torch.randn(500, 30)
    assert 0 < (layer(x) - twin(x)).norm() < bound * twin(x).norm()


@pytest.mark.parametrize("compute", [*EIGHT, None])
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("gain", [False, True])
def test_votes_and_the_gradient_of_the_gain_are_the_same_for_the_same_x(compute, scales, gain):
    def cast(layer):
        optimizer = gft.GFT(gft.quantized(layer), seed=3)
        torch.manual_seed(4)
        x, grad = torch.randn(50, 30, requires_grad=True), torch.randn(50, 20)
        layer(x).backward(grad)
        assert optimizer.flips() == 0
        return layer.votes.votes, layer.log_gain.grad if gain else None

    (votes, slope), (wanted, wanted_slope) = map(cast, layer_and_twin(compute, scales=scales, gain=gain))
    assert torch.equal(votes, wanted)
    assert votes.any()
    if gain:
        torch.testing.assert_close(slope, wanted_slope)


@pytest.mark.parametrize("compute", ["bf16", *EIGHT])
def test_the_output_has_the_type_of_x_or_of_autocast(compute):
    layer, _ = layer_and_twin(compute, gain=True)
    x = torch.randn(20, 30)
    with torch.no_grad():
        assert layer(x).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16
        torch.testing.assert_close(layer(x.double()), layer(x).double(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(("compute", "bits"), [("bf16", 4), ("int8", 4), ("fp8", 2)])
def test_a_compiled_network_trains_to_the_same_bits_and_learns(compute, bits):
    torch.compiler.reset()
    x = torch.randn(32, 24)
    y = x[:, :17] * 0.5
    ends = []
    for compiled in (False, True):
        model = network(compute, bits)
        optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), seed=2), torch.optim.AdamW(gft.dense(model), lr=1e-2))
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        losses = []
        for _ in range(12):
            loss = (run(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
        with torch.no_grad():
            ends.append([*losses, *model.state_dict().values(), run(x), run(x[:5])])
    for eager, compiled in zip(*ends, strict=True):
        assert torch.equal(torch.as_tensor(eager), torch.as_tensor(compiled))


def test_compute_can_be_changed_between_two_steps():
    model = network(None)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model)), torch.optim.AdamW(gft.dense(model)))
    x = torch.randn(20, 24, requires_grad=True)
    outputs = []
    for compute in (None, "fp8", "int8", None):
        for layer in quantized_layers(model).values():
            layer.compute = compute
        y = model(x)
        y.sum().backward()
        optimizer.zero_grad()
        outputs.append(y.detach())
    assert torch.equal(outputs[0], outputs[3])
    assert not any(torch.equal(one, other) for one, other in pairwise(outputs))


@pytest.mark.gpu
@eight_bits
@pytest.mark.parametrize(("tokens", "dtype"), [(300, torch.bfloat16), (300, torch.float32), (5, torch.bfloat16)], ids=str)
def test_a_gpu_computes_what_the_definition_says(compute, tokens, dtype):
    """Sizes that torch._scaled_mm takes. Three times: from the third on launches are those that were found before."""
    for scales in ("tensor", "row"):
        layer = gft.QuantLinear(64, 96, scales=scales, gain=True)
        layer.compute = compute
        there, plain = copy.deepcopy(layer).cuda(), copy.deepcopy(layer).cuda()
        plain.compute = None
        layer.requires_grad_(False)
        optimizers = [gft.GFT(gft.quantized(one), seed=1) for one in (there, plain)]
        for _ in range(3):
            x, grad = torch.randn(tokens, 64).to(dtype), torch.randn(tokens, 96).to(dtype)
            here, on_gpu = x.clone().requires_grad_(), x.cuda().requires_grad_()
            y, z = layer(here), there(on_gpu)
            y.backward(grad)
            (grad_input,) = torch.autograd.grad(z, on_gpu, grad.cuda())
            assert z.dtype is dtype
            for got, wanted in ((z, y), (grad_input, here.grad)):
                assert (got.float().cpu() - wanted.float()).norm() < 0.01 * wanted.float().norm()
            plain(on_gpu).backward(grad.cuda())
            assert torch.equal(there.votes.votes, plain.votes.votes)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(there.qweight, plain.qweight)


@pytest.mark.filterwarnings("ignore:.*has no optimizer:UserWarning")
def test_an_exported_graph_multiplies_floats():
    layer, twin = layer_and_twin("fp8")
    x = torch.randn(20, 30)
    assert torch.equal(torch.export.export(layer.eval(), (x,)).module()(x), twin(x))


# ---------------------------------------------------------------------------------------------------- how it is chosen


def test_compute_goes_with_copies_and_stays_out_of_the_state_dict():
    model = network("fp8")
    assert "compute='fp8'" in repr(model[0])
    assert [layer.compute for layer in quantized_layers(copy.deepcopy(model)).values()] == ["fp8", "fp8"]
    other = network(None, init="variance")
    other.load_state_dict(model.state_dict())
    assert [layer.compute for layer in quantized_layers(other).values()] == [None, None]
    x = torch.randn(20, 24)
    assert not torch.equal(other(x), model(x))
    assert torch.equal(gft.dequantize_(model)(x), gft.dequantize_(other)(x))


def test_linear_layers_of_all_kinds_take_it_and_convolutions_stay_as_they_are():
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "attention": nn.MultiheadAttention(8, 2), "linear": nn.Linear(4, 5)})
    gft.quantize_(model, compute="int8")
    chosen = {name: layer.compute for name, layer in quantized_layers(model).items()}
    assert chosen.pop("conv") is None
    assert set(chosen.values()) == {"int8"}
    assert len(chosen) == 5
    convolution = gft.quantize_(nn.Sequential(nn.Conv2d(3, 4, 3)), compute="bf16")
    assert convolution(torch.randn(1, 3, 5, 5)).dtype is torch.float32


@pytest.mark.parametrize(("settings", "match"), [
    ({"compute": "fp16"}, "compute='fp16': choose one of None, 'bf16'"),
    ({"compute": 8}, "compute=8: choose"),
    ({"compute": "fp8", "bits": 6}, "up to 5 bits exactly, and these have 6; choose"),
    ({"compute": "int8", "scales": 3}, 'choose scales="tensor" or "row"'),
    ({"compute": "fp8", "filter_fn": lambda module, name: name == "1"}, "is for linear layers, and none was chosen")])
def test_what_cannot_be_multiplied_so_is_refused(refuses, settings, match):
    model = nn.Sequential(nn.Linear(24, 40), nn.Conv1d(3, 4, 2))
    with refuses(UsageError, match):
        gft.quantize_(model, **settings)
    assert not quantized_layers(model)


def test_a_layer_refuses_a_compute_that_is_not_for_it_and_keeps_its_own(refuses):
    convolution, wide = gft.QuantConv1d(3, 4, 2), gft.QuantLinear(8, 8, 8)
    with refuses(UsageError, "is for linear layers, which QuantConv1d is not"):
        convolution.compute = "int8"
    wide.compute = "int8"
    with refuses(UsageError, "up to 5 bits"):
        wide.compute = "fp8"
    assert (convolution.compute, wide.compute) == (None, "int8")
