"""ONNX: what onnxruntime computes is what the model does, from a file as small as its bits say."""

import pytest
import torch
from export_models import conv_net, images, llama, relative_error, tokens
from torch import nn

import gft
from gft.export.onnx import block_size, to_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

ROUNDING = 3e-6  # float32 sums in another order, in the largest output
BATCH = {0: torch.export.Dim.DYNAMIC}


def run(path, x):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def operators(path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize(("bits", "memory", "standard"), [(2, True, False), (2, "half", False), (3, False, False),
                                                        (4, True, True)], ids=str)
def test_onnxruntime_computes_what_the_model_does(bits, memory, standard, tmp_path):
    model, x = conv_net(bits, memory, gain=True), images()
    path = to_onnx(model, tmp_path / "net.onnx", (x,), dynamic_shapes=(BATCH,), standard=standard)
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]
    onnx.checker.check_model(onnx.load(path))
    used = operators(path)
    assert used.count("DequantizeLinear") == (4 if standard else 2)
    assert used.count("MatMulNBits") == (0 if standard else 2)
    for some in (x, x[:2]):
        assert relative_error(run(path, some), model(some)) < ROUNDING


@pytest.mark.parametrize(("bits", "memory"), [(2, False), (2, "half"), (3, True)], ids=str)
def test_torchs_own_export_works_without_our_function(bits, memory, tmp_path):
    model = gft.quantize_(nn.Sequential(nn.Conv2d(3, 40, (5, 5)), nn.Flatten(1), nn.Linear(640, 65)), bits,
                          memory=memory).eval()
    x, path = images(), tmp_path / "net.onnx"
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False, dynamic_shapes=(BATCH,), external_data=False)
    assert relative_error(run(path, x[:2]), model(x[:2])) < ROUNDING
    weights = [tensor for tensor in onnx.load(path).graph.initializer if "qweight" in tensor.name]
    assert {len(tensor.raw_data) for tensor in weights} >= {model[2].qweight.numel()}  # as it is stored, not as floats


def test_a_transformers_model_gives_the_same_logits_for_any_batch_and_length(tmp_path):
    pytest.importorskip("transformers")
    model, dynamic = llama(3, num_hidden_layers=1), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    path = to_onnx(model, tmp_path / "llama.onnx", (tokens(),), example_kwargs={"use_cache": False},
                   dynamic_shapes={"input_ids": dynamic, "use_cache": None}, output_names=["logits"])
    assert operators(path).count("MatMulNBits") == 7
    for ids in (tokens(), tokens(3, 7)):
        assert relative_error(run(path, ids), model(ids).logits) < ROUNDING


@pytest.mark.parametrize(("bits", "per_weight", "standard"), [(2, 0.25, False), (4, 0.5, True)], ids=str)
def test_the_file_is_as_small_as_bits_says(bits, per_weight, standard, tmp_path):
    model = gft.quantize_(nn.Sequential(nn.Linear(512, 640), nn.Linear(640, 512, bias=False)), bits)
    path = to_onnx(model, tmp_path / "net.onnx", (torch.randn(1, 512),), standard=standard)
    floats = 4 * sum(parameter.numel() for parameter in gft.dense(model))
    assert path.stat().st_size <= 2 * 512 * 640 * per_weight + floats + 5000


@pytest.mark.parametrize(("scales", "standard"), [("row", False), (32, False), (24, False)], ids=str)
def test_scales_of_rows_and_groups_are_kept(scales, standard, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, (8, 4), stride=(8, 4)), nn.ReLU(), nn.Flatten(1), nn.Linear(96, 63))
    gft.quantize_(model, 4, scales=scales).eval()
    x = torch.randn(3, 3, 8, 48)
    path = to_onnx(model, tmp_path / "net.onnx", (x,), standard=standard)
    assert relative_error(run(path, x), model(x)) < ROUNDING


def test_blocks_of_scales_fit_the_groups_and_are_chosen_for_size():
    assert block_size(columns=1024, group=1024, width=2) == 128
    assert block_size(columns=1024, group=64, width=4) == 64
    assert block_size(columns=96, group=24, width=4) is None  # whole blocks of 16 do not fill 24
    assert block_size(columns=63, group=63, width=2) == 64


def test_a_layer_used_twice_is_stored_once(tmp_path):
    layer = gft.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), 2)[0]
    model, x = nn.Sequential(layer, nn.Tanh(), layer), torch.randn(3, 64)
    path = to_onnx(model, tmp_path / "net.onnx", (x,), standard=True)
    assert len([tensor for tensor in onnx.load(path).graph.initializer if tensor.name.endswith("levels")]) == 1
    assert relative_error(run(path, x), model.eval()(x)) < ROUNDING


def test_onnxruntimes_rounding_of_inputs_can_be_asked_for(tmp_path):
    model, x = gft.quantize_(nn.Sequential(nn.Linear(64, 64)), 4).eval(), torch.randn(9, 64)
    path = to_onnx(model, tmp_path / "net.onnx", (x,), accuracy_level=4)
    node = next(node for node in onnx.load(path).graph.node if node.op_type == "MatMulNBits")
    assert next(one.i for one in node.attribute if one.name == "accuracy_level") == 4
    assert relative_error(run(path, x), model(x)) < 0.03


def test_exporting_leaves_a_model_in_training_as_it_is(tmp_path):
    model, x = conv_net(2).train(), images()
    optimizer = gft.GFT(gft.quantized(model), lr=0.5)
    to_onnx(model, tmp_path / "net.onnx", (x,))
    assert model.training
    assert isinstance(model[0], gft.QuantConv2d)
    model(x).square().sum().backward()
    optimizer.step()
    assert optimizer.flips() > 0


def test_what_cannot_be_exported_is_told_in_one_sentence(tmp_path, refuses):
    x, path = images(), tmp_path / "net.onnx"
    with refuses(ValueError, "no quantized layer"):
        to_onnx(nn.Linear(3, 2), path, (torch.randn(1, 3),))
    with refuses(ValueError, "accuracy_level=7"):
        to_onnx(conv_net(4), path, (x,), accuracy_level=7)
    with refuses(ValueError, "opset_version=18"):
        to_onnx(conv_net(4), path, (x,), opset_version=18)
    assert not list(tmp_path.iterdir())
