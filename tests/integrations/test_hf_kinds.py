"""Folders of models whose float layers are not one linear layer each: Conv1D, fused experts, attention in one module."""

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from hf_models import llama, logits
from test_architectures import GROUPED, build
from test_architectures import MODELS as ARCHITECTURES
from test_architectures import batch_of as batch_for
from test_architectures import output_of as output_for

import gft
from gft.integrations import hf
from gft.layers import quantized_layers


def mixtral(**rest: Any) -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{
        **GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4, **rest}))


def trained(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """After a step, so that gains and unspent votes are not all alike."""
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=1.0), torch.optim.AdamW(gft.dense(model), lr=1e-2))
    output_for(model, batch).square().mean().backward()
    optimizer.step()
    optimizer.optimizers[0].release()
    return model.eval()


@pytest.mark.parametrize("settings", [{"bits": 4}, {"bits": 2, "memory": False, "scales": "row"}], ids=["memory", "packed"])
@pytest.mark.parametrize(("name", "kind"), [
    ("GPT-2", gft.QuantLinear), ("Mixtral", gft.QuantExperts), ("GPT-OSS", gft.QuantExperts),
    ("SigLIP", gft.QuantMultiheadAttention),
], ids=["Conv1D", "experts", "transposed experts with biases", "attention"])
def test_models_of_all_kinds_of_layers_are_loaded_with_the_same_logits(tmp_path, name, kind, settings):
    batch = batch_for(ARCHITECTURES[name][3])
    model: Any = trained(gft.quantize_(build(name), skip_tied=True, **settings), batch)
    assert any(isinstance(module, kind) for module in model.modules())
    model.save_pretrained(tmp_path / "whole")
    hf.save(model, tmp_path / "packed")
    for folder in ("whole", "packed"):
        loaded, info = type(model).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values())
        assert [type(module) for module in loaded.modules()] == [type(module) for module in model.modules()]
        with torch.no_grad():
            assert torch.equal(output_for(loaded.eval(), batch), output_for(model, batch))
    trained(loaded.train(), batch)  # it learns on


def test_experts_whose_parts_have_their_scales_by_rows_and_by_groups_are_loaded(tmp_path):
    model = gft.quantize_(mixtral(intermediate_size=64), 4, scales=32).eval()  # rows of 32 and of 64 weights
    model.save_pretrained(tmp_path)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {layer.scale.shape[1] for layer in quantized_layers(loaded.model.layers[0].mlp).values()} == {1, 2}
    with torch.no_grad():
        assert torch.equal(output_for(loaded, batch_for("language")), output_for(model, batch_for("language")))


def test_loading_says_once_what_the_model_is_and_does_not_warn(tmp_path, caplog):
    model = llama(tie_word_embeddings=True, vocab_size=2000)  # most of it is an embedding, which stays float
    for bits, part in enumerate(("q_proj", "up_proj", "down_proj"), 2):
        gft.quantize_(model, bits, lambda _, name, part=part: part in name)
    model.save_pretrained(tmp_path)
    expected = gft.summary(model)
    assert expected.share < 0.5
    with caplog.at_level(logging.INFO, "gft"):
        caplog.clear()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    (record,) = [record for record in caplog.records if record.name == "gft"]
    assert (record.levelname, record.message) == ("INFO", expected.line())
    assert torch.equal(logits(loaded), logits(model))


def test_a_model_made_float_again_is_saved_as_an_ordinary_folder(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=60, n_positions=16)
    model = gft.dequantize_(gft.quantize_(transformers.GPT2LMHeadModel(config), 4, skip_tied=True)).eval()
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    tokens = torch.arange(12).view(1, -1)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert not quantized_layers(again)
