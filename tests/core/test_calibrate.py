"""GPTQ: a rounding that changes a layer's outputs less than the nearest one does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gft
from gft.calibrate import rounded_for_outputs, rows_of
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


# ------------------------------------------------------------------------------------------------ how batches come


def levels_by(init: gft.GPTQ) -> torch.Tensor:
    torch.manual_seed(5)
    return gft.quantize_(nn.Sequential(nn.Linear(6, 4)), 3, init=init)[0].levels()


def test_pairs_of_a_loader_and_dicts_by_forward_round_as_inputs_alone():
    x = correlated(64, 6)
    loader = DataLoader(TensorDataset(x, torch.zeros(64, dtype=torch.int64)), batch_size=16)
    expected = levels_by(gft.GPTQ([x]))
    assert not torch.equal(expected, levels_by(gft.GPTQ([correlated(64, 6).flip(1)])))
    assert torch.equal(levels_by(gft.GPTQ(loader)), expected)
    named = [{"image": part, "label": 3} for part in x.chunk(4)]
    assert torch.equal(levels_by(gft.GPTQ(named, forward=lambda model, batch: model(batch["image"]))), expected)


def test_a_batch_that_the_model_does_not_take_is_refused_with_the_way_to_say_how(refuses):
    model = nn.Sequential(nn.Linear(6, 4))
    with refuses(ValueError, r"cannot call Sequential.*'input'.*forward=lambda model, batch: model\("):
        gft.quantize_(model, init=gft.GPTQ([{"image": torch.randn(2, 6)}]))
    with refuses(TypeError, "forward is a function of the model and a batch, not a str"):
        gft.GPTQ([], forward="image")  # type: ignore[arg-type]
    assert type(model[0]) is nn.Linear
    assert not model[0]._forward_pre_hooks


# ------------------------------------------------------------------------------------------------ whose inputs are seen


@pytest.mark.parametrize(("conv", "shape"), [
    (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (3, 4, 11)),
    (nn.Conv2d(4, 6, (3, 2), padding="same", padding_mode="reflect"), (3, 4, 7, 5)),
    (nn.Conv3d(2, 4, (1, 2, 3), stride=(2, 1, 1), padding=(0, 1, 1)), (2, 2, 5, 4, 6)),
], ids=["1d", "2d", "3d"])
def test_a_convolution_is_the_product_of_its_weight_with_the_rows_it_is_said_to_see(conv, shape):
    x = torch.randn(shape)
    weight = conv.weight.flatten(1).unflatten(0, (conv.groups, -1))
    y = (rows_of(conv, x) @ weight.transpose(1, 2)).transpose(1, 2).flatten(0, 1) + conv.bias[:, None]
    assert torch.allclose(y, conv(x).transpose(0, 1).flatten(1), atol=1e-5)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(24, 4, dropout=0.3)

    def forward(self, x, context):
        return self.attend(x, key=context, value=context, need_weights=False)[0]


def test_attention_loses_less_of_its_outputs_too(caplog):
    torch.manual_seed(2)
    model = Attends()
    x, context = correlated(360, 24).view(6, 60, 24), correlated(600, 24).flip(0).view(10, 60, 24)
    expected, lost = model.eval()(x, context).detach(), {}
    model.train()
    for init in ("fit", gft.GPTQ([(x[:, :30], context[:, :30])])):
        one = gft.quantize_(copy.deepcopy(model), 3, init=init, scales="row", gain=False)
        assert one.attend.q_proj.training
        error = (one.eval()(x, context) - expected)[:, 30:]
        lost[str(init)[:4]] = float(error.detach().square().mean())
    assert lost["GPTQ"] < 0.7 * lost["fit"]
    assert "saw no inputs" not in caplog.text


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_torchs_encoder_is_seen_through_with_a_mask():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    mask = torch.tensor([[False, False, True], [False, False, False]])
    x, plain = torch.randn(2, 3, 8), copy.deepcopy(encoder)
    gft.quantize_(encoder, 3, init=gft.GPTQ([{"src": x, "src_key_padding_mask": mask}]))
    gft.quantize_(plain, 3, init="fit")
    pairs = zip(quantized_layers(encoder).values(), quantized_layers(plain).values(), strict=True)
    assert all(not torch.equal(one.levels(), other.levels()) for one, other in pairs)


def test_layers_that_start_otherwise_are_named_in_the_log(caplog):
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.up, self.idle = nn.Linear(4, 8), nn.ConvTranspose1d(8, 2, 3), nn.Linear(4, 4)

        def forward(self, x):
            return self.up(F.relu(self.first(input=x))[..., None])

    gft.quantize_(Generator(), init=gft.GPTQ([torch.randn(5, 4)]))
    (record,) = (record for record in caplog.records if "GPTQ" in record.message)
    assert record.message == 'GPTQ saw no inputs of 2 of 3 layers, which start by init="fit": up, idle'
