"""What users do to layers with integer weights that they would do to float ones: it works, or one sentence says why not."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import gft


class Outside(nn.Module):
    """As Mamba does: a block reads a layer's weight and multiplies by it."""

    def __init__(self):
        super().__init__()
        self.proj, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(F.linear(x, self.proj.weight))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def test_a_weight_multiplied_outside_is_named_with_a_line_that_mends_it(refuses):
    plain = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Outside(), Outside()), Outside())
    model = copy.deepcopy(gft.quantize_(copy.deepcopy(plain)))  # a copy knows its names, too
    model[2] = nn.Identity()
    optimizer = gft.GFT(gft.quantized(model))
    message = ""
    with refuses(ValueError, r"^the weight of 1\.1\.proj \(QuantLinear\) was multiplied outside of the layer"):
        try:
            model(torch.randn(3, 6)).sum().backward()
        except ValueError as error:
            message = str(error)
            raise
    mend = re.search(r"gft\.quantize_\(.*\)", message)
    assert mend
    model = eval(mend.group(), {"gft": gft, "model": plain})  # the line that the sentence says, as it stands there
    optimizer = gft.GFT(gft.quantized(model), lr=1.0)
    before = model[1][0].out.qweight.clone()
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1][0].out.qweight, before)
    assert {type(module) for name, module in model.named_modules() if name.endswith("proj")} == {nn.Linear}


# -------------------------------------------------------------------------------------------- what quantize_ is given


@pytest.mark.parametrize(("kind", "sizes"), [(nn.Linear, (6, 0)), (nn.Linear, (0, 6)), (nn.Conv2d, (3, 0, 3))], ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_an_empty_layer_stays_float_and_is_named(kind, sizes, refuses):
    model = nn.ModuleList([nn.Linear(6, 5), kind(*sizes)])
    gft.quantize_(model, bits=2)
    assert type(model[1]) is kind
    (left,) = (one for one in gft.summary(model).floats if one.name == kind.__name__)
    assert left.why == "its weight is empty"
    with refuses(ValueError, r"shape \(4, 0\) is empty"):
        gft.QuantLinear(0, 4)


@pytest.mark.parametrize("given", [["2"], "2", ("0", "2")], ids=str)
def test_names_in_place_of_a_function_are_refused_with_the_function(given, refuses):
    model = mlp()
    message = ""
    with refuses(TypeError, "^filter_fn is a function of a layer and its name, not a "):
        try:
            gft.quantize_(model, filter_fn=given)
        except TypeError as error:
            message = str(error)
            raise
    assert type(model[0]) is nn.Linear
    gft.quantize_(model, filter_fn=eval(message.split("filter_fn=")[1]))
    assert [name for name, module in model.named_modules() if isinstance(module, gft.QuantLinear)] == list(given)
    with refuses(TypeError, "function of a layer"):
        gft.quantized(model, given)


@pytest.mark.parametrize("given", [[nn.Linear(3, 3)], nn.Linear(3, 3).parameters(), nn.Sequential],
                         ids=["list", "generator", "class"])
def test_what_is_no_model_is_refused(given, refuses):
    for function in (gft.quantize_, gft.dequantize_, gft.quantized, gft.summary):
        with refuses(TypeError, "^gft takes a model, an nn.Module, not (a list|a generator|the class Sequential)"):
            function(given)


def test_a_model_without_a_layer_to_quantize_says_why_of_its_largest_part(refuses):
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.LayerNorm(4), Own(4, 30), nn.Linear(4, 4, dtype=torch.complex64))
    with refuses(ValueError, r"largest part, 1, Own: a subclass of Linear"):
        gft.quantize_(model)
    gft.quantize_(model.append(nn.Linear(30, 4)))
    why = {kind.name: kind.why for kind in gft.summary(model).floats}
    assert why["Linear"] == "its weight is complex64, not float"


def test_an_optimizer_that_needs_several_losses_a_step_is_refused(refuses):
    model = gft.quantize_(mlp())
    with refuses(ValueError, "^LBFGS computes the loss several times in a step.*AdamW"):
        gft.Hybrid(gft.GFT(gft.quantized(model)), torch.optim.LBFGS(gft.dense(model)))


# -------------------------------------------------------------------------------------------- float weights set from outside


@pytest.mark.parametrize("replace", [
    lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    lambda layer: prune.l1_unstructured(layer, "qweight", 0.5),
    lambda layer: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=0.5),
    lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(8, 6))),
    lambda layer: setattr(layer, "weight", torch.zeros(8, 6)),
], ids=["prune", "prune qweight", "prune globally", "a parameter", "a tensor"])
def test_a_float_weight_in_the_place_of_integers_is_refused(replace, refuses):
    model = gft.quantize_(mlp())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with refuses(ValueError, "^the weight of 0 is integers.*before gft.quantize_"):
        replace(model[0])
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(("normalise", "kind"), [(nn.utils.weight_norm, KeyError), (nn.utils.spectral_norm, KeyError),
                                                 (nn.utils.parametrizations.weight_norm, ValueError),
                                                 (nn.utils.parametrizations.spectral_norm, ValueError)],
                         ids=["old weight", "old spectral", "weight", "spectral"])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_torch_refuses_to_normalise_an_integer_weight(normalise, kind):
    """In its own words, before anything has changed."""
    model, x = gft.quantize_(mlp()), torch.randn(3, 6)
    expected = model(x)
    with pytest.raises(kind, match="'weight'"):
        normalise(model[0])
    assert torch.equal(model(x), expected)


# -------------------------------------------------------------------------------------------- freezing


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """One step; the names of the parameters that it moved."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.zero_grad()
    model(torch.randn(16, 6)).square().sum().backward()
    optimizer.step()
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch.compile, in a function it traces into
@pytest.mark.filterwarnings("error")
def test_a_layer_is_frozen_by_requires_grad_and_thawed(compiled):
    model = gft.quantize_(mlp(), bits=2)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=1.0), torch.optim.AdamW(gft.dense(model), lr=0.1))
    call = torch.compile(model, backend="eager") if compiled else model
    everything = {f"{layer}.{own}" for layer in (0, 2) for own in ("qweight", "bias", "log_gain")}
    step(call, optimizer)
    assert model[2].requires_grad_(False) is model[2]
    moved = {name.removeprefix("_orig_mod.") for name in step(call, optimizer)}
    assert moved == {name for name in everything if name[0] == "0"}
    assert copy.deepcopy(model)[2].frozen
    x = torch.randn(3, 8)
    F.linear(x, model[2].weight)  # a constant, so it may be multiplied anywhere
    assert not model[2].weight.requires_grad
    model[2].requires_grad_(True)
    assert {name.removeprefix("_orig_mod.") for name in step(call, optimizer)} == everything


def test_an_attention_is_frozen_whole():
    attention = gft.QuantMultiheadAttention(8, 2, add_bias_kv=True)
    optimizer = gft.GFT(gft.quantized(attention))
    attention.requires_grad_(False)
    assert not gft.dense(attention)
    x = torch.randn(2, 3, 8, requires_grad=True)
    attention(x, x, x)[0].sum().backward()
    assert x.grad.any()
    assert all(layer.votes.votes is None for layer in optimizer.layers())
    assert len(gft.dense(attention.requires_grad_(True))) == 6


def test_a_weight_frozen_before_is_frozen_after_and_back_again():
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    gft.quantize_(model, bits=2)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=1.0), torch.optim.AdamW(gft.dense(model), lr=0.1))
    assert step(model, optimizer) == {"2.qweight", "2.log_gain"}
    del optimizer
    gft.dequantize_(model)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["2.weight"]
    model = gft.quantize_(model.requires_grad_(False))
    with pytest.warns(UserWarning, match="all weights given to gft.GFT are frozen"):
        gft.GFT(gft.quantized(model))


# -------------------------------------------------------------------------------------------- unusual ways to compute


def test_gradients_of_gradients_are_refused_and_not_taken_for_zero(refuses):
    model, x = gft.quantize_(mlp()), torch.randn(4, 6, requires_grad=True)
    with refuses(ValueError, "gradient of a gradient.*filter_fn"):
        torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x)
    slope = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]
    with refuses(ValueError, "gradient of a gradient.*filter_fn"):
        slope.square().sum().backward()
    torch.autograd.grad(model(x).square().sum(), x, create_graph=True)  # nothing wrong with the first


def test_functional_transforms_with_gradients_are_torchs_to_refuse():
    model, x = gft.quantize_(mlp()).eval(), torch.randn(4, 6)
    with torch.no_grad():
        assert torch.allclose(torch.vmap(model)(x), model(x), atol=1e-6)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.jacrev(model)(x[0])
    assert torch.autograd.functional.jacobian(model, x[0]).shape == (5, 6)


def test_a_model_made_in_inference_mode_computes_there():
    model, x = mlp(), torch.randn(3, 6)
    with torch.inference_mode():
        made = gft.quantize_(copy.deepcopy(model))
        y = made(x)
        made[0].scale.mul_(2)
        assert not torch.equal(made(x), y)
    assert torch.equal(gft.quantize_(model)(x), y)


def test_a_model_made_in_inference_mode_computes_outside_as_well_but_is_not_trained(refuses):
    with torch.inference_mode():
        model = gft.quantize_(mlp(), scales="row")
    x = torch.randn(3, 6, requires_grad=True)
    model[2](model[0](x).relu()).sum().backward()
    assert x.grad.any()
    with refuses(ValueError, "made in torch.inference_mode.*outside of it"):
        gft.GFT(gft.quantized(model))


def test_an_optimizer_used_in_inference_mode_goes_on_outside():
    def trained(mode):
        torch.manual_seed(4)
        model = gft.quantize_(mlp())
        with mode():
            optimizer = gft.GFT(gft.quantized(model), lr=0.5)
            optimizer.load_state_dict(optimizer.state_dict())
            model(torch.randn(3, 6))  # a fresh layer, without a vote so far
        for _ in range(3):
            model(torch.randn(3, 6)).sum().backward()
            with mode():
                optimizer.step()
        return [layer.qweight for layer in optimizer.layers()]

    both = zip(trained(torch.inference_mode), trained(torch.no_grad), strict=True)
    assert all(torch.equal(one, other) for one, other in both)


def test_torch_autograd_grad_casts_votes_as_backward_does_until_they_are_forgotten():
    """torch does not tell a layer whose gradient is asked for. So for adversarial examples: forget them after."""
    model = gft.quantize_(mlp())
    optimizer = gft.GFT(gft.quantized(model), lr=0.5)
    before = [layer.qweight.clone() for layer in optimizer.layers()]
    x = torch.randn(4, 6, requires_grad=True)
    torch.autograd.grad(model(x).square().sum(), x)
    assert all(layer.votes.votes.any() for layer in optimizer.layers())
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(layer.qweight, old) for layer, old in zip(optimizer.layers(), before, strict=True))


# -------------------------------------------------------------------------------------------- settings of a built layer


@pytest.mark.parametrize(("name", "value"), [("bits", 2), ("memory", False)])
def test_how_integers_are_stored_cannot_be_set(name, value, refuses):
    """The layer, and its state_dict, would say what its bytes are not."""
    model = gft.quantize_(mlp())
    before = copy.deepcopy(model.state_dict())
    with refuses(ValueError, rf"^{name} of 0 is how its integers are stored.*quantize_\(…, {name}=…\)"):
        setattr(model[0], name, value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_a_scale_that_is_not_above_0_is_refused_by_steps_and_files(scale, scales, refuses):
    model = gft.quantize_(mlp(), scales=scales)
    state = copy.deepcopy(model.state_dict())
    state["2.scale"] = torch.full_like(state["2.scale"], scale)
    with refuses(ValueError, "^2: the state_dict holds scales that are NaN, inf, 0 or below"):
        model.load_state_dict(state)
    optimizer = gft.GFT(gft.quantized(model))
    if scales == "row" and scale == -1.0:
        return  # forward multiplies by them one by one, and a step knows their mean square alone
    model[0].scale.fill_(scale)
    before = model[0].qweight.clone()
    with refuses(ValueError, "the scale of 0 is .* must be a number above 0"):
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
    assert torch.equal(model[0].qweight, before)


def test_weights_and_scales_without_numbers_are_refused_in_a_state_dict(refuses):
    layer = gft.QuantLinear(4, 4, 3)
    for name, change, says in (("qweight", lambda _: None, "holds None"),
                               ("qweight", torch.Tensor.to_sparse, "without numbers"),
                               ("qweight", lambda tensor: tensor.to("meta"), "without numbers"),
                               ("scale", lambda tensor: tensor.to("meta"), "without numbers")):
        state = dict(layer.state_dict())
        state[name] = change(state[name])
        with refuses(gft.UsageError, says):
            layer.load_state_dict(state)


@pytest.mark.parametrize(("bits", "memory", "byte"), [(4, True, 127), (2, False, 255), (3, False, 14), (8, True, -128)])
def test_levels_beyond_the_grid_are_refused_in_files(bits, memory, byte, refuses):
    layer = gft.QuantLinear(8, 3, bits, memory=memory)
    state = copy.deepcopy(layer.state_dict())
    layer.load_state_dict(state)
    state["qweight"][1, 1] = byte
    with refuses(ValueError, "holds levels beyond ±"):
        layer.load_state_dict(state)


@pytest.mark.parametrize("value", [1e30, 1e39, 1e300])
@pytest.mark.parametrize("where", ["x", "grad_output"])
def test_float64_beyond_float32_counts_as_the_largest_vote(value, where):
    """It is finite, so it votes, as float64 rounds it; kernels leave float64 to the definition."""
    def votes(value):
        torch.manual_seed(3)
        layer = gft.QuantLinear(6, 4).double()
        optimizer = gft.GFT(gft.quantized(layer))
        x, grad_output = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
        (x if where == "x" else grad_output)[0, 0] = value
        layer(x).backward(grad_output)
        assert optimizer.not_finite() == 0
        return layer.votes.votes

    assert torch.equal(votes(value), votes(1e30))
    assert bool(votes(value).any())


def test_a_type_for_all_is_refused_by_integers(refuses):
    model = gft.quantize_(mlp())
    with refuses(ValueError, r"^the weight of 0 is integers.*use \.to\(dtype\)"):
        model.type(torch.float64)
    assert model[0].qweight.dtype is torch.int8
    assert model.to(torch.float64)(torch.randn(2, 6).double()).dtype is torch.float64


def test_fx_is_told_to_leave_the_layer_whole(refuses):
    model, x = gft.quantize_(mlp()), torch.randn(2, 6)
    with refuses(ValueError, "torch.fx cannot trace into.*is_leaf_module.*QuantLayer"):
        torch.fx.symbolic_trace(model)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, gft.layers.QuantLayer) or super().is_leaf_module(m, module_qualified_name)

    assert torch.equal(torch.fx.GraphModule(model, Tracer().trace(model))(x), model(x))
