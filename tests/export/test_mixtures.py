"""Mixtures of experts as graphs: exported with every expert computing, compiled with a break around the experts."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
from export_models import relative_error, run_without_gft, with_gains
from transformers import MixtralConfig, MixtralForCausalLM

import gft
from gft.export.onnx import to_onnx
from gft.export.program import to_pt2
from gft.layers import QuantExperts, quantized_layers

OPEN = {"input_ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}


def tokens(rows=3, length=7):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture
def mixture():
    config = MixtralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                           num_key_value_heads=1, vocab_size=64, num_local_experts=4, num_experts_per_tok=2,
                           max_position_embeddings=32, initializer_range=0.2, use_cache=False)
    model = with_gains(gft.quantize_(MixtralForCausalLM(config), 2)).eval()
    assert any(isinstance(module, QuantExperts) for module in model.modules())
    return model


def test_a_program_of_a_mixture_runs_without_gft_on_texts_of_another_size(mixture, tmp_path):
    x = tokens(2, 9)
    with torch.no_grad():
        expected = mixture(x).logits
    to_pt2(mixture, tmp_path / "model.pt2", (), example_kwargs={"input_ids": tokens()}, dynamic_shapes=OPEN)
    torch.save(x, tmp_path / "x.pt")
    run_without_gft("""
program = torch.export.load("model.pt2").module()
torch.save(program(input_ids=torch.load("x.pt"))["logits"], "logits.pt")
""", folder=tmp_path)
    assert relative_error(torch.load(tmp_path / "logits.pt"), expected) < 1e-5


def test_onnxruntime_gives_the_logits_of_a_mixture(mixture, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x = tokens(2, 9)
    with torch.no_grad():
        expected = mixture(x).logits
    path = to_onnx(mixture, tmp_path / "model.onnx", (), example_kwargs={"input_ids": tokens()}, dynamic_shapes=OPEN)
    result, = onnxruntime.InferenceSession(path).run(None, {"input_ids": x.numpy()})[:1]
    assert relative_error(result, expected) < 1e-5


def test_an_exported_expert_leaves_out_tokens_that_go_to_none(mixture):
    """transformers' way to say none is a number past the last expert."""
    experts = mixture.model.layers[0].mlp.experts
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    index = torch.tensor([[0, 4], [4, 4], [1, 2], [3, 3], [2, 0]])
    with torch.no_grad():
        expected = experts(x, index, weights)
        result = torch.export.export(experts, (x, index, weights)).module()(x, index, weights)
    assert relative_error(result, expected) < 1e-5
    assert not result[1].any()


def test_a_compiled_mixture_trains_to_the_same_weights(mixture):
    torch._dynamo.reset()
    other = copy.deepcopy(mixture)
    for model, run in ((mixture.train(), mixture), (other.train(), torch.compile(other, backend="eager"))):
        optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=1.0), torch.optim.AdamW(gft.dense(model), lr=1e-2))
        for step in range(2):
            optimizer.zero_grad()
            run(input_ids=tokens(length=7 + step), labels=tokens(length=7 + step)).loss.backward()
            optimizer.step()
    theirs = quantized_layers(other)
    assert all(torch.equal(layer.qweight, theirs[name].qweight) for name, layer in quantized_layers(mixture).items())


def test_one_graph_of_a_mixture_is_refused_with_the_mend(mixture):
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="depends on the data; compile without fullgraph=True"):
        torch.compile(mixture, fullgraph=True, backend="eager")(tokens())
