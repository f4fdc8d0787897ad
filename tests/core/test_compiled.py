"""compiled.py: a linear layer that torch.compile sees in parts trains as in eager mode."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import gft
from gft import compiled, ops, product
from gft.layers import QuantLayer
from gft.storage import Storage


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()


@pytest.fixture
def in_parts(monkeypatch):
    """On a CPU, too; and no layer goes another way."""
    monkeypatch.setattr(compiled, "DEVICES", {"cpu"})
    monkeypatch.setattr("gft.optim.DEVICES", {"cpu"})
    monkeypatch.setattr(product.CompiledProduct, "forward", None)


class Network(nn.Module):
    def __init__(self, width: int = 40, **settings) -> None:
        super().__init__()
        self.up = gft.QuantLinear(24, width, bias=True, **settings)
        self.down = gft.QuantLinear(width, 24, bits=2, gain=True, memory=False)
        self.scaled = gft.QuantLinear(24, 8, scales=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x + self.down(self.up(x).relu()))


def trained(compiler=None, device: str = "cpu", micro_batches: int = 1, steps: int = 3,
            **settings) -> dict[str, torch.Tensor]:
    """The end of a short training: weights, and what the optimizer keeps."""
    torch.manual_seed(1)
    model = Network(**settings).to(device)
    optimizer = gft.GFT(gft.quantized(model), lr=0.8, seed=2**63 + 5)
    dense = torch.optim.SGD(gft.dense(model), lr=0.01)
    run = model if compiler is None else torch.compile(model, backend=compiler, fullgraph=True)
    for step in range(steps):
        for micro_batch in range(micro_batches):
            draw = torch.Generator().manual_seed(100 * step + micro_batch)
            run(torch.randn(2, 16, 24, generator=draw).to(device)).square().mean().backward()
        optimizer.step(); dense.step(); optimizer.zero_grad(); dense.zero_grad()
    assert optimizer.flips() > 0
    kept = {f"{number}.{name}": value for number, state in optimizer.state_dict()["state"].items()
            for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.clone().cpu() for name, value in (model.state_dict() | kept).items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("settings", [{}, {"micro_batches": 3}, {"width": 37, "bits": 3}], ids=str)
def test_a_layer_in_parts_trains_as_in_eager_mode(in_parts, settings):
    assert_same(trained("aot_eager", **settings), trained(None, **settings))


def test_one_graph_serves_all_steps_also_the_first_whose_scales_are_not_known_yet(in_parts):
    graphs = []
    trained(lambda graph, inputs: graphs.append(graph) or aot_eager(graph, inputs), steps=4)
    assert len(graphs) == 1
    calls = [str(node.target) for node in graphs[0].graph.nodes if "gft" in str(node.target)]
    assert all("product" not in call for call in calls)


def test_checkpoints_and_layers_that_are_used_twice_train(in_parts):
    class Twice(Network):
        def forward(self, x):
            once = self.down(self.up(x))
            return self.scaled(checkpoint(lambda y: self.down(self.up(y).relu()), once, use_reentrant=False))

    model = Twice()
    optimizer = gft.GFT(gft.quantized(model), lr=0.8)
    run, x = torch.compile(model, backend="aot_eager"), torch.randn(32, 24)
    for _ in range(3):
        run(x).square().mean().backward()
        assert model.up.votes is not None
        assert (model.up.votes.backwards, model.scaled.votes.backwards, model.up.votes.tokens) == (2, 1, 64)
        optimizer.step()
    assert optimizer.flips() > 0


def test_a_first_batch_that_is_forgotten_leaves_no_scale_in_the_graph(in_parts):
    model = Network()
    optimizer = gft.GFT(gft.quantized(model), lr=0.8)
    run, panel = torch.compile(model, backend="aot_eager"), model.up.votes.panel
    run(torch.randn(4, 24)).square().mean().backward()
    assert panel.x_factors.min() > 0
    assert int(panel.uses.count) == 1
    optimizer.zero_grad()
    assert panel.x_factors.abs().max() == panel.grad_factors.abs().max() == int(panel.uses.count) == 0


def test_another_seed_and_a_loaded_state_reach_the_graph(in_parts):
    model = Network()
    optimizer = gft.GFT(gft.quantized(model), lr=0.8)
    run = torch.compile(model, backend="aot_eager")
    run(torch.randn(4, 24)).square().mean().backward()
    optimizer.param_groups[0]["seed"] = 2**64 - 1
    optimizer.step()
    assert int(model.up.votes.panel.key[0]) == -1
    factors = model.up.votes.panel.x_factors
    optimizer.load_state_dict(optimizer.state_dict())
    panel = model.up.votes.panel
    assert panel.x_factors is not factors
    assert torch.equal(panel.x_factors, factors)
    assert int(panel.key[0]) == -1


def test_what_is_not_finite_is_counted(in_parts):
    model = Network()
    optimizer = gft.GFT(gft.quantized(model), lr=0.8)
    run = torch.compile(model, backend="aot_eager")
    y = run(torch.randn(4, 24))
    y.backward(torch.full_like(y, float("nan")))
    assert model.scaled.votes.not_finite == y.numel()
    with pytest.warns(UserWarning, match="were NaN or inf"):
        optimizer.step()


@pytest.mark.parametrize(("setting", "value"), [("vote", gft.Ternary()), ("in_backward", True)], ids=str)
def test_other_votes_go_by_one_operator(monkeypatch, setting, value):
    monkeypatch.setattr(compiled, "DEVICES", {"cpu"})
    monkeypatch.setattr("gft.optim.DEVICES", {"cpu"})
    model = Network()
    optimizer = gft.GFT(gft.quantized(model), lr=0.8, **{setting: value})
    assert compiled.tensors_of(model.up, torch.randn(4, 24)) is None
    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(4, 24)).square().mean().backward()
    optimizer.step()
    assert optimizer.flips() > 0


# ---------------------------------------------------------------------------------------------------- operators, kernels


def prepared(layer: QuantLayer, values: torch.Tensor, known: bool, purpose: int):
    """The arguments of `prepare` for a layer; its factors known, or those of its first batch."""
    device = values.device
    factors = (torch.rand(values.shape[1], device=device) + 1) * 1e5 * known
    not_finite = torch.zeros((), dtype=torch.int64, device=device)
    key = torch.tensor([2**62 + 3, 7, not_finite.data_ptr()], device=device)
    noise = [factors, key, torch.tensor(3, device=device), torch.tensor(2, device=device), not_finite]
    weight = [layer.qweight, layer.scale] if layer.log_gain is None else [layer.qweight, layer.scale, layer.log_gain]
    return values, noise, weight, [layer.columns, layer.bits, int(layer.memory)], purpose


@pytest.mark.parametrize("purpose", [compiled.X, compiled.GRAD_OUTPUT])
def test_operators_have_the_shapes_that_graphs_are_told(purpose):
    layer = gft.QuantLinear(24, 10, gain=True)
    gft.GFT(gft.quantized(layer)).zero_grad()
    arguments = prepared(layer, torch.randn(32, 24 if purpose == compiled.X else 10), True, purpose)
    torch.library.opcheck(torch.ops.gft.prepare, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("bits", "memory", "scales", "gain", "tokens", "inputs"), [
    (4, True, "tensor", False, 192, 64), (2, False, "tensor", True, 67, 130), (3, True, 8, True, 40, 72)])
def test_the_kernel_in_a_graph_prepares_as_the_definition(known, bits, memory, scales, gain, tokens, inputs):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    twins = ops.twins("cuda")
    if "graph_prepare" not in twins:
        pytest.skip("no Triton")
    torch.manual_seed(0)
    layer = gft.QuantLinear(inputs, 33, bits, memory=memory, scales=scales, gain=gain)
    if gain:
        layer.log_gain.data.fill_(0.02)
    for purpose in (compiled.X, compiled.GRAD_OUTPUT):
        values = torch.randn(tokens, inputs) * torch.logspace(-3, 3, inputs)
        values[1, 2] = float("nan")
        arguments = prepared(layer, values, known, purpose)
        expected = compiled._prepare(*arguments)
        there = move(arguments, device)
        found = twins["graph_prepare"](*there, (compiled.VOTE.largest, compiled.VOTE.unit))
        assert torch.allclose(found[0].cpu(), expected[0], rtol=1e-6)
        difference = found[1].cpu().int() - expected[1].int()
        # The scale of a first batch is a sum whose order is each device's own.
        assert difference.abs().max() <= (0 if known else 1)
        assert difference.abs().float().mean() < 1e-3
        assert torch.allclose(found[2].cpu().sum(0), expected[2].sum(0), rtol=1e-5)
        assert int(there[1][4]) == int(arguments[1][4]) == (purpose == compiled.GRAD_OUTPUT)
        if purpose == compiled.X:
            assert int(found[3]) == 2


def move(arguments, device: str):
    """The arguments on a device, with a counter of their own whose address they know."""
    values, noise, weight, *rest = arguments
    noise = [one.clone().to(device) for one in noise]
    noise[4].zero_()
    noise[1][2] = noise[4].data_ptr()
    return values.to(device), noise, [one.detach().to(device) for one in weight], *rest


def test_reading_a_weight_does_not_depend_on_what_a_rule_has_made_of_its_memory():
    """So a graph may take it for granted."""
    for bits in range(2, 9):
        one, other = Storage(bits, inertia=True), Storage(bits, inertia=False)
        values = torch.arange(one.lowest, one.limit + 1, dtype=torch.int8)[None]
        assert torch.equal(one.levels(values, values.shape[1]), other.levels(values, values.shape[1]))


# ---------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"micro_batches": 2}, {"width": 37, "bits": 3}], ids=str)
def test_inductor_launches_the_kernel_and_training_is_the_same(settings, monkeypatch):
    monkeypatch.setattr(product.CompiledProduct, "forward", None)
    monkeypatch.setattr(compiled, "_prepare", None)  # it is traced into
    one, other = trained("inductor", "cuda", steps=5, **settings), trained(None, "cuda", steps=5, **settings)
    # Sums of floats have another order: a first scale, and what is multiplied.
    for name in one:
        if name.endswith("qweight"):
            assert (one[name] != other[name]).float().mean() < 0.05


@pytest.mark.gpu
def test_a_graph_of_torchs_own_cuda_graphs_trains():
    torch.manual_seed(0)
    model = Network().cuda()
    optimizer = gft.GFT(gft.quantized(model), lr=0.3)
    run, x = torch.compile(model, mode="reduce-overhead"), torch.randn(32, 24, device="cuda")
    losses = []
    for _ in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        loss = (run(x) - 1).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert optimizer.flips() > 0
