"""layers/convolution.py: convolutions of every kind against torch's own, forward, grad_input and votes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gft
from gft import ops
from gft.layers import QuantConvolution
from gft.product import kept_as, output_shape

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # torch's own

# name -> (layer, its arguments, input), none of them square or alike
CASES = {
    "1d": (gft.QuantConv1d, {"out_channels": 6, "kernel_size": 4, "stride": 3, "padding": 2, "groups": 2}, (3, 4, 17)),
    "1d same, even": (gft.QuantConv1d, {"out_channels": 5, "kernel_size": 4, "padding": "same", "dilation": 3}, (2, 3, 14)),
    "1d unbatched": (gft.QuantConv1d, {"out_channels": 5, "kernel_size": 3}, (3, 9)),
    "2d": (gft.QuantConv2d, {"out_channels": 6, "kernel_size": (3, 5), "stride": (1, 2), "padding": (1, 3),
                             "dilation": (2, 1), "groups": 2}, (3, 4, 10, 9)),
    "2d same, even": (gft.QuantConv2d, {"out_channels": 5, "kernel_size": (2, 3), "padding": "same"}, (2, 3, 6, 5)),
    "2d valid": (gft.QuantConv2d, {"out_channels": 5, "kernel_size": 2, "padding": "valid"}, (2, 3, 6, 5)),
    "2d reflect": (gft.QuantConv2d, {"out_channels": 5, "kernel_size": 3, "padding": (2, 1), "padding_mode": "reflect"},
                   (2, 3, 6, 5)),
    "2d circular": (gft.QuantConv2d, {"out_channels": 5, "kernel_size": (4, 3), "padding": "same",
                                      "padding_mode": "circular"}, (2, 3, 6, 5)),
    "3d": (gft.QuantConv3d, {"out_channels": 4, "kernel_size": (2, 3, 1), "stride": (1, 2, 1), "padding": (1, 0, 2),
                             "dilation": (2, 1, 1), "groups": 2}, (2, 6, 5, 6, 4)),
    "1d depthwise": (gft.QuantConv1d, {"out_channels": 18, "kernel_size": 4, "padding": 3, "groups": 9}, (3, 9, 11)),
    "2d transposed, depthwise": (gft.QuantConvTranspose2d, {"out_channels": 16, "kernel_size": (2, 3), "stride": 2,
                                                            "groups": 8}, (2, 16, 3, 4)),
    "1d transposed": (gft.QuantConvTranspose1d, {"out_channels": 6, "kernel_size": 4, "stride": 3, "padding": 1,
                                                 "output_padding": 2}, (2, 5, 7)),
    "2d transposed": (gft.QuantConvTranspose2d, {"out_channels": 5, "kernel_size": 2, "stride": 2}, (2, 7, 3, 4)),
    "2d transposed, all": (gft.QuantConvTranspose2d, {"out_channels": 6, "kernel_size": (3, 2), "stride": (2, 3),
                                                      "padding": (2, 1), "dilation": (1, 4), "output_padding": (1, 3),
                                                      "groups": 2},
                           (3, 4, 5, 6)),
    "2d transposed, padded": (gft.QuantConvTranspose2d, {"out_channels": 3, "kernel_size": 1, "padding": 1}, (2, 4, 5, 6)),
    "2d transposed, unbatched": (gft.QuantConvTranspose2d, {"out_channels": 3, "kernel_size": 3}, (4, 3, 2)),
    "3d transposed": (gft.QuantConvTranspose3d, {"out_channels": 4, "kernel_size": (2, 1, 3), "stride": 2, "groups": 2,
                                                 "padding": (1, 0, 1), "output_padding": (1, 0, 1)}, (2, 6, 3, 2, 4)),
}
cases = pytest.mark.parametrize("case", CASES)


def layer_of(case: str, **rest) -> tuple[QuantConvolution, torch.Tensor]:
    kind, arguments, shape = CASES[case]
    layer = kind(shape[-kind.dims - 1], **arguments, **{"bits": 3, "bias": True, **rest})
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return layer, torch.randn(shape)


class Seen:
    """What the layers' quantizer has been given and has returned, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.q: list[torch.Tensor] = []
        quantize, both = ops.quantize, ops.read_and_quantize
        monkeypatch.setattr(ops, "quantize", lambda *args: self._keep(None, quantize(*args))[1])
        monkeypatch.setattr(ops, "read_and_quantize", lambda *args: self._keep(*both(*args)))

    def _keep(self, weight: torch.Tensor | None, quantized: ops.Quantized) -> tuple[torch.Tensor | None, ops.Quantized]:
        self.q.append(quantized.q.clone())
        return weight, quantized


def channels_second(q: torch.Tensor, like: torch.Tensor, dims: int) -> torch.Tensor:
    """(n, channels) integers of the quantizer -> float64 in the shape of what was quantized."""
    sizes = like.movedim(-dims - 1, -1).shape
    return q.view(sizes).movedim(-1, -dims - 1).double()


# ---------------------------------------------------------------------------------------------------- forward and backward


@cases
def test_a_convolution_is_the_float_layer_it_stands_for(case):
    layer, x = layer_of(case, memory=len(case) % 2 == 0)
    plain = layer.to_float()
    assert type(plain) is layer.float_type
    assert torch.equal(plain.weight, layer.levels() * layer.scale)
    x_plain, x = x.clone().requires_grad_(), x.requires_grad_()
    wanted = plain(x_plain)
    grad_output = torch.randn_like(wanted)
    wanted.backward(grad_output)
    optimizer = gft.GFT(gft.quantized(layer))
    y = layer(x)
    y.backward(grad_output)
    assert torch.allclose(y, wanted, atol=1e-5)
    assert torch.allclose(x.grad, x_plain.grad, atol=1e-5)
    assert torch.allclose(layer.bias.grad, plain.bias.grad, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(layer(x), wanted, atol=1e-5)
    optimizer.release()

    again = type(layer).from_float(plain, bits=3)
    assert torch.allclose(again(x), plain(x), atol=0.3 * float(wanted.detach().std()))
    assert again.bias is plain.bias


@cases
@pytest.mark.parametrize("vote", [gft.Int8(), gft.Sign()], ids=["int8", "sign"])
def test_votes_are_the_weight_gradient_of_the_quantized_integers(case, vote, monkeypatch):
    """dL/dW of torch's own layer, with x and grad_output replaced by their integers, is the votes, exactly."""
    layer, x = layer_of(case)
    optimizer = gft.GFT(gft.quantized(layer), vote=vote, seed=3, lr=1.0)
    y = layer(x)
    seen = Seen(monkeypatch)
    layer(x).backward(torch.randn_like(y))
    q_x, q_grad = seen.q
    # Padding that the product does not do itself is done before x is quantized; so here.
    plain = copy.deepcopy(layer).to_float().double()
    padded = x
    if getattr(layer, "_put_around", ()):
        padded = F.pad(x, layer._put_around, "constant" if layer.padding_mode == "zeros" else layer.padding_mode)
        plain.padding, plain.padding_mode = (0,) * layer.dims, "zeros"
    plain(channels_second(q_x, padded, layer.dims)).backward(channels_second(q_grad, y, layer.dims))
    votes = layer.votes.votes
    assert torch.equal(votes.double(), plain.weight.grad.view(layer.rows, layer.columns))
    assert votes.any()
    assert int(votes.abs().max()) <= layer.votes.bound
    optimizer.step()
    assert optimizer.flips() > 0


@pytest.mark.parametrize("case", ["1d", "3d", "2d transposed, all", "1d depthwise"])
def test_votes_do_not_depend_on_how_many_images_are_unfolded_at_once(case):
    def votes_of(at_once: int) -> torch.Tensor:
        torch.manual_seed(1)
        layer, x = layer_of(case)
        layer.UNFOLDED_AT_ONCE = at_once
        optimizer = gft.GFT(gft.quantized(layer))
        layer(x).square().sum().backward()
        votes = layer.votes.votes
        optimizer.release()
        return votes

    assert torch.equal(votes_of(1), votes_of(1 << 25))


LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES if len(CASES[case][2]) in LAST])
def test_channels_last_gives_the_same(case, gain):
    """The weight is then read out in that order, too."""
    layer, x = layer_of(case, gain=gain)
    last, found = LAST[x.dim()], []
    optimizer = gft.GFT(gft.quantized(layer), vote=gft.Sign(literal_mask=gain))
    for memory_format in (torch.contiguous_format, last):
        here = x.clone(memory_format=memory_format).requires_grad_()
        y = layer(here)
        grad_output = torch.linspace(-1, 1, y.numel()).view(y.shape).contiguous(memory_format=memory_format)
        y.backward(grad_output)
        found.append((y.detach(), here.grad, layer.votes.votes))
        layer.votes.discard()
    optimizer.release()
    (y, grad, votes), (y_last, grad_last, votes_last) = found
    assert torch.allclose(y_last, y, atol=1e-5)
    assert torch.allclose(grad_last, grad, atol=1e-5)
    assert torch.equal(votes_last, votes)
    assert votes.any()
    weight = layer.shaped(ops.float_levels(*layer.to_read(layer.qweight, None, grad_output)), grad_output)
    assert weight.is_contiguous(memory_format=last)
    assert torch.equal(weight, layer.float_weight())


def test_channels_last_needs_no_copy_to_be_quantized():
    layer = gft.QuantConv2d(3, 6, 3)
    x = torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last)
    assert layer.features_last(x, 3).data_ptr() == x.data_ptr()
    assert layer.features_last(x, 3).is_contiguous()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_compiled_graph_knows_how_grad_input_lies(memory_format):
    layer = gft.QuantConv2d(3, 6, 3)
    x, grad_output = torch.randn(2, 3, 6, 5), torch.randn(2, 6, 4, 3).contiguous(memory_format=memory_format)
    optimizer = gft.GFT(gft.quantized(layer))
    _, kept, square = torch.ops.gft.product(x, layer.qweight, None, layer._handle, layer.geometry, "Int8")
    arguments = grad_output, layer.qweight, kept, square, None, layer._handle, list(x.shape), True
    torch.library.opcheck(torch.ops.gft.product_backward, arguments, test_utils=("test_schema", "test_faketensor"))
    grad_input = torch.ops.gft.product_backward(*arguments)[0]
    assert grad_input.is_contiguous(memory_format=memory_format)
    optimizer.release()


@pytest.mark.parametrize("vote", [gft.Int8(), gft.Sign(literal_mask=True)], ids=["int8", "masked"])
def test_many_groups_vote_together_as_they_do_one_by_one(vote):
    found = []
    for together in (1, 1000):
        torch.manual_seed(1)
        layer, x = layer_of("1d depthwise", gain=True)
        layer.GROUPS_TOGETHER = together
        x = torch.randn(150, *x.shape[1:])  # more positions than one float32 sum may hold
        optimizer = gft.GFT(gft.quantized(layer), vote=vote)
        layer(x).square().sum().backward()
        found.append((layer.votes.votes, layer.log_gain.grad))
        optimizer.release()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1])


@pytest.mark.parametrize("case", ["1d", "3d", "2d transposed, all", "1d depthwise"])
def test_each_image_has_one_vote(case):
    layer, x = layer_of(case)
    optimizer = gft.GFT(gft.quantized(layer), vote=gft.Sign(per="sequence"))
    y = layer(x)
    grad_output = torch.randn_like(y)
    y.backward(grad_output)
    assert layer.votes.samples == len(x)
    plain, signs = layer.to_float(), torch.zeros(layer.float_shape)
    for image, grad in zip(x, grad_output, strict=True):
        plain.weight.grad = None
        plain(image[None]).backward(grad[None])
        signs += plain.weight.grad.sign()
    assert float((layer.votes.votes == signs.view(layer.rows, -1)).float().mean()) > 0.9  # 8 bits: near zero they may differ
    optimizer.release()


@pytest.mark.parametrize("case", ["1d", "1d depthwise", "2d transposed", "2d transposed, all", "2d transposed, depthwise",
                                  "3d transposed"])
def test_the_gain_learns_by_the_votes(case):
    """Its gradient is that of a float layer's own scale, up to the noise of rounding."""
    layer, _ = layer_of(case, gain=True)
    x = torch.randn(200, *CASES[case][2][1:])
    optimizer = gft.GFT(gft.quantized(layer))
    target = layer(x).detach() * 0.5
    (layer(x) - target).square().sum().backward()
    found = layer.log_gain.grad.clone()
    optimizer.release()
    layer.log_gain.grad = None
    gain = torch.ones((), requires_grad=True)
    plain = layer.to_float()
    parameters = {"weight": plain.weight.detach() * gain, "bias": plain.bias.detach()}
    (torch.func.functional_call(plain, parameters, x) - target).square().sum().backward()
    wanted = gain.grad * layer.columns**0.5 / (layer.columns * layer.rows**0.5)
    assert float(found) == pytest.approx(float(wanted), rel=0.05)


@cases
def test_a_compiled_graph_knows_the_shapes(case):
    layer, x = layer_of(case)
    around = getattr(layer, "_put_around", ())
    padded = F.pad(x, around) if around else x
    y = layer(x)
    assert output_shape(padded.to("meta"), layer.geometry).shape == y.shape
    optimizer = gft.GFT(gft.quantized(layer))
    arguments = (padded, layer.qweight, None, layer._handle, layer.geometry,
                 kept_as(layer, padded.shape))
    torch.library.opcheck(torch.ops.gft.product, arguments, test_utils=("test_schema", "test_faketensor"))
    optimizer.release()


def test_one_graph_holds_convolutions_of_all_kinds():
    weights = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(gft.QuantConv1d(3, 6, 3, padding="same", padding_mode="reflect"), nn.ReLU(),
                              nn.Unflatten(1, (3, 2)), gft.QuantConv2d(3, 4, 2, padding="same"),
                              gft.QuantConvTranspose2d(4, 3, 3, stride=2, output_padding=1, bias=True))
        optimizer = gft.GFT(gft.quantized(model), lr=0.5, seed=2)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for number in range(2):
            x = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad(); run(x).square().sum().backward(); optimizer.step()
        assert optimizer.flips() > 0
        weights.append([weight.clone() for weight in gft.quantized(model)])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


# ---------------------------------------------------------------------------------------------------- starts and training


def test_a_new_transposed_convolution_passes_variance_on():
    x = torch.randn(4, 64, 20, 20)
    for arguments in ({"kernel_size": 2, "stride": 2}, {"kernel_size": 4, "stride": 2, "padding": 1}, {"kernel_size": 3}):
        layer = gft.QuantConvTranspose2d(64, 16, **arguments)
        inside = layer(x)[:, :, 4:-4, 4:-4]
        assert float(inside.detach().std()) == pytest.approx(1.0, abs=0.2)


def test_a_transposed_convolution_refuses_an_output_size(refuses):
    with refuses(ValueError, "takes no output_size; build the layer with the output_padding"):
        gft.QuantConvTranspose2d(3, 4, 2)(torch.randn(1, 3, 5, 5), output_size=(6, 6))


@pytest.mark.parametrize("case", ["2d reflect", "2d transposed, all"])
def test_state_and_optimizer_state_round_trip(case):
    layer, x = layer_of(case, gain=True)
    optimizer = gft.GFT(gft.quantized(layer), lr=0.5)
    layer(x).square().sum().backward()
    optimizer.step()
    other, _ = layer_of(case, gain=True)
    other.load_state_dict(layer.state_dict())
    resumed = gft.GFT(gft.quantized(other), lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((layer, optimizer), (other, resumed)):
        one(x).square().sum().backward()
        its.step()
    assert torch.equal(layer.qweight, other.qweight)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))


def test_an_autoencoder_of_all_kinds_learns():
    """Down by convolutions, up by transposed ones; the loss falls as far as with float weights and AdamW, nearly."""
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 12, 4, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
                             nn.Conv2d(12, 16, 3, padding="same", padding_mode="replicate"), nn.BatchNorm2d(16), nn.ReLU(),
                             nn.ConvTranspose2d(16, 12, 4, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
                             nn.Conv2d(12, 1, 1))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        generator = torch.Generator().manual_seed(5)
        for _ in range(60):
            corners = torch.rand(24, 1, 4, 4, generator=generator)
            x = F.interpolate(corners, (8, 8), mode="bilinear")
            loss = F.mse_loss(model(x), x)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        return float(loss.detach())

    plain = build()
    baseline = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    model = gft.quantize_(build(), bits=4, filter_fn=lambda _, name: name != "9")
    assert [type(model[at]) for at in (0, 3, 6)] == [gft.QuantConv2d, gft.QuantConv2d, gft.QuantConvTranspose2d]
    loss = train(model, gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.1),
                                   torch.optim.AdamW(gft.dense(model), lr=1e-2)))
    assert loss < 1.5 * baseline


def test_the_state_of_a_transposed_convolution_has_room_for_what_it_will_hold():
    layer = gft.QuantConvTranspose2d(3, 5, 2)
    optimizer = gft.GFT(gft.quantized(layer))
    before = {key: value.shape for key, value in optimizer.state_dict()["state"][0].items() if key.endswith("rms")}
    layer(torch.randn(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    after = {key: value.shape for key, value in optimizer.state_dict()["state"][0].items() if key.endswith("rms")}
    assert before == after == {"x_rms": (3,), "grad_rms": (5,)}
