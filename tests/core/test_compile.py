"""Quantized layers under torch's machinery: torch.compile, autocast, activation checkpointing."""

import copy
import warnings

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import gft
from gft.layers import quantized_layers
from gft.product import kept_as
from gft.votes import VoteAccumulator


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()


class Counting:
    """A backend of torch.compile that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return aot_eager(graph, inputs)


# ---------------------------------------------------------------------------------------------------- torch.compile

def test_compiled_model_ends_with_the_same_weights():
    x = torch.randn(16, 9)

    def train(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(gft.QuantLinear(9, 12, bias=True, gain=True), nn.ReLU(), gft.QuantLinear(12, 7))
        start = model[0].qweight.clone()
        optimizer = gft.GFT(gft.quantized(model), lr=0.8, vote=gft.Int8(), seed=5)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for _ in range(2):
            optimizer.zero_grad()
            run(x).square().sum().backward()
            optimizer.step()
        assert not torch.equal(model[0].qweight, start)
        return [parameter.clone() for parameter in gft.quantized(model)]

    for eager, compiled in zip(train(False), train(True), strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("settings", [{"vote": gft.Sign(), "rule": gft.TopK(p_min=0.02)}, {"in_backward": True},
                                      {"vote": gft.Sign(per="sequence")}, {"vote": gft.Ternary()}],
                         ids=["sign", "in_backward", "sequence", "ternary"])
def test_one_graph_holds_the_whole_model(settings):
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
        assert optimizer.flips() > 0
        weights.append([weight.clone() for weight in gft.quantized(model)])
        with torch.no_grad():
            assert torch.allclose(run(x), model(x), atol=1e-5)
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = gft.QuantLinear(8, 16, gain=True), gft.QuantLinear(16, 8, bits=2, memory=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def trained_blocks(backend: Counting | None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model, x = nn.Sequential(*[Block() for _ in range(12)]), torch.randn(5, 8)
    optimizer = gft.GFT(gft.quantized(model), lr=0.6, seed=3)
    blocks = [block if backend is None else torch.compile(block, backend=backend, fullgraph=True) for block in model]
    for _ in range(2):
        y = x.clone().requires_grad_()
        for block in blocks:
            y = block(y)
        optimizer.zero_grad(); y.square().sum().backward(); optimizer.step()
    assert optimizer.flips() > 0
    return [weight.clone() for weight in gft.quantized(model)]


def test_twelve_equal_blocks_share_one_graph_and_train_as_without():
    backend = Counting()
    compiled, eager = trained_blocks(backend), trained_blocks(None)
    assert backend.graphs == 1
    assert all(torch.equal(*pair) for pair in zip(compiled, eager, strict=True))


def test_an_optimizer_attached_after_compiling_trains():
    backend, x = Counting(), torch.randn(6, 9)
    model = nn.Sequential(gft.QuantLinear(9, 12), nn.ReLU(), gft.QuantLinear(12, 5)).eval()
    run = torch.compile(model, backend=backend, fullgraph=True)
    run(x.clone().requires_grad_()).sum().backward()  # frozen: no votes
    before = [weight.clone() for weight in gft.quantized(model)]
    graphs = backend.graphs
    model.train()
    optimizer = gft.GFT(gft.quantized(model), lr=0.8)
    run(x.clone().requires_grad_()).square().sum().backward()
    optimizer.step()
    assert backend.graphs > graphs
    assert optimizer.flips() > 0
    assert all(not torch.equal(*pair) for pair in zip(before, gft.quantized(model), strict=True))


class Held(torch.fx.Interpreter):
    """Runs a graph, and holds each tensor to the shape and strides that the graph was made for, as Inductor's code does."""

    def run_node(self, n):
        result, expected = super().run_node(n), n.meta.get("val")
        both = zip(result, expected, strict=True) if isinstance(expected, (list, tuple)) else [(result, expected)]
        for one, other in both:
            if isinstance(other, torch.Tensor):
                assert (one.shape, one.stride()) == (other.shape, other.stride()), n
        return result


def test_a_graph_follows_a_change_of_the_vote():
    """What backward keeps of x has another shape by another vote: also of a second model that shares the code."""
    held = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(Held(graph).run))
    x = torch.randn(64, 16)
    for vote, other in ((gft.Int8(), gft.Ternary()), (gft.Sign(), gft.Int4())):
        model = gft.quantize_(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), bits=4)
        run = torch.compile(model, backend=held)
        optimizer = gft.GFT(gft.quantized(model), lr=0.8, vote=vote)
        for one in (vote, vote, other, other):
            optimizer.param_groups[0]["vote"] = one
            run(x).square().mean().backward()
            before = model[0].qweight.clone()
            optimizer.step()
            assert not torch.equal(before, model[0].qweight)


def test_a_copy_in_a_graph_votes_for_itself():
    model = gft.QuantLinear(9, 6)
    twin = copy.deepcopy(model)
    optimizers = [gft.GFT(gft.quantized(layer), lr=0.9) for layer in (model, twin)]
    torch.compile(twin, backend="aot_eager", fullgraph=True)(torch.randn(4, 9)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer.flips() > 0 for optimizer in optimizers] == [False, True]


@pytest.mark.filterwarnings("ignore:.*has no optimizer:UserWarning")
@pytest.mark.parametrize(("kind", "vote", "gain"), [("linear", gft.Int8(), True), ("linear", gft.Int4(), False),
                                                    ("conv", gft.Sign(), False), ("conv", gft.Int8(), True),
                                                    ("frozen", gft.Int8(), False)], ids=str)
def test_operators_pass_torchs_own_checks(kind, vote, gain, monkeypatch):
    monkeypatch.setattr(VoteAccumulator, "call", lambda *_: 0)  # the checks compare two forwards
    layer = gft.QuantConv2d(3, 5, 3, bits=3) if kind == "conv" else gft.QuantLinear(12, 7, bits=3)
    x = torch.randn(2, 3, 6, 6) if kind == "conv" else torch.randn(2, 5, 12)
    if kind != "frozen":
        optimizer = gft.GFT(gft.quantized(layer), vote=vote)
        layer(x).sum().backward()
        optimizer.step()  # so that the votes have their scales
    factor = torch.tensor([0.1]) if gain else None
    kept = kept_as(layer, x.shape)
    arguments = (x, layer.qweight, factor, layer._handle, layer.geometry, kept)
    torch.library.opcheck(torch.ops.gft.product, arguments)
    y, *saved = torch.ops.gft.product(*arguments)
    torch.library.opcheck(torch.ops.gft.product_backward, (torch.randn(y.shape), layer.qweight, *saved, factor,
                                                           layer._handle, list(x.shape), True))


# ---------------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize(("layer", "shape"), [
    (gft.QuantLinear(48, 20, bias=True, gain=True), (32, 48)), (gft.QuantConv2d(48, 20, 3, bias=True), (2, 48, 5, 4)),
], ids=["linear", "conv"])
def test_autocast_gives_bfloat16_near_the_float_layer_without_a_warning(layer, shape):
    """Where the CPU has no bfloat16 torch's own product warns; ours takes float32 there."""
    x = torch.randn(shape, requires_grad=True)
    wanted = layer.to_float()(x.detach())
    optimizer = gft.GFT(gft.quantized(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
            with torch.no_grad():
                evaluated = layer(x)
        y.sum().backward()
    assert y.dtype == evaluated.dtype == torch.bfloat16
    for result in (y, evaluated):
        assert torch.allclose(result.float(), wanted, atol=0.04, rtol=0.02)
    assert x.grad.dtype == torch.float32
    assert layer.votes.votes.any()
    optimizer.release()


@pytest.mark.parametrize("where", ["after autocast", "inside autocast"])
def test_votes_are_exact_with_autocast(where):
    """Some 500 equal votes do not fit the 8 bits of a bfloat16 sum."""
    layer, x = gft.QuantLinear(7, 5), torch.randn(600, 7).abs()
    optimizer = gft.GFT(gft.quantized(layer), vote=gft.Sign())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        grad_output = torch.randn_like(y) + 1
        if where == "inside autocast":
            y.backward(grad_output)
    if where == "after autocast":
        y.backward(grad_output)
    assert torch.equal(layer.votes.votes, (grad_output.sign().long().T @ x.sign().long()).int())
    optimizer.release()


def test_compiled_layers_compute_in_the_type_of_autocast():
    """The operator runs outside of autocast, so what it multiplies must have been cast before."""

    def train(compiled: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(gft.QuantLinear(16, 24), nn.ReLU(), gft.QuantLinear(24, 8))
        optimizer = gft.GFT(gft.quantized(model), lr=0.8, seed=5)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with torch.autocast("cpu", torch.bfloat16):
            y = run(torch.randn(32, 16))
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        optimizer.step()
        assert optimizer.flips() > 0
        return model[0].qweight.detach().clone()

    assert torch.equal(train(False), train(True))


# ---------------------------------------------------------------------------------------------------- recomputation


@pytest.mark.parametrize(("reentrant", "vote"), [(False, gft.Int8()), (False, gft.Sign()), (True, gft.Int4())],
                         ids=["int8", "sign", "int4, reentrant"])
def test_activation_checkpointing_ends_with_the_same_weights(reentrant, vote):
    x = torch.randn(3, 6, 9)

    def trained(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(gft.QuantLinear(9, 12, gain=True), nn.Tanh(), gft.QuantLinear(12, 9))
        optimizer = gft.GFT(gft.quantized(model), lr=0.5, vote=vote, seed=5)
        for batch in x:
            hidden = batch.clone().requires_grad_()
            y = checkpoint(model, hidden, use_reentrant=reentrant) if checkpointed else model(hidden)
            optimizer.zero_grad(); y.square().sum().backward(); optimizer.step()
        assert optimizer.flips() > 0
        return [layer.qweight.clone() for layer in quantized_layers(model).values()]

    for plain, checkpointed in zip(trained(False), trained(True), strict=True):
        assert torch.equal(plain, checkpointed)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_layer_used_twice_in_a_checkpointed_part_draws_new_noise_for_each_use(reentrant):
    def trained(checkpointed: bool) -> torch.Tensor:
        torch.manual_seed(1)
        layer, x = gft.QuantLinear(12, 12), torch.randn(8, 12, requires_grad=True)
        optimizer = gft.GFT(gft.quantized(layer), lr=0.5, vote=gft.Ternary(), seed=5)

        def twice(x: torch.Tensor) -> torch.Tensor:
            return layer(layer(x).tanh())

        y = checkpoint(twice, x, use_reentrant=reentrant) if checkpointed else twice(x)
        y.square().sum().backward()
        votes = layer.votes.votes.clone()
        optimizer.release()
        return votes

    assert torch.equal(trained(True), trained(False))
