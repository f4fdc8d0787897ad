"""save_pretrained and from_pretrained: what a folder says, that it gives the same model back, and what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from hf_models import llama, logits, quantized_llama, train_steps
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    BitNetQuantConfig,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.quantizers import auto
from transformers.quantizers.quantizer_bitnet import BitNetHfQuantizer

import gft
from gft.integrations import hf
from gft.layers import quantized_layers


def optimizer_of(model: nn.Module) -> gft.Hybrid:
    return gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.3, seed=5), torch.optim.AdamW(gft.dense(model), lr=1e-2))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_state(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("bits", "memory", "config", "shard"), [
    (2, True, {}, "50GB"),
    (2, False, {"tie_word_embeddings": True}, "5KB"),
    (3, False, {"attention_bias": True}, "50GB"),
    (2, "half", {}, "50GB"),
    (4, True, {"tie_word_embeddings": True}, "5KB"),
], ids=["ternary", "packed, tied, sharded", "packed with biases", "half a byte", "memory, tied, sharded"])
def test_a_saved_model_is_loaded_with_the_same_logits_bit_for_bit(tmp_path, bits, memory, config, shard):
    model = quantized_llama(bits, memory, **config)
    train_steps(model, optimizer_of(model))
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "5KB")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert same_state(model, loaded)
    assert torch.equal(logits(model), logits(loaded))
    assert {layer.storage for layer in quantized_layers(loaded).values()} == {
        layer.storage for layer in quantized_layers(model).values()}


@pytest.mark.parametrize("scales", ["row", 2])
@pytest.mark.parametrize("size", [1.0, 1e9], ids=["scales in float16", "scales in float32"])
def test_a_model_with_many_scales_is_loaded_with_the_same_logits(tmp_path, scales, size):
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(size)
    gft.quantize_(model, 4, lambda _, name: "_proj" in name, scales=scales)
    assert model.model.layers[0].mlp.up_proj.scale.dtype is (torch.float16 if size == 1 else torch.float32)
    model.save_pretrained(tmp_path / "memory")
    hf.save(model, tmp_path / "packed")
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "memory"), model)
    for folder in ("memory", "packed"):
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / folder)), logits(model))


def test_a_folder_says_in_which_numbers_its_layers_multiply(tmp_path, refuses):
    model = quantized_llama()
    model.save_pretrained(tmp_path / "plain")
    assert "compute" not in (tmp_path / "plain" / "config.json").read_text()  # earlier versions load it
    for name, layer in quantized_layers(model).items():
        layer.compute = None if "down_proj" in name else "fp8"
    model.save_pretrained(tmp_path / "fp8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8")
    assert [layer.compute for layer in quantized_layers(loaded).values()] == [
        layer.compute for layer in quantized_layers(model).values()]
    assert torch.equal(logits(loaded), logits(model))
    llama().save_pretrained(tmp_path / "float")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=hf.GftConfig(compute="int8"))
    assert {layer.compute for layer in quantized_layers(fresh).values()} == {"int8"}
    with refuses(ValueError, "compute='int9'"):
        hf.GftConfig(compute="int9")


def test_a_packed_model_is_saved_as_it_is_now(tmp_path):
    model = quantized_llama(2)
    expected = logits(model)
    gft.pack_(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(layer.memory for layer in quantized_layers(loaded).values())
    assert torch.equal(logits(loaded), expected)


def test_a_loaded_model_trains_on_to_the_same_weights_as_the_saved_one(tmp_path):
    model = llama()
    # In two calls, so that layers are not numbered in the model's order: their numbers decide what random numbers they draw.
    gft.quantize_(model, 2, lambda _, name: ".mlp." in name)
    gft.quantize_(model, 4, lambda _, name: ".self_attn." in name)
    train_steps(model, optimizer_of(model))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = state_of(loaded)
    for one in (model, loaded):
        train_steps(one, optimizer_of(one), 3)
    assert same_state(model, loaded)
    assert any(not torch.equal(value, before[name]) for name, value in loaded.state_dict().items() if "qweight" in name)


def test_a_model_whose_layers_differ_is_loaded_layer_by_layer(tmp_path):
    model = llama(attention_bias=True)
    gft.quantize_(model, 2, lambda _, name: "up_proj" in name, memory=False)
    gft.quantize_(model, 4, lambda _, name: "q_proj" in name, bias=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [(name, repr(layer)) for name, layer in quantized_layers(loaded).items()] == [
        (name, repr(layer)) for name, layer in quantized_layers(model).items()]
    assert torch.equal(logits(model), logits(loaded))


def test_the_base_model_is_loaded_from_the_folder_of_a_model_with_a_head(tmp_path):
    model = quantized_llama(2, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "head")
    base, info = AutoModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert not any(info.values())
    assert same_state(base, model.model)
    base.save_pretrained(tmp_path / "base")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert torch.equal(logits(again), logits(model))


def test_convolutions_of_a_vision_model_are_saved_too(tmp_path):
    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, image_size=8,
                       patch_size=4, num_labels=3)
    model = gft.quantize_(ViTForImageClassification(config).eval(), bits=2)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    image = torch.randn(2, 3, 8, 8)
    assert any(isinstance(layer, gft.QuantConv2d) for layer in quantized_layers(loaded).values())
    assert torch.equal(model(image).logits, loaded(image).logits)


def test_gains_and_scales_keep_their_precision_in_a_model_loaded_in_half_precision(tmp_path):
    model = quantized_llama(2)
    train_steps(model, optimizer_of(model))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype is torch.bfloat16
    for name, layer in quantized_layers(loaded).items():
        assert layer.dtype is torch.bfloat16
        assert torch.equal(layer.scale, model.get_submodule(name).scale)
        assert torch.equal(layer.log_gain, model.get_submodule(name).log_gain)
        assert layer.log_gain.dtype is layer.scale.dtype is torch.float32
        assert torch.equal(layer.qweight, model.get_submodule(name).qweight)


def test_a_model_of_another_float_type_is_loaded_in_it(tmp_path):
    model = quantized_llama(2)
    train_steps(model, optimizer_of(model))
    model.double().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in gft.dense(loaded)} == {torch.float64}
    assert torch.equal(logits(loaded), logits(model))


def test_a_float_folder_is_quantized_while_it_is_loaded(tmp_path):
    llama().save_pretrained(tmp_path / "float")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=hf.GftConfig(bits=2, memory=False))
    assert torch.equal(logits(loaded), logits(quantized_llama(2, memory=False)))
    assert isinstance(loaded.lm_head, nn.Linear)
    loaded.save_pretrained(tmp_path / "integers")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "integers")), logits(loaded))
    some = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=hf.GftConfig(
        bits=4, modules_to_not_convert=["q_proj", "lm_head"]))
    assert "model.layers.0.self_attn.k_proj" in quantized_layers(some)
    assert "model.layers.0.self_attn.q_proj" not in quantized_layers(some)


def test_layers_offloaded_to_disk_compute_the_same_but_are_neither_trained_nor_quantized(tmp_path, refuses):
    model = quantized_llama(2)
    model.save_pretrained(tmp_path / "integers")
    places = dict.fromkeys(["model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    offload: dict[str, Any] = {"device_map": {**places, "model.layers.0": "disk"}, "offload_folder": tmp_path / "offload"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "integers", **offload)
    assert loaded.model.layers[0].mlp.up_proj.qweight.is_meta
    assert torch.equal(logits(loaded), logits(model))
    with refuses(gft.UsageError, "without offloading"):
        optimizer_of(loaded)
    llama().save_pretrained(tmp_path / "float")
    with refuses(gft.UsageError, "weights to quantize are offloaded"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=hf.GftConfig(bits=2), **offload)


def test_config_json_names_the_layers_and_the_method(tmp_path):
    quantized_llama(2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["gft_version"]) == ("gft", 2, gft.__version__)
    assert "model.layers.1.mlp.up_proj" in config["layers"][0]["names"]


def test_without_the_integration_transformers_refuses_the_folder(tmp_path, monkeypatch):
    quantized_llama(4).save_pretrained(tmp_path)  # one byte a weight: the shape of a float weight
    for registered in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):  # all that the import has done
        monkeypatch.delitem(registered, "gft")
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_folder_without_its_integer_weights_is_refused(tmp_path, refuses):
    model = quantized_llama(2)
    again = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))  # a float model that is said to be quantized
    again.save_pretrained(tmp_path)
    with refuses(gft.UsageError, "holds no integer weights for model.layers.0"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


GROUP = {"bits": 3, "memory": True, "gain": False, "bias": True, "scales": "row", "scale_dtype": "float16",
         "names": ["a", "b"], "numbers": [0, 1]}


@pytest.mark.parametrize("change", [
    {"names": "a"}, {"names": [1, 2]}, {"names": None}, {"numbers": [1]}, {"numbers": [0, -1]}, {"numbers": {}},
    {"bits": 9}, {"bits": "3"}, {"bits": None}, {"memory": 1}, {"gain": "no"}, {"scales": 0.5}, {"scales": [1]},
    {"scale_dtype": "load"}, {"gain_dtype": "__name__"}, {"path": "/etc"}], ids=str)
def test_a_damaged_config_is_refused_before_a_layer_is_built(change, refuses):
    hf.GftConfig(layers=[GROUP])
    with refuses(ValueError, "."):
        hf.GftConfig(layers=[GROUP, {**GROUP, **change}])
    with refuses(ValueError, "list belongs|dict belongs"):
        hf.GftConfig(layers=change if len(str(change)) % 2 else [change.values()])


@pytest.mark.parametrize(("name", "spoil"), [("scale", lambda t: t * float("nan")), ("scale", lambda t: t * 0),
                                             ("qweight", lambda t: t * 0 + 127)], ids=["NaN", "0", "beyond the grid"])
def test_a_folder_with_damaged_numbers_is_refused(name, spoil, tmp_path, refuses):
    model = quantized_llama(3)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    key = f"model.layers.1.mlp.up_proj.{name}"
    state[key] = spoil(state[key])
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with refuses(ValueError, "^model.layers.1.mlp.up_proj: the state_dict holds"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_model_of_another_quantizer_is_left_as_it_is(refuses):
    model = llama()
    model.hf_quantizer = BitNetHfQuantizer(BitNetQuantConfig())
    with refuses(gft.UsageError, "quantized by another method already .BitNetQuantConfig."):
        gft.quantize_(model, 2, lambda _, name: ".layers." in name)
    assert not quantized_layers(model)


def test_shards_are_loaded_one_by_one_in_any_order(tmp_path):
    model, other = quantized_llama(3, memory=False), quantized_llama(3, memory=False, seed=1)
    train_steps(model, optimizer_of(model))
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    for file in sorted(tmp_path.glob("*.safetensors"), reverse=True):  # as Trainer does where it resumes
        other.load_state_dict(load_file(file), strict=False)
    assert same_state(model, other)


def test_settings_that_the_config_does_not_have_are_refused(refuses):
    with refuses(gft.UsageError, "no setting bit;"):
        hf.GftConfig(bit=2)
    with refuses(gft.UsageError, "bits=1"):
        hf.GftConfig(bits=1)


def test_a_dequantized_model_is_saved_as_a_float_model(tmp_path):
    for dequantize in (gft.dequantize_, lambda model: model.dequantize()):
        model = quantized_llama(2)
        expected = logits(model)
        dequantize(model)
        model.save_pretrained(tmp_path)
        assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_a_quantized_model_still_changes_its_type_and_can_be_copied(tmp_path):
    quantized_llama(2).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = logits(loaded)
    assert torch.equal(logits(copy.deepcopy(loaded)), expected)
    torch.testing.assert_close(logits(loaded.double()).float(), expected, rtol=1e-4, atol=1e-4)
    loaded.float()  # refused by transformers where it takes a model for another quantizer's


def test_a_transformers_model_inside_another_module_is_prepared_too(tmp_path):
    wrapped = nn.ModuleDict({"model": llama()})
    gft.quantize_(wrapped, 2, lambda _, name: ".layers." in name)
    wrapped["model"].save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(wrapped["model"]))


# ---------------------------------------------------------------------------------------------------- a folder to publish


@pytest.mark.parametrize(("bits", "bytes_a_weight"), [(2, 0.25), (4, 0.5)])
def test_a_published_folder_is_packed_and_gives_the_same_logits(tmp_path, bits, bytes_a_weight):
    model = quantized_llama(bits, hidden_size=64, intermediate_size=64)
    train_steps(model, optimizer_of(model))
    expected, before = logits(model), state_of(model)
    hf.save(model, tmp_path / "small")
    hf.save(model, tmp_path / "whole", pack=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(logits(loaded), expected)
    assert not any(layer.memory for layer in quantized_layers(loaded).values())
    stored = load_file(tmp_path / "small" / "model.safetensors")
    weights = sum(layer.rows * layer.columns for layer in quantized_layers(model).values())
    assert sum(value.nbytes for name, value in stored.items() if name.endswith("qweight")) == bytes_a_weight * weights
    # The model in memory has lost nothing, and the other folder neither.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), model)
    train_steps(loaded, gft.Hybrid(gft.GFT(gft.quantized(loaded)), torch.optim.AdamW(gft.dense(loaded))))


def test_the_model_card_says_where_the_weights_come_from(tmp_path):
    model = quantized_llama(2)
    hf.save(model, tmp_path, base_model="someone/base", command=["train.py", "--name", "two words"])
    card = (tmp_path / "README.md").read_text()
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    weights = sum(layer.rows * layer.columns for layer in quantized_layers(model).values())
    for fact in ("library_name: transformers", "base_model: someone/base", "- 2-bit", f"gft {gft.__version__}",
                 f"{size:,} bytes", f"{weights:,} (", "`train.py --name 'two words'`", "import gft.integrations.hf",
                 "AutoModelForCausalLM"):
        assert fact in card, fact


def test_what_cannot_be_published_is_refused(tmp_path, refuses):
    with refuses(gft.UsageError, "uploads nothing"):
        hf.save(quantized_llama(2), tmp_path, push_to_hub=True)
    with refuses(gft.UsageError, "no quantized layer"):
        hf.save(llama(), tmp_path)
    with refuses(gft.UsageError, "takes a transformers model, not Linear"):
        hf.save(nn.Linear(2, 2), tmp_path)
    assert not list(Path(tmp_path).iterdir())
