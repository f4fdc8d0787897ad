"""layers.py: forward and delta as the float layer's, votes in place of a weight gradient."""

import copy
import re
import shutil
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gft
from gft import grid, reference
from gft.layers import quantized_layers
from gft.vote import Ballot

both_forms = pytest.mark.parametrize("memory", [False, True], ids=["packed", "memory"])
ranks = pytest.mark.parametrize("lead", [(), (7,), (3, 5), (2, 3, 4)], ids=["rank 1", "rank 2", "rank 3", "rank 4"])

# (input, geometry) of convolutions, none of them square, even or alike
CONVOLUTIONS = {
    "plain": ((2, 3, 7, 9), {"out_channels": 5, "kernel_size": (3, 2)}),
    "1x1": ((3, 4, 5, 6), {"out_channels": 7, "kernel_size": 1}),
    "stride": ((2, 3, 8, 11), {"out_channels": 4, "kernel_size": 3, "stride": (2, 3)}),
    "padding": ((2, 3, 5, 4), {"out_channels": 4, "kernel_size": 3, "padding": (2, 1)}),
    "dilation": ((1, 3, 9, 11), {"out_channels": 5, "kernel_size": (2, 3), "dilation": (3, 2)}),
    "groups": ((2, 6, 5, 7), {"out_channels": 9, "kernel_size": 3, "groups": 3}),
    "depthwise": ((2, 5, 6, 5), {"out_channels": 10, "kernel_size": 3, "groups": 5, "padding": 1}),
    "all at once": ((3, 4, 10, 9), {"out_channels": 6, "kernel_size": (3, 5), "stride": (1, 2), "padding": (1, 3),
                                    "dilation": (2, 1), "groups": 2}),
    "same": ((2, 3, 6, 5), {"out_channels": 4, "kernel_size": (3, 5), "padding": "same"}),
    "unbatched": ((3, 8, 6), {"out_channels": 4, "kernel_size": 3, "padding": 1}),
}
convolutions = pytest.mark.parametrize("case", CONVOLUTIONS)


def conv_of(case: str, **rest) -> tuple[gft.QuantConv2d, torch.Tensor]:
    shape, geometry = CONVOLUTIONS[case]
    return gft.QuantConv2d(shape[-3], **geometry, **rest), torch.randn(shape)


def backward(layer: nn.Module, x: torch.Tensor, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Train `layer` on x with a random error; returns the error and the votes it cast."""
    gft.GFT(gft.quantized(layer), **{"vote": "sign", "seed": 3, **settings})
    y = layer(x)
    delta = torch.randn(y.shape, dtype=y.dtype)
    y.backward(delta)
    return delta, layer.ballot.votes


# ---------------------------------------------------------------------------------------------------- forward, delta


@both_forms
@pytest.mark.parametrize("bits", [2, 3, 4, 7], ids="{}bit".format)
@ranks
def test_linear_is_the_float_layer_it_stands_for(lead, bits, memory):
    layer = gft.QuantLinear(65, 31, bits, bias=True, memory=memory)
    nn.init.normal_(layer.bias)
    check_against_float(layer, torch.randn(*lead, 65))


@both_forms
@convolutions
def test_conv_is_the_float_layer_it_stands_for(case, memory):
    layer, x = conv_of(case, bits=3, bias=True, memory=memory)
    nn.init.normal_(layer.bias)
    check_against_float(layer, x)


def check_against_float(layer: nn.Module, x: torch.Tensor) -> None:
    """Output, error passed down and bias gradient equal those of to_float(), with votes and without."""
    plain = layer.to_float()
    assert torch.equal(plain.weight, layer.levels() * layer.scale)
    x_plain, x = x.clone().requires_grad_(), x.requires_grad_()
    y_plain = plain(x_plain)
    delta = torch.randn_like(y_plain)
    y_plain.backward(delta)

    gft.GFT(gft.quantized(layer))
    y = layer(x)
    y.backward(delta)

    assert torch.allclose(y, y_plain, atol=1e-5)
    assert torch.allclose(x.grad, x_plain.grad, atol=1e-5)
    assert torch.allclose(layer.bias.grad, plain.bias.grad, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(layer(x), y_plain, atol=1e-5)


def test_linear_takes_inputs_that_are_not_contiguous():
    layer, x = gft.QuantLinear(33, 12), torch.randn(33, 9, 4).transpose(0, 2)
    delta, votes = backward(layer, x)
    assert votes.tolist() == reference.votes(x.reshape(-1, 33).tolist(), delta.view(-1, 12).tolist())
    assert torch.allclose(layer(x), layer(x.contiguous()), atol=1e-6)


@pytest.mark.parametrize("layer", [gft.QuantLinear(16, 5, bias=True), gft.QuantConv2d(16, 5, 3, bias=True)],
                         ids=["linear", "conv"])
def test_layers_take_float64(layer):
    shape = (2, 16, 4, 4) if isinstance(layer, gft.QuantConv2d) else (3, 16)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    _, votes = backward(layer, x)
    assert layer(x).dtype == x.grad.dtype == torch.float64
    assert votes.any()
    assert torch.allclose(layer(x), layer.to_float().double()(x), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_layers_refuse_integer_input(dtype, refuses):
    with refuses(TypeError, r"float input.*x\.float\(\)"):
        gft.QuantLinear(4, 3)(torch.ones(2, 4, dtype=dtype))


def test_layers_refuse_what_they_cannot_build(refuses):
    with refuses(ValueError, "init='zeros'"):
        gft.QuantLinear(4, 3, init="zeros")
    with refuses(ValueError, "bits=1"):
        gft.QuantLinear(4, 3, bits=1)
    with refuses(ValueError, "groups=2 must divide"):
        gft.QuantConv2d(3, 4, 3, groups=2)
    with refuses(ValueError, 'padding="same"'):
        gft.QuantConv2d(3, 4, 2, padding="same")
    with refuses(ValueError, "padding_mode='reflect'"):
        gft.QuantConv2d.from_float(nn.Conv2d(3, 4, 3, padding_mode="reflect"))


# ---------------------------------------------------------------------------------------------------- votes


@ranks
def test_linear_votes_equal_the_reference(lead):
    layer, x = gft.QuantLinear(13, 6), torch.randn(*lead, 13)
    delta, votes = backward(layer, x)
    assert votes.tolist() == reference.votes(x.view(-1, 13).tolist(), delta.view(-1, 6).tolist())


def conv_votes(layer: gft.QuantConv2d, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Votes by torch's own weight gradient of a convolution, on signs: exact in float64."""
    x, delta = (values.sign().double().view(-1, *values.shape[-3:]) for values in (x, delta))
    shape = torch.Size(layer.float_shape)
    votes = torch.nn.grad.conv2d_weight(x, shape, delta, layer.stride, layer.padding, layer.dilation, layer.groups)
    return votes.view(shape[0], -1).to(torch.int32)


@convolutions
def test_conv_votes_equal_a_plain_computation(case):
    layer, x = conv_of(case, bits=2)
    delta, votes = backward(layer, x)
    assert torch.equal(votes, conv_votes(layer, x, delta))
    assert votes.any()


def test_conv_votes_do_not_depend_on_memory_format_or_pieces():
    layer, x = conv_of("all at once")
    delta, votes = backward(layer, x.to(memory_format=torch.channels_last))
    assert torch.equal(votes, conv_votes(layer, x, delta))

    in_pieces, x = conv_of("all at once")
    in_pieces.UNFOLDED_AT_ONCE = 1  # one image at a time
    delta, votes = backward(in_pieces, x)
    assert torch.equal(votes, conv_votes(in_pieces, x, delta))


def test_conv_int8_votes_point_along_the_gradient():
    layer, x = conv_of("groups")
    x = x.repeat(20, 1, 1, 1) + torch.randn(40, 6, 5, 7)
    delta, votes = backward(layer, x, vote="int8")
    gradient = torch.nn.grad.conv2d_weight(x, layer.float_shape, delta, groups=3).view(9, -1)
    assert F.cosine_similarity(votes.float().flatten(), gradient.flatten(), dim=0) > 0.98


@pytest.mark.parametrize("lead", [(4, 5), (2, 3, 4)], ids=["rank 3", "rank 4"])
def test_linear_gives_each_sequence_one_voice(lead):
    layer, x = gft.QuantLinear(20, 11), torch.randn(*lead, 20)
    delta, votes = backward(layer, x, sample="sequence")
    voices = torch.einsum("bto,bti->boi", delta.flatten(1, -2), x.flatten(1, -2)).sign().sum(0)
    assert int(votes.abs().max()) <= lead[0]
    assert float((votes == voices).float().mean()) > 0.9  # 8 bits within a sequence: near zero they may differ


def test_conv_gives_each_image_one_voice():
    layer, x = conv_of("plain")
    delta, votes = backward(layer, x, sample="sequence")
    voices = [torch.nn.grad.conv2d_weight(x[i : i + 1], layer.float_shape, delta[i : i + 1]).sign() for i in range(2)]
    assert float((votes == sum(voices).view(5, -1)).float().mean()) > 0.9


def test_first_layer_votes_although_its_input_needs_no_gradient():
    model = nn.Sequential(gft.QuantLinear(9, 7), nn.ReLU(), gft.QuantLinear(7, 4))
    gft.GFT(gft.quantized(model))
    model(torch.randn(6, 9)).square().sum().backward()
    assert model[0].ballot.votes.any()
    assert model[2].ballot.votes.any()


def test_layer_used_twice_adds_the_votes_of_both_uses():
    layer, x = gft.QuantLinear(8, 8), torch.randn(5, 8)
    gft.GFT(gft.quantized(layer), vote="sign")
    hidden = layer(x).tanh()
    hidden.retain_grad()
    y = layer(hidden)
    delta = torch.randn_like(y)
    y.backward(delta)
    lower = (hidden.grad * (1 - hidden.detach() ** 2)).tolist()
    expected = torch.tensor(reference.votes(x.tolist(), lower))
    expected += torch.tensor(reference.votes(hidden.tolist(), delta.tolist()))
    assert torch.equal(layer.ballot.votes.long(), expected)


def test_batch_of_one_votes():
    layer, x = gft.QuantLinear(5, 3), torch.randn(1, 5)
    delta, votes = backward(layer, x, vote="int8")
    assert torch.equal(votes.sign(), (delta.T @ x).sign().int())


@pytest.mark.parametrize(("layer", "shape"), [(gft.QuantLinear(5, 3), (0, 5)),
                                              (gft.QuantConv2d(2, 3, 3), (0, 2, 5, 5))], ids=["linear", "conv"])
def test_batch_of_none_moves_nothing_and_says_nothing(layer, shape):
    optimizer = gft.GFT(gft.quantized(layer), lr=0.9)
    before = layer.weight.clone()
    x = torch.empty(shape, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x).sum().backward()
    optimizer.step()
    assert x.grad.shape == shape
    assert torch.equal(layer.weight, before)
    backward(layer, torch.randn(2, *shape[1:]))  # and the layer still works
    assert layer.ballot.votes.any()


def test_frozen_layer_passes_the_error_down_and_warns_once():
    model = nn.Sequential(nn.Linear(6, 5), gft.QuantLinear(5, 4))
    before = model[1].weight.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(2, 6)).sum().backward()
    (warning,) = caught
    assert re.search(r"gft\.quantized\(model\).*gft\.GFT.*\.eval\(\)", str(warning.message))
    assert model[0].weight.grad.any()
    assert torch.equal(model[1].weight, before)

    quiet = nn.Sequential(nn.Linear(6, 5), gft.QuantLinear(5, 4).eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(torch.randn(2, 6)).sum().backward()


# ---------------------------------------------------------------------------------------------------- what is kept of x


@pytest.mark.parametrize(("settings", "bits"), [({"vote": "sign"}, 2), ({"vote": "ternary"}, 2), ({"vote": "int4"}, 4),
                                                ({"vote": "int8"}, 8), ({"vote": "sign", "sample": "sequence"}, 8)],
                         ids=["sign", "ternary", "int4", "int8", "sequence"])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_backward_keeps_only_the_quantized_activation(kind, settings, bits):
    if kind == "linear":
        layer, x = gft.QuantLinear(64, 3), torch.randn(6, 40, 64)
    else:
        layer, x = gft.QuantConv2d(64, 3, 3), torch.randn(6, 64, 5, 8)
    gft.GFT(gft.quantized(layer), **settings)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)

    sizes = sorted(tensor.numel() * tensor.element_size() for tensor in saved if tensor is not layer.weight
                   and tensor.data_ptr() != layer.weight.data_ptr())
    assert sizes[-1] == x.numel() * bits // 8
    assert sum(sizes[:-1]) <= 4 + 4 * 64  # the scale and one mean square a feature


def test_evaluation_keeps_nothing():
    layer, x = gft.QuantLinear(16, 8), torch.randn(4, 16)
    gft.GFT(gft.quantized(layer))
    with torch.no_grad():
        assert layer(x).grad_fn is None
    assert layer.ballot.call == 0


# ---------------------------------------------------------------------------------------------------- torch's machinery


@pytest.mark.parametrize("layer", [gft.QuantLinear(48, 20, bias=True), gft.QuantConv2d(48, 20, 3, bias=True)],
                         ids=["linear", "conv"])
def test_autocast_gives_bfloat16_near_the_float_layer(layer):
    x = torch.randn(4, 48) if isinstance(layer, gft.QuantLinear) else torch.randn(2, 48, 5, 4)
    x.requires_grad_()
    wanted = layer.to_float()(x.detach())
    gft.GFT(gft.quantized(layer), vote="sign")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        with torch.no_grad():
            evaluated = layer(x)
    assert y.dtype == evaluated.dtype == torch.bfloat16
    for result in (y, evaluated):
        assert torch.allclose(result.float(), wanted, atol=0.03, rtol=0.02)
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert layer.ballot.votes.any()


@pytest.mark.parametrize("where", ["after autocast", "inside autocast"])
def test_votes_are_exact_with_autocast(where):
    """Some 500 equal voices do not fit the 8 bits of a bfloat16 sum."""
    layer, x = gft.QuantLinear(7, 5), torch.randn(600, 7).abs()
    gft.GFT(gft.quantized(layer), vote="sign")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        delta = torch.randn_like(y) + 1
        if where == "inside autocast":
            y.backward(delta)
    if where == "after autocast":
        y.backward(delta)
    assert torch.equal(layer.ballot.votes, (delta.sign().long().T @ x.sign().long()).int())


@pytest.mark.parametrize("vote", ["sign", "int8"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing_gives_the_same_votes(reentrant, vote):
    x = torch.randn(6, 9, requires_grad=True)

    def votes_of(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(gft.QuantLinear(9, 12), nn.Tanh(), gft.QuantLinear(12, 7))
        gft.GFT(gft.quantized(model), vote=vote, seed=5)
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        y.square().sum().backward()
        return [layer.ballot.votes for layer in quantized_layers(model).values()]

    for plain, checkpointed in zip(votes_of(False), votes_of(True), strict=True):
        assert plain.any()
        assert torch.equal(plain, checkpointed)


no_compiler = shutil.which("cc") is None and shutil.which("gcc") is None
inductor = pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.skipif(no_compiler, reason="no C compiler")])


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_compiled_model_ends_with_the_same_weights(backend):
    torch.compiler.reset()
    x = torch.randn(16, 9)

    def train(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(gft.QuantLinear(9, 12, bias=True), nn.ReLU(), gft.QuantLinear(12, 7))
        start = model[0].weight.clone()
        optimizer = gft.GFT(gft.quantized(model), lr=0.8, vote="int8", seed=5)
        run = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        for _ in range(2):
            optimizer.zero_grad()
            run(x).square().sum().backward()
            optimizer.step()
        assert not torch.equal(model[0].weight, start)
        return [parameter.clone() for parameter in gft.quantized(model)]

    for eager, compiled in zip(train(False), train(True), strict=True):
        assert torch.equal(eager, compiled)


def test_compiled_layers_compute_in_the_type_of_autocast(monkeypatch):
    """The operator runs outside of autocast, so what it multiplies must have been cast before."""
    torch.compiler.reset()
    seen = []
    product = gft.QuantLinear.product
    monkeypatch.setattr(gft.QuantLinear, "product", lambda *args: (seen.append(args[1].dtype), product(*args))[1])

    def train(compiled: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(gft.QuantLinear(16, 24), nn.ReLU(), gft.QuantLinear(24, 8))
        optimizer = gft.GFT(gft.quantized(model), lr=0.8, seed=5)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            y = run(torch.randn(32, 16))
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        optimizer.step()
        assert set(seen) == {torch.bfloat16}
        return model[0].weight.detach().clone()

    assert torch.equal(train(False), train(True))


@pytest.mark.parametrize("vote", ["int8", "int4", "sign"])
@pytest.mark.parametrize("kind", ["linear", "conv", "frozen"])
def test_operators_pass_torchs_own_checks(kind, vote, monkeypatch):
    monkeypatch.setattr(Ballot, "call", 0)  # the checks run backward between two forwards that they compare
    layer = gft.QuantConv2d(3, 5, 3, bits=3) if kind == "conv" else gft.QuantLinear(12, 7, bits=3)
    x = torch.randn(2, 3, 6, 6) if kind == "conv" else torch.randn(2, 5, 12)
    if kind != "frozen":
        optimizer = gft.GFT(gft.quantized(layer), vote=vote)
        layer(x).sum().backward()
        optimizer.step()  # so that the votes have their scales
    x.requires_grad_()
    arguments = (x, layer._anchor, layer.weight, layer._number)
    torch.library.opcheck(torch.ops.gft.product, arguments)
    y, kept, square = (output.detach() for output in torch.ops.gft.product(*arguments))
    torch.library.opcheck(torch.ops.gft.product_backward, (torch.randn(y.shape), layer.weight, kept, square, layer._number,
                                                           list(x.shape), torch.float32, True))


@pytest.mark.parametrize("settings", [{"vote": "sign", "rule": "topk"}, {"in_backward": True}, {"vote": "ternary"}],
                         ids=["sign", "in_backward", "ternary"])
def test_one_graph_holds_the_whole_model(settings):
    torch.compiler.reset()
    weights = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(gft.QuantConv2d(2, 4, 3, bits=3, memory=False), nn.ReLU(), nn.Flatten(1),
                              gft.QuantLinear(64, 8))
        optimizer = gft.GFT(gft.quantized(model), lr=0.5, seed=2, **settings)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for number in range(2):
            x = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad(); run(x).square().sum().backward(); optimizer.step()
        weights.append([weight.clone() for weight in gft.quantized(model)])
        with torch.no_grad():
            assert torch.allclose(run(x), model(x), atol=1e-5)
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


def test_a_copy_in_a_graph_votes_for_itself():
    torch.compiler.reset()
    model = gft.QuantLinear(9, 6)
    twin = copy.deepcopy(model)
    assert twin._number != model._number
    optimizers = [gft.GFT(gft.quantized(layer), lr=0.9) for layer in (model, twin)]
    torch.compile(twin, backend="aot_eager", fullgraph=True)(torch.randn(4, 9)).sum().backward()
    assert twin.weight.ballot.votes is not None
    assert model.weight.ballot.votes is None
    assert optimizers[0].flips() == 0


def test_deep_copy_has_no_ballot_and_casts_no_vote():
    model = nn.Sequential(gft.QuantLinear(6, 5), gft.QuantLinear(5, 4))
    optimizer = gft.GFT(gft.quantized(model))
    model(torch.randn(3, 6)).sum().backward()
    before = [layer.ballot.votes.clone() for layer in model]

    twin = copy.deepcopy(model).eval()
    twin(torch.randn(3, 6, requires_grad=True)).sum().backward()

    assert all(layer.ballot is None for layer in twin)
    assert all(torch.equal(layer.ballot.votes, votes) for layer, votes in zip(model, before, strict=True))
    optimizer.step()
    assert not torch.equal(twin[0].weight, model[0].weight)  # a copy, not a view
    own = gft.GFT(gft.quantized(twin), lr=0.9)  # and it can be trained by itself
    twin(torch.randn(3, 6)).sum().backward()
    own.step()
    assert own.flips() > 0


# ---------------------------------------------------------------------------------------------------- state_dict


@both_forms
@pytest.mark.parametrize("build", [partial(gft.QuantLinear, 13, 6), partial(gft.QuantConv2d, 3, 5, 3)],
                         ids=["linear", "conv"])
def test_state_dict_round_trip_gives_the_same_layer(build, memory):
    one, other = build(bits=3, bias=True, memory=memory), build(bits=3, bias=True, memory=memory)
    nn.init.normal_(one.bias)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.float_weight(), other.float_weight())
    assert torch.equal(one.bias, other.bias)


@pytest.mark.parametrize("bits", [3, 5])
def test_packed_levels_of_a_time_before_spare_bits_are_read_as_they_were(bits):
    levels = torch.randint(-3, 4, (5, 7))
    old = {"weight": grid.pack(levels, bits), "scale": torch.tensor(0.3), "_extra_state": torch.tensor([bits, 0]).byte()}
    layer = gft.QuantLinear(7, 5, bits, memory=False)
    layer.load_state_dict(old)
    assert torch.equal(layer.levels().long(), levels)
    again = gft.QuantLinear(7, 5, bits, memory=False)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.weight, layer.weight)
    with pytest.raises(ValueError, match=f"{bits}-bit weights"):
        gft.QuantLinear(7, 5, 4 if bits == 3 else 6, memory=False).load_state_dict(layer.state_dict())


@pytest.mark.parametrize(("other", "match"), [
    (lambda: gft.QuantLinear(32, 6, 4, bias=True, memory=True), "int8.*uint8.*memory"),
    (lambda: gft.QuantLinear(32, 6, 3, bias=True, memory=False), "3-bit.*bits=4"),  # the same bytes, another meaning
    (lambda: gft.QuantLinear(64, 6, 2, bias=True, memory=False), "2-bit.*bits=4"),
    (lambda: nn.Linear(32, 6), "float32.*gft.quantize_"),
], ids=["memory", "3 bits", "2 bits", "float"])
def test_state_dict_of_another_form_is_refused_and_changes_nothing(other, match, refuses):
    layer = gft.QuantLinear(32, 6, 4, bias=True, memory=False)
    before = copy.deepcopy(layer.state_dict())
    foreign = other().state_dict()
    foreign["bias"] = torch.ones(6)
    with refuses(ValueError, match):
        layer.load_state_dict(foreign)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_repr_says_how_the_weight_is_kept():
    assert "bits=3, packed" in repr(gft.QuantLinear(4, 5, 3, memory=False))
    assert "memory=6 bits" in repr(gft.QuantConv2d(4, 5, 3, bits=2))


@pytest.mark.parametrize(("memory", "bits", "expected"),
                         [(False, 2, 0.25), (False, 3, 0.5), (False, 4, 0.5), (True, 2, 1)])
def test_weight_takes_the_stated_bytes_and_nothing_else_is_stored(memory, bits, expected):
    layer = gft.QuantLinear(64, 32, bits, memory=memory)
    optimizer = gft.GFT(gft.quantized(layer), lr=0.6)
    layer(torch.randn(9, 64)).sum().backward()
    optimizer.step()
    stored = [*layer.parameters(), *layer.buffers()]
    assert sum(t.numel() * t.element_size() for t in stored) == 64 * 32 * expected + 4  # and one float: the scale
    state = [t for t in optimizer.state[layer.weight].values() if isinstance(t, torch.Tensor)]
    assert sum(t.numel() for t in state) <= 2 * (64 + 32) + 1 + 2  # two running scales a feature, one of all, two counts
    assert layer.weight.grad is None
