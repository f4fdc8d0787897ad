"""layers.py: forward and grad_input as the float layer's, votes in place of a weight gradient."""

import copy
import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gft
from gft import reference
from gft.storage import Storage, pack_fields

both_forms = pytest.mark.parametrize("memory", [False, True], ids=["packed", "memory"])

# (input, geometry) of convolutions, none of them square, even or alike
CONVOLUTIONS = {
    "plain": ((2, 3, 7, 9), {"out_channels": 5, "kernel_size": (3, 2)}),
    "1x1": ((3, 4, 5, 6), {"out_channels": 7, "kernel_size": 1}),
    "stride and padding": ((2, 3, 8, 11), {"out_channels": 4, "kernel_size": 3, "stride": (2, 3), "padding": (2, 1)}),
    "dilation": ((1, 3, 9, 11), {"out_channels": 5, "kernel_size": (2, 3), "dilation": (3, 2)}),
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


SIGN = gft.Sign()


def backward(layer: nn.Module, x: torch.Tensor, vote: gft.votes.Vote = SIGN) -> tuple[torch.Tensor, torch.Tensor]:
    """Run x through a layer under training, and a random error back; returns the error and the votes it cast."""
    optimizer = gft.GFT(gft.quantized(layer), vote=vote, seed=3)
    y = layer(x)
    grad_output = torch.randn(y.shape, dtype=y.dtype)
    y.backward(grad_output)
    votes = layer.votes.votes
    optimizer.release()
    return grad_output, votes


# ---------------------------------------------------------------------------------------------------- forward, grad_input


@pytest.mark.parametrize(("lead", "bits", "memory"), [((), 2, False), ((7,), 3, True), ((3, 5), 3, False), ((3, 5), 4, True),
                                                      ((2, 3, 4), 7, False)], ids=str)
def test_linear_is_the_float_layer_it_stands_for(lead, bits, memory):
    layer = gft.QuantLinear(65, 31, bits, bias=True, memory=memory)
    nn.init.normal_(layer.bias)
    check_against_float(layer, torch.randn(*lead, 65))


@convolutions
def test_conv_is_the_float_layer_it_stands_for(case):
    layer, x = conv_of(case, bits=3, bias=True, memory=len(case) % 2 == 0)
    nn.init.normal_(layer.bias)
    check_against_float(layer, x)


def check_against_float(layer: nn.Module, x: torch.Tensor) -> None:
    """Output, error passed down and bias gradient equal those of to_float(), with votes and without."""
    plain = layer.to_float()
    assert torch.equal(plain.weight, layer.levels() * layer.scale)
    x_plain, x = x.clone().requires_grad_(), x.requires_grad_()
    y_plain = plain(x_plain)
    grad_output = torch.randn_like(y_plain)
    y_plain.backward(grad_output)

    optimizer = gft.GFT(gft.quantized(layer))
    y = layer(x)
    y.backward(grad_output)

    assert torch.allclose(y, y_plain, atol=1e-5)
    assert torch.allclose(x.grad, x_plain.grad, atol=1e-5)
    assert torch.allclose(layer.bias.grad, plain.bias.grad, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(layer(x), y_plain, atol=1e-5)
    optimizer.release()


def test_linear_takes_inputs_that_are_not_contiguous():
    layer, x = gft.QuantLinear(33, 12), torch.randn(33, 9, 4).transpose(0, 2)
    grad_output, votes = backward(layer, x)
    assert votes.tolist() == reference.votes(x.reshape(-1, 33).tolist(), grad_output.view(-1, 12).tolist())
    assert torch.allclose(layer(x), layer(x.contiguous()), atol=1e-6)


@pytest.mark.parametrize(("layer", "shape"), [(gft.QuantLinear(16, 5, bias=True), (3, 16)),
                                              (gft.QuantConv2d(16, 5, 3, bias=True), (2, 16, 4, 4))], ids=["linear", "conv"])
def test_layers_take_float64(layer, shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    _, votes = backward(layer, x)
    assert layer(x).dtype == x.grad.dtype == torch.float64
    assert votes.any()
    assert torch.allclose(layer(x), layer.to_float().double()(x), atol=1e-6)


def test_layers_refuse_input_they_cannot_multiply(refuses):
    for dtype in (torch.int64, torch.bool):
        with refuses(TypeError, r"float input.*x\.float\(\)"):
            gft.QuantLinear(4, 3)(torch.ones(2, 4, dtype=dtype))
    with refuses(ValueError, r"in_features=4.*\(2, 5\)"):
        gft.QuantLinear(4, 3)(torch.ones(2, 5))


def test_layers_refuse_what_they_cannot_build(refuses):
    with refuses(ValueError, "init='zeros'"):
        gft.QuantLinear(4, 3).start_("zeros")
    with refuses(ValueError, "bits=1"):
        gft.QuantLinear(4, 3, bits=1)
    with pytest.raises(ValueError, match="divisible by groups"):  # nn.Conv2d's own words
        gft.QuantConv2d(3, 4, 3, groups=2)


# ---------------------------------------------------------------------------------------------------- votes


@pytest.mark.parametrize("lead", [(), (7,), (2, 3, 4)], ids=["rank 1", "rank 2", "rank 4"])
def test_linear_votes_equal_the_reference(lead):
    layer, x = gft.QuantLinear(13, 6), torch.randn(*lead, 13)
    grad_output, votes = backward(layer, x)
    assert votes.tolist() == reference.votes(x.view(-1, 13).tolist(), grad_output.view(-1, 6).tolist())


def conv_votes(layer: gft.QuantConv2d, x: torch.Tensor, grad_output: torch.Tensor) -> torch.Tensor:
    """Votes by torch's own weight gradient of a convolution, on signs: exact in float64."""
    x, grad_output = (values.sign().double().view(-1, *values.shape[-3:]) for values in (x, grad_output))
    shape = torch.Size(layer.float_shape)
    votes = torch.nn.grad.conv2d_weight(x, shape, grad_output, layer.stride, layer.padding, layer.dilation, layer.groups)
    return votes.view(shape[0], -1).to(torch.int32)


@convolutions
def test_conv_votes_equal_a_plain_computation(case):
    layer, x = conv_of(case, bits=2)
    grad_output, votes = backward(layer, x)
    assert torch.equal(votes, conv_votes(layer, x, grad_output))
    assert votes.any()


def test_conv_votes_do_not_depend_on_memory_format_or_pieces():
    layer, x = conv_of("all at once")
    grad_output, votes = backward(layer, x.to(memory_format=torch.channels_last))
    assert torch.equal(votes, conv_votes(layer, x, grad_output))

    in_pieces, x = conv_of("all at once")
    in_pieces.UNFOLDED_AT_ONCE = 1  # one image at a time
    grad_output, votes = backward(in_pieces, x)
    assert torch.equal(votes, conv_votes(in_pieces, x, grad_output))


def test_conv_int8_votes_point_along_the_gradient():
    layer = gft.QuantConv2d(6, 9, 3, groups=3)
    x = torch.randn(2, 6, 5, 7).repeat(20, 1, 1, 1) + torch.randn(40, 6, 5, 7)
    grad_output, votes = backward(layer, x, gft.Int8())
    gradient = torch.nn.grad.conv2d_weight(x, layer.float_shape, grad_output, groups=3).view(9, -1)
    assert F.cosine_similarity(votes.float().flatten(), gradient.flatten(), dim=0) > 0.98


@pytest.mark.parametrize("lead", [(4, 5), (2, 3, 4)], ids=["rank 3", "rank 4"])
def test_linear_gives_each_sequence_one_vote(lead):
    layer, x = gft.QuantLinear(20, 11), torch.randn(*lead, 20)
    grad_output, votes = backward(layer, x, gft.Sign(per="sequence"))
    signs = torch.einsum("bto,bti->boi", grad_output.flatten(1, -2), x.flatten(1, -2)).sign().sum(0)
    assert int(votes.abs().max()) <= lead[0]
    assert float((votes == signs).float().mean()) > 0.8  # 8 bits within a sequence: near zero they may differ


def test_conv_gives_each_image_one_vote():
    layer, x = conv_of("plain")
    grad, votes = backward(layer, x, gft.Sign(per="sequence"))
    signs = [torch.nn.grad.conv2d_weight(x[i : i + 1], layer.float_shape, grad[i : i + 1]).sign() for i in range(2)]
    assert float((votes == sum(signs).view(5, -1)).float().mean()) > 0.9


@pytest.mark.parametrize(("layer", "shape"), [(gft.QuantLinear(6, 5), (2, 3, 6)), (gft.QuantConv1d(6, 5, 1), (2, 6, 3))],
                         ids=["linear", "conv"])
def test_what_a_layer_gives_may_be_changed_in_place(layer, shape):
    optimizer = gft.GFT(gft.quantized(layer))
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    y += 1
    F.relu(y, inplace=True).sum().backward()
    assert layer.votes.votes.any()
    assert x.grad.any()
    optimizer.release()


def test_first_layer_votes_although_its_input_needs_no_gradient():
    model = nn.Sequential(gft.QuantLinear(9, 7), nn.ReLU(), gft.QuantLinear(7, 4))
    optimizer = gft.GFT(gft.quantized(model), lr=0.6)
    model(torch.randn(6, 9)).square().sum().backward()
    assert all(layer.votes.votes.any() for layer in (model[0], model[2]))
    optimizer.step()
    assert optimizer.flips() > 0


def test_layer_used_twice_adds_the_votes_of_both_uses():
    layer, x = gft.QuantLinear(8, 8), torch.randn(5, 8)
    optimizer = gft.GFT(gft.quantized(layer), vote=gft.Sign())
    hidden = layer(x).tanh()
    hidden.retain_grad()
    y = layer(hidden)
    grad_output = torch.randn_like(y)
    y.backward(grad_output)
    lower = (hidden.grad * (1 - hidden.detach() ** 2)).tolist()
    expected = torch.tensor(reference.votes(x.tolist(), lower))
    expected += torch.tensor(reference.votes(hidden.tolist(), grad_output.tolist()))
    assert torch.equal(layer.votes.votes.long(), expected)
    optimizer.release()


def test_layer_used_twice_in_one_forward_draws_new_noise_for_each_use():
    """Equal inputs, two uses: what is kept of them for backward differs."""
    layer, x = gft.QuantLinear(40, 6, gain=False), torch.randn(30, 40)
    optimizer = gft.GFT(gft.quantized(layer), vote=gft.Ternary(), seed=4)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is torch.uint8 and tensor.shape == (30, 10):
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = sum(layer(x) for _ in range(3))
    assert len(kept) == 3
    assert len({tuple(one.flatten().tolist()) for one in kept}) == 3
    y.sum().backward()
    assert layer.votes.tokens == 90
    optimizer.release()


def test_an_evaluation_with_gradients_on_changes_nothing_of_the_training():
    def weights_after(looks: int) -> torch.Tensor:
        torch.manual_seed(2)
        layer, x = gft.QuantLinear(12, 9), torch.randn(16, 12)
        optimizer = gft.GFT(gft.quantized(layer), lr=0.6, seed=4)
        for _ in range(2):
            for _ in range(looks):
                layer.eval()(x.clone().requires_grad_())
            layer.train()(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.flips() > 0
        return layer.qweight.clone()

    assert torch.equal(weights_after(0), weights_after(3))


def test_batch_of_one_votes():
    layer, x = gft.QuantLinear(5, 3), torch.randn(1, 5)
    grad_output, votes = backward(layer, x, gft.Int8())
    assert torch.equal(votes.sign(), (grad_output.T @ x).sign().int())


@pytest.mark.parametrize(("layer", "shape"), [(gft.QuantLinear(5, 3, gain=True), (0, 5)),
                                              (gft.QuantConv2d(2, 3, 3), (0, 2, 5, 5))], ids=["linear", "conv"])
def test_batch_of_none_moves_nothing_and_warns_of_nothing(layer, shape):
    optimizer = gft.GFT(gft.quantized(layer), lr=0.9)
    before = layer.qweight.clone()
    x = torch.empty(shape, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x).sum().backward()
    optimizer.step()
    assert x.grad.shape == shape
    assert torch.equal(layer.qweight, before)
    layer(torch.randn(2, *shape[1:])).sum().backward()  # and the layer still works
    optimizer.step()
    assert not torch.equal(layer.qweight, before)


def test_frozen_layer_passes_the_error_down_and_warns_once():
    model = nn.Sequential(nn.Linear(6, 5), gft.QuantLinear(5, 4))
    before = model[1].qweight.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(2, 6)).sum().backward()
    (warning,) = caught
    assert re.search(r"gft\.quantized\(model\).*gft\.GFT.*requires_grad_\(False\)", str(warning.message))
    assert model[0].weight.grad.any()
    assert torch.equal(model[1].qweight, before)

    frozen = nn.Sequential(nn.Linear(6, 5), gft.QuantLinear(5, 4).eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen(torch.randn(2, 6)).sum().backward()


# ---------------------------------------------------------------------------------------------------- what is kept of x


@pytest.mark.parametrize(("kind", "gain", "vote", "bits"), [
    ("linear", False, gft.Sign(), 2), ("linear", True, gft.Ternary(), 2), ("conv", True, gft.Int4(), 4),
    ("linear", True, gft.Int8(), 8), ("conv", False, gft.Int8(), 8), ("conv", False, gft.Sign(), 2),
    ("linear", False, gft.Sign(per="sequence"), 8)], ids=str)
def test_backward_keeps_only_the_quantized_activation(kind, gain, vote, bits):
    if kind == "linear":
        layer, x = gft.QuantLinear(64, 3, gain=gain, bias=True), torch.randn(6, 40, 64)
    else:
        layer, x = gft.QuantConv2d(64, 3, 3, gain=gain, bias=True), torch.randn(6, 64, 5, 8)
    optimizer = gft.GFT(gft.quantized(layer), vote=vote)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)

    others = [tensor for tensor in saved if tensor.data_ptr() != layer.qweight.data_ptr()]
    integers = [tensor for tensor in others if tensor.dtype in (torch.int8, torch.uint8)]
    assert sum(tensor.numel() for tensor in integers) == x.numel() * bits // 8
    floats = sum(tensor.numel() for tensor in others if tensor.is_floating_point())
    assert floats <= 64 + 6  # one mean square a feature, and a few scalars
    optimizer.release()


def test_evaluation_keeps_nothing():
    layer, x = gft.QuantLinear(16, 8), torch.randn(4, 16)
    optimizer = gft.GFT(gft.quantized(layer))
    with torch.no_grad():
        assert layer(x).grad_fn is None
    optimizer.release()


# ---------------------------------------------------------------------------------------------------- copies


def test_deep_copy_casts_no_vote_into_the_original():
    model = nn.Sequential(gft.QuantLinear(6, 5), gft.QuantLinear(5, 4))
    optimizer = gft.GFT(gft.quantized(model), lr=0.7)
    model(torch.randn(3, 6)).sum().backward()
    before = [layer.votes.votes.clone() for layer in model]

    twin = copy.deepcopy(model).eval()
    twin(torch.randn(3, 6, requires_grad=True)).sum().backward()

    assert all(layer.votes is None for layer in twin)
    assert all(torch.equal(layer.votes.votes, votes) for layer, votes in zip(model, before, strict=True))
    optimizer.step()
    assert not torch.equal(twin[0].qweight, model[0].qweight)  # a copy, not a view
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
    assert torch.equal(one.qweight, other.qweight)
    assert torch.equal(one.float_weight(), other.float_weight())
    assert torch.equal(one.bias, other.bias)


@pytest.mark.parametrize(("bits", "width"), [(3, 4), (5, 8)])
def test_packed_levels_of_a_time_before_spare_bits_are_read_as_they_were(bits, width):
    levels = torch.randint(-3, 4, (5, 7))
    old = {"weight": pack_fields(levels, width, 2 ** (bits - 1) - 1), "scale": torch.tensor(0.3),
           "_extra_state": torch.tensor([bits, 0]).byte()}
    layer = gft.QuantLinear(7, 5, bits, memory=False)
    layer.load_state_dict(old)
    assert torch.equal(layer.levels().long(), levels)
    again = gft.QuantLinear(7, 5, bits, memory=False)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.qweight, layer.qweight)
    with pytest.raises(ValueError, match=f"{bits}-bit weights"):
        gft.QuantLinear(7, 5, 4 if bits == 3 else 6, memory=False).load_state_dict(layer.state_dict())


def test_memory_of_either_encoding_is_read_in_the_one_the_rule_wants():
    """A weight saved without inertia, loaded under a rule with it, stays where its votes have carried it; and back."""
    positions = torch.tensor([[0.4, -1.25, 2.5, -3.0, 0.0, 1.75]])
    saved = gft.QuantLinear(6, 1, 3)
    saved.storage = Storage(3, True, inertia=False)
    saved.qweight.copy_(saved.storage.store_nearest(positions))
    for inertia in (0.0, 0.5):
        layer, x = gft.QuantLinear(6, 1, 3), torch.ones(2, 6)
        optimizer = gft.GFT(gft.quantized(layer), lr=0.0, rule=gft.Rounding(inertia=inertia))
        layer(x).sum().backward()
        optimizer.step()  # now the layer is stored as its rule wants it
        layer.load_state_dict(saved.state_dict())
        assert torch.equal(layer.levels(), saved.levels())
        rest = layer.qweight.float() - layer.levels() * layer.storage.unit
        assert torch.allclose(layer.levels() + rest / layer.storage.resolution, positions, atol=0.5 / 8)
        optimizer.release()


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
    assert "bits=2, half a byte" in repr(gft.QuantLinear(4, 5, 2, memory="half"))


@pytest.mark.parametrize(("memory", "bits", "expected"),
                         [(False, 2, 0.25), ("half", 2, 0.5), (False, 3, 0.5), (False, 4, 0.5), (True, 2, 1)])
def test_weight_takes_the_stated_bytes_and_nothing_else_is_stored(memory, bits, expected):
    layer = gft.QuantLinear(64, 32, bits, memory=memory)
    optimizer = gft.GFT(gft.quantized(layer), lr=0.6)
    layer(torch.randn(9, 64)).sum().backward()
    optimizer.step()
    stored = [*layer.parameters(), *layer.buffers()]
    assert sum(t.numel() * t.element_size() for t in stored) == 64 * 32 * expected + 4  # and one float: the scale
    state = [t for t in optimizer.state[layer.qweight].values() if isinstance(t, torch.Tensor)]
    assert sum(t.numel() for t in state) <= 2 * (64 + 32) + 1 + 2  # two running scales a feature, one of all, two counts
    assert layer.qweight.grad is None


def test_a_convolution_refuses_a_dtype_it_would_ignore(refuses):
    with refuses(TypeError, "takes no dtype"):
        gft.QuantConv2d(3, 4, 3, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@both_forms
def test_weight_reads_as_a_float_one_of_the_layers_type(dtype, memory):
    """Foreign code asks a layer's weight for its type (`x.to(layer.weight.dtype)`), shape and device."""
    layer = gft.QuantLinear.from_float(nn.Linear(7, 5), 3, memory=memory, gain=True)
    values, scale = layer.float_weight(), layer.scale.clone()
    assert layer.weight.dtype is torch.float32
    assert gft.QuantLinear.from_float(nn.Linear(7, 5, dtype=dtype)).weight.dtype is dtype
    nn.Sequential(layer).to(dtype)
    assert (layer.weight.dtype, layer.weight.shape, layer.bias.dtype) == (dtype, (5, 7), dtype)
    assert torch.equal(layer.scale, scale)  # a rounded scale would move every weight
    assert torch.allclose(layer.weight.double(), values.double(), rtol=1e-2)
    assert layer.to_float().weight.dtype is dtype
    assert copy.deepcopy(layer).weight.dtype is dtype


def test_a_weight_multiplied_outside_of_its_layer_is_refused_in_training(refuses):
    layer = gft.QuantLinear(6, 4)
    optimizer = gft.GFT(gft.quantized(layer))
    before, x = layer.qweight.clone(), torch.randn(3, 6)
    y = nn.functional.linear(x, layer.weight)
    assert torch.allclose(y, layer(x), atol=1e-6)
    with refuses(ValueError, "outside of the layer.*filter_fn"):
        y.sum().backward()
    optimizer.step()
    assert torch.equal(layer.qweight, before)
    x.requires_grad_()
    nn.functional.linear(x, layer.eval().weight).sum().backward()
    assert torch.allclose(x.grad, layer.float_weight().sum(0).expand(3, 6))


def test_states_of_another_form_are_refused_by_how_they_are_kept(refuses):
    """A 2-bit weight in half a byte and one of 3 or 4 bits have the same shape and type."""
    half, packed = (gft.QuantLinear(6, 4, 2, memory=memory) for memory in ("half", False))
    four = gft.QuantLinear(6, 4, 4, memory=False)
    before = half.qweight.clone()
    for other, words in ((packed, "2-bit weights with memory=False.*memory='half'"), (four, "4-bit weights.*bits=2")):
        with refuses(ValueError, words):
            half.load_state_dict(other.state_dict())
    with refuses(ValueError, "2-bit weights with memory='half'.*bits=4"):
        four.load_state_dict(half.state_dict())
    assert torch.equal(half.qweight, before)
    again = gft.QuantLinear(6, 4, 2, memory="half")
    again.load_state_dict(half.state_dict())
    assert torch.equal(again.levels(), half.levels())
