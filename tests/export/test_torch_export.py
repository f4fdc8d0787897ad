"""torch.export and torch.jit.trace: graphs of torch's own operators, which run where gft is not installed."""

import copy
import warnings

import pytest
import torch
from export_models import conv_net, images, llama, relative_error, run_without_gft, tokens, with_gains
from torch import nn

import gft
from gft.export.program import to_pt2
from gft.storage import Storage

ROUNDING = 2e-6  # float32 sums in another order

LOAD = """
for program, trace, wanted in zip(*[iter(sys.argv[1:])] * 3):
    x, wanted = torch.load(wanted)
    for run in (torch.export.load(program).module(), torch.jit.load(trace)):
        print(float((run(x) - wanted).detach().abs().max() / wanted.abs().max()))
assert "gft" not in sys.modules
"""


def operators(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("memory", [False, True], ids=["packed", "memory"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 7, 8])
def test_exported_graphs_read_every_stored_weight_as_the_layers_do(bits, memory):
    storage = Storage(bits, memory)
    values = torch.arange(storage.lowest, storage.limit + 1, dtype=torch.int16).to(torch.int8)
    for columns in (len(values), len(values) - 1, 63):
        stored = storage.from_values(values.repeat(63)[: 3 * columns].view(3, columns))
        assert torch.equal(storage.exported_levels(stored, columns), storage.levels(stored, columns))


@pytest.mark.parametrize(("bits", "memory", "strict"), [(2, False, True), (3, False, False), (4, True, False)],
                         ids=["2 bits, packed, strict", "3 bits, packed", "4 bits, memory"])
def test_torch_export_gives_torchs_own_operators_and_no_warning(bits, memory, strict):
    model, x = conv_net(bits, memory, gain=True), images()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=strict)
    assert operators(program) <= {"aten"}
    for some in (x, x[:2]):
        assert relative_error(program.module()(some), model(some)) < ROUNDING


@pytest.mark.parametrize("scales", ["row", 24], ids=str)
def test_scales_of_rows_and_groups_are_exported(scales, tmp_path):
    model = with_gains(gft.quantize_(nn.Sequential(nn.Linear(48, 63), nn.Tanh()), 3, scales=scales, gain=True)).eval()
    x = torch.randn(4, 48)
    program = torch.export.export(model, (x,))
    assert operators(program) <= {"aten"}
    saved = torch.export.load(to_pt2(model, tmp_path / "model.pt2", (x,)))
    for graph in (program, saved):
        assert relative_error(graph.module()(x), model(x)) < ROUNDING


def test_a_model_in_training_exports_without_votes_and_trains_on():
    model, x = conv_net(2), images()
    optimizer = gft.GFT(gft.quantized(model), lr=0.5)
    model.train()
    program = torch.export.export(model, (x,))
    assert operators(program) <= {"aten"}
    before = [layer.clone() for layer in gft.quantized(model)]
    model(x).square().sum().backward()
    optimizer.step()
    assert optimizer.flips() > 0
    assert any(not torch.equal(*pair) for pair in zip(before, gft.quantized(model), strict=True))


def test_saved_programs_run_in_a_python_without_gft(tmp_path):
    x, arguments = images(), []
    for name, model in {"ternary": conv_net(2), "packed": conv_net(3, memory=False)}.items():
        arguments += [tmp_path / f"{name}{ending}" for ending in (".pt2", ".ts", ".pt")]
        to_pt2(model, arguments[-3], (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        with warnings.catch_warnings():
            warnings.simplefilter("error", torch.jit.TracerWarning)
            torch.jit.trace(model, x).save(arguments[-2])
        torch.save((x[:3], model(x[:3]).detach()), arguments[-1])
    printed = run_without_gft(LOAD, *arguments, folder=tmp_path)
    errors = [float(number) for number in printed.split()]
    assert len(errors) == 4
    assert max(errors) < ROUNDING


@pytest.mark.parametrize(("bits", "per_weight"), [(2, 0.25), (3, 0.5)])
def test_the_file_holds_packed_weights_also_of_layers_with_memory(bits, per_weight, tmp_path):
    model = gft.quantize_(nn.Sequential(nn.Linear(512, 600, bias=False), nn.Linear(600, 512, bias=False)), bits)
    model.train()
    before = copy.deepcopy(model.state_dict())
    path = to_pt2(model, tmp_path / "model.pt2", (torch.randn(1, 512),))
    assert path.stat().st_size <= 2 * 512 * 600 * per_weight + 2 * 25_000 + 15_000  # the graph, as text; the example
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_transformers_model_exports_to_a_pt2(tmp_path):
    pytest.importorskip("transformers")
    model, ids = llama(3, num_hidden_layers=1), tokens()
    path = to_pt2(model, tmp_path / "llama.pt2", (ids,), example_kwargs={"use_cache": False})
    program = torch.export.load(path).module()
    assert relative_error(program(ids, use_cache=False)["logits"], model(ids).logits) < 10 * ROUNDING


def test_models_in_double_precision_export():
    model = with_gains(gft.quantize_(nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5)), 2)).double().eval()
    x = torch.randn(4, 9, dtype=torch.float64)
    program = torch.export.export(model, (x,))
    assert program.module()(x).dtype is torch.float64
    assert relative_error(program.module()(x), model(x)) < ROUNDING


def test_what_cannot_be_exported_is_told_in_one_sentence(tmp_path, refuses):
    with refuses(ValueError, "no quantized layer"):
        to_pt2(nn.Linear(3, 2), tmp_path / "a.pt2", (torch.randn(1, 3),))
    with refuses(TypeError, r"torch\.nn\.Module"):
        to_pt2({"weight": torch.ones(2)}, tmp_path / "a.pt2", (torch.randn(1, 3),))
    assert not list(tmp_path.iterdir())
