"""convert.py: quantize_ and dequantize_, what they refuse, and the lines a user types."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import gft
from gft.layers import quantized_layers


def snapshot(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[int]]:
    return copy.deepcopy(model.state_dict()), [id(module) for module in model.modules()]


def assert_unchanged(model: nn.Module, before: tuple[dict[str, torch.Tensor], list[int]]) -> None:
    state, modules = before
    assert [id(module) for module in model.modules()] == modules
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


# ---------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("memory", [False, True], ids=["packed", "memory"])
def test_quantize_and_dequantize_keep_what_the_model_computes(memory):
    model = nn.Sequential(nn.Conv2d(2, 5, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(45, 7))
    x = torch.randn(3, 2, 6, 5)
    bias = model[3].bias

    assert gft.quantize_(model, bits=3, memory=memory) is model
    assert [type(model[i]) for i in (0, 3)] == [gft.QuantConv2d, gft.QuantLinear]
    assert model[3].bias is bias
    y = model(x)
    levels = model[3].levels()

    assert gft.dequantize_(model) is model
    assert [type(model[i]) for i in (0, 3)] == [nn.Conv2d, nn.Linear]
    assert torch.allclose(model(x), y, atol=1e-6)
    assert model[3].weight.unique().numel() <= 7

    # Levels are taken from floats again: the values stay on a grid of 7, in the same order.
    gft.quantize_(model, bits=3, memory=memory)
    assert torch.equal(model[3].levels().sign(), levels.sign())


@pytest.mark.parametrize(("bits", "loss"), [(2, 0.25), (4, 0.03), (8, 0.001)])
def test_quantize_rounds_to_the_grid_nearest_to_the_weights(bits, loss):
    linear = nn.Linear(130, 257)
    nn.init.normal_(linear.weight, std=0.06)
    layer = gft.QuantLinear.from_float(linear, bits)
    weight = linear.weight.detach()
    error = layer.float_weight() - weight
    assert float(error.square().mean() / weight.square().mean()) < loss
    inside = weight.abs() < (2 ** (bits - 1) - 1) * layer.scale
    assert float(error[inside].abs().max()) <= float(layer.scale) / 2 + 1e-6


@pytest.mark.parametrize(("init", "zeros"), [("paper", 0.9), ("variance", 0.14)])
def test_quantize_can_start_anew(init, zeros):
    model = nn.Sequential(nn.Linear(200, 100))
    nn.init.zeros_(model[0].weight)
    gft.quantize_(model, bits=4, init=init)
    assert float((model[0].levels() == 0).float().mean()) == pytest.approx(zeros, abs=0.02)


def test_quantize_chooses_by_filter_and_keeps_training_mode():
    model = nn.ModuleDict({"mlp": nn.Linear(4, 5), "head": nn.Linear(5, 2)}).eval()
    seen = []
    gft.quantize_(model, bits=4, filter_fn=lambda module, name: seen.append((name, type(module))) or name == "mlp")
    assert seen == [("mlp", nn.Linear), ("head", nn.Linear)]
    assert list(quantized_layers(model)) == ["mlp"]
    assert type(model["head"]) is nn.Linear
    assert not model["mlp"].training


def test_quantized_and_dense_share_out_the_parameters():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    gft.quantize_(model, filter_fn=lambda module, name: name == "2")
    model[1].bias.requires_grad_(False)
    integers, floats = gft.quantized(model), gft.dense(model)
    assert [id(p) for p in integers] == [id(model[2].qweight)]
    assert [id(p) for p in floats] == [id(p) for p in (model[0].weight, model[0].bias, model[1].weight, model[2].bias)]


def test_gains_are_those_of_dense_that_are_gains():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    assert gft.gains(model) == []
    gft.quantize_(model, 2, filter_fn=lambda module, name: name != "0")
    assert [id(gain) for gain in gft.gains(model)] == [id(model[1].log_gain), id(model[2].log_gain)]
    assert {id(gain) for gain in gft.gains(model)} < {id(one) for one in gft.dense(model)}
    model[2].requires_grad_(False)  # a frozen layer has nothing to learn
    assert [id(gain) for gain in gft.gains(model)] == [id(model[1].log_gain)]


def test_subclasses_of_linear_are_left_alone():
    class Own(nn.Linear):
        """Whose weight its parent may read without calling it."""

    model = nn.Sequential(Own(8, 8), nn.Linear(8, 4))
    gft.quantize_(model)
    assert list(quantized_layers(model)) == ["1"]
    attention = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 4))
    gft.quantize_(attention, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    assert list(quantized_layers(attention)) == ["1"]  # not the attention's out_proj, which is never called


@pytest.mark.parametrize("memory", [False, True], ids=["packed", "memory"])
def test_quantize_takes_a_model_in_channels_last(memory):
    def build() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Conv2d(3, 5, (3, 2), padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3))

    x = torch.randn(2, 3, 6, 7)
    plain = gft.quantize_(build(), bits=3, memory=memory)
    last = gft.quantize_(build().to(memory_format=torch.channels_last), bits=3, memory=memory)
    assert torch.equal(last[0].levels(), plain[0].levels())
    assert torch.equal(last[2].qweight, plain[2].qweight)
    assert torch.allclose(last(x.to(memory_format=torch.channels_last)), plain(x), atol=1e-5)
    optimizer = gft.GFT(gft.quantized(last), lr=0.7)
    last(x.to(memory_format=torch.channels_last)).square().sum().backward()
    optimizer.step()
    assert optimizer.flips() > 0


@pytest.mark.parametrize("inertia", [None, 0.0, 0.6])
def test_a_start_between_levels_stays_where_it_is_in_the_encoding_of_the_rule(inertia):
    """0.4 levels are 0.4 levels, with inertia or without, also after the optimizer has prepared the weight."""
    linear = nn.Linear(64, 48, bias=False)
    layer = gft.QuantLinear.from_float(linear, bits=3)

    def positions() -> torch.Tensor:
        rest = layer.qweight.float() - layer.levels() * layer.storage.unit
        return layer.levels() + rest / layer.storage.resolution

    wanted = (linear.weight.detach() / layer.scale).clamp(-3, 3)
    assert (positions() - wanted).abs().max() <= 0.5 / 16 + 1e-4
    optimizer = gft.GFT(gft.quantized(layer), lr=0.0, rule=gft.Rounding(inertia=inertia))
    layer(torch.randn(3, 64)).sum().backward()
    optimizer.step()
    assert layer.storage.inertia == (inertia != 0)
    assert (positions() - wanted).abs().max() <= 0.5 / 16 + 1e-4
    assert (layer.levels() - wanted).abs().max() <= 0.5 + 0.5 / 16 + 1e-4  # the nearest level, up to a tie
    assert (wanted - wanted.round()).abs().max() > 0.4  # there was something to lose


# ---------------------------------------------------------------------------------------------------- what is refused


def test_quantize_refuses_a_filter_that_chooses_nothing(refuses):
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(8)])
    before = snapshot(model)
    with refuses(ValueError, r"chose none of .*0, 1, 2, 3, 4, 5, ….*widen"):
        gft.quantize_(model, filter_fn=lambda module, name: False)
    assert_unchanged(model, before)
    with refuses(ValueError, "no float linear layer"):
        gft.quantize_(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize("chosen", [None, "a", "b"])
def test_quantize_refuses_a_module_under_two_names(chosen, refuses):
    one = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": one, "b": one, "c": nn.Linear(4, 4)})
    before = snapshot(model)
    with refuses(ValueError, r"a\.weight and b\.weight are one shared weight"):
        gft.quantize_(model, filter_fn=chosen and (lambda module, name: name == chosen))
    assert_unchanged(model, before)
    gft.quantize_(model, filter_fn=lambda module, name: name == "c")
    assert type(model["c"]) is gft.QuantLinear


def test_quantize_refuses_a_weight_tied_to_an_embedding(refuses):
    model = nn.ModuleDict({"embed": nn.Embedding(11, 6), "mlp": nn.Linear(6, 6), "head": nn.Linear(6, 11, bias=False)})
    model["head"].weight = model["embed"].weight
    before = snapshot(model)
    with refuses(ValueError, r"embed\.weight and head\.weight are one shared weight; pass skip_tied=True.*filter_fn"):
        gft.quantize_(model)
    assert_unchanged(model, before)
    gft.quantize_(copy.deepcopy(model), filter_fn=lambda module, name: name != "head")
    gft.quantize_(model, skip_tied=True)
    assert model["head"].weight is model["embed"].weight
    assert list(quantized_layers(model)) == ["mlp"]
    with refuses(ValueError, "no layer to quantize"):
        gft.quantize_(nn.ModuleDict({"embed": model["embed"], "head": model["head"]}), skip_tied=True)


def test_quantize_refuses_a_model_that_is_one_layer(refuses):
    for model, name in ((nn.Linear(3, 4), "QuantLinear"), (nn.Conv2d(3, 4, 3), "QuantConv2d")):
        before = snapshot(model)
        with refuses(ValueError, rf"gft\.{name}\.from_float\(layer, bits=3\)"):
            gft.quantize_(model, bits=3)
        assert_unchanged(model, before)


@pytest.mark.parametrize(("settings", "kind", "match"), [
    ({"bits": 1}, ValueError, "bits=1"), ({"bits": 9}, ValueError, "bits=9"), ({"bits": True}, TypeError, "bits=True"),
    ({"bits": 2.0}, TypeError, "bits=2.0"), ({"init": "zeros"}, ValueError, "init='zeros'")], ids=str)
def test_quantize_refuses_bad_settings(settings, kind, match, refuses):
    model = nn.Sequential(nn.Linear(3, 4))
    before = snapshot(model)
    with refuses(kind, match):
        gft.quantize_(model, **settings)
    assert_unchanged(model, before)


def test_quantize_changes_nothing_if_a_later_layer_cannot_be(refuses):
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(1, 2, 3))
    nn.init.constant_(model[1].weight, float("inf"))
    before = snapshot(model)
    with refuses(ValueError, "NaN or inf"):
        gft.quantize_(model)
    assert_unchanged(model, before)


def test_quantized_and_dequantize_refuse_a_float_model(refuses):
    model = nn.Sequential(nn.Linear(3, 4))
    with refuses(ValueError, r"gft\.quantize_"):
        gft.quantized(model)
    with refuses(ValueError, "no quantized layer"):
        gft.dequantize_(model)
    with refuses(ValueError, r"to_float\(\)"):
        gft.dequantize_(gft.QuantLinear(3, 4))


def test_quantized_chooses_layers_by_name(refuses):
    model = gft.quantize_(nn.ModuleDict({"attention": nn.Linear(4, 6), "mlp": nn.Linear(6, 2)}))
    assert gft.quantized(model, lambda module, name: name == "mlp") == [model["mlp"].qweight]
    assert gft.quantized(model, lambda module, name: module.in_features == 4) == [model["attention"].qweight]
    with refuses(ValueError, r"none of the model's quantized layers \(attention, mlp\); widen it"):
        gft.quantized(model, lambda module, name: "conv" in name)


# ---------------------------------------------------------------------------------------------------- whole models


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_transformer_encoder_trains_and_evaluates():
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, activation="gelu", batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 3))

    model = gft.quantize_(build(), bits=4, filter_fn=lambda module, name: name.endswith(("linear1", "linear2")))
    assert len(quantized_layers(model)) == 4
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.2), torch.optim.AdamW(gft.dense(model), lr=2e-3))
    x, y = torch.randn(12, 5, 16), torch.randint(0, 3, (12, 5))
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert optimizer.optimizers[0].flips() > 0

    # At inference torch would hand the layers' float weights to a fused kernel; they have none.
    model.eval()
    plain = gft.dequantize_(copy.deepcopy(model))
    padding = torch.arange(5).expand(12, 5) >= 4
    for mask in (None, padding):
        with torch.no_grad():
            quick = model[0](x, src_key_padding_mask=mask)
        slow = plain[0](x.clone().requires_grad_(), src_key_padding_mask=mask)
        assert torch.allclose(quick[:, :4], slow[:, :4], atol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class GPT(nn.Module):
    """As much of one as the lines below need: it predicts the next of 16 tokens from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens))).flatten(0, -2)


def test_the_lines_a_user_types_reduce_the_loss():
    steps = 60
    tokens = torch.randint(0, 16, (steps, 8, 6))
    loader = [(x, (x * 5 + 3).flatten() % 16) for x in tokens]
    losses = []

    model = GPT()
    gft.quantize_(model, bits=4, filter_fn=lambda m, name: ".mlp." in name)
    optimizer = gft.Hybrid(
        gft.GFT(gft.quantized(model), lr=0.3, seed=0),
        torch.optim.AdamW(gft.dense(model), lr=6e-4, weight_decay=0.1),
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        losses.append(float(loss.detach()))

    assert len(quantized_layers(model)) == 4
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0, 0], abs=1e-9)


def test_hooks_of_a_layer_stay_with_it():
    model, seen = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), []
    handle = model[0].register_forward_hook(lambda module, inputs, y: seen.append(type(module)))
    model[2].register_full_backward_hook(lambda module, grad_input, grad_output: seen.append("backward"))
    gft.quantize_(model)
    optimizer = gft.GFT(gft.quantized(model))
    model(torch.randn(3, 6)).sum().backward()
    assert seen == [gft.QuantLinear, "backward"]
    handle.remove()
    optimizer.zero_grad()


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm,
                                  lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
                                  nn.utils.parametrizations.weight_norm],
                         ids=["weight", "spectral", "prune", "parametrized"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_weight_that_is_computed_before_each_pass_stays_float_and_is_named(norm):
    model = nn.Sequential(norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    gft.quantize_(model)
    assert list(quantized_layers(model)) == ["1"]
    assert "computed anew" in str(gft.summary(model)) or "Parametrized" in str(gft.summary(model))


def test_what_cannot_be_quantized_any_more_is_said_as_it_is(refuses):
    model = gft.quantize_(nn.Sequential(nn.Linear(8, 8)))
    with refuses(ValueError, r"integers already\).*gft\.summary\(model\)"):
        gft.quantize_(model)


def test_a_hybrid_gives_its_weights_free():
    model = gft.quantize_(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    gft.Hybrid(gft.GFT(gft.quantized(model)), torch.optim.AdamW(gft.dense(model))).release()
    gft.GFT(gft.quantized(gft.pack_(model)))
