"""compressed-tensors: plain transformers loads the folder, without gft, and computes the same."""

import json

import pytest
import torch
from export_models import llama, relative_error, run_without_gft, tokens, with_gains
from torch import nn

import gft
from gft.export.compressed import pack_words, packed_tensors, to_compressed_tensors
from gft.layers import quantized_layers
from gft.storage import largest_level

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

ROUNDING = 3e-6  # float32 sums in another order, in the largest logit

LOAD = """
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    ids, wanted, weights = torch.load(folder + "/wanted.pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(ids).logits
    errors = [float((logits - wanted).abs().max() / wanted.abs().max())]
    errors += [float((model.get_submodule(name).weight - weight).abs().max() / weight.abs().max())
               for name, weight in weights.items()]
    print(errors[0], max(errors[1:]))
assert "gft" not in sys.modules
"""


def mixed_llama():
    """Attention of 4 bits with a scale for each 32 weights, the rest ternary with gains; biases; a tied head."""
    model = llama(4, attention_bias=True, tie_word_embeddings=True, quantize=False)
    gft.quantize_(model, 4, lambda _, name: ".self_attn." in name, scales=32)
    gft.quantize_(model, 2, lambda _, name: ".mlp." in name, scales="row", memory=False)
    return with_gains(model).eval()


def test_transformers_without_gft_gives_the_same_logits(tmp_path):
    models = {"2": llama(2), "3": llama(3, memory=False), "4": llama(4), "mixed": mixed_llama(), "3 as 4": llama(3)}
    for name, model in models.items():
        folder = to_compressed_tensors(model, tmp_path / name, bits=4 if name == "3 as 4" else None)
        ids = tokens()
        with torch.no_grad():
            wanted = model(ids).logits
        weights = {name: layer.float_weight() for name, layer in quantized_layers(model).items()}
        torch.save((ids, wanted, weights), folder / "wanted.pt")
    printed = run_without_gft(LOAD, *(tmp_path / name for name in models), folder=tmp_path)
    errors = [[float(number) for number in line.split()] for line in printed.splitlines()]
    assert len(errors) == len(models)
    for logits, weights in errors:
        assert logits < ROUNDING
        assert weights <= 2**-22  # the gain goes into the scale: two roundings of float32 at most


@pytest.mark.parametrize("bits", range(2, 9))
def test_words_are_those_of_compressed_tensors(bits):
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    top = largest_level(bits)
    for columns in (1, 63, 64, 65):
        levels = torch.randint(-top, top + 1, (5, columns)).to(torch.int8)
        assert torch.equal(pack_words(levels, bits), packing.pack_to_int32(levels, bits))


@pytest.mark.parametrize(("bits", "as_bits"), [(2, None), (3, None), (3, 4)], ids=["2", "3", "3 as 4"])
def test_the_file_is_as_small_as_bits_says(bits, as_bits, tmp_path):
    model = llama(bits, hidden_size=128, intermediate_size=256)
    to_compressed_tensors(model, tmp_path, bits=as_bits)
    layers = quantized_layers(model).values()
    packed = sum(layer.rows * layer.columns for layer in layers) * (as_bits or bits) // 8
    floats = 4 * (sum(parameter.numel() for parameter in gft.dense(model)) + sum(layer.rows for layer in layers))
    assert (tmp_path / "model.safetensors").stat().st_size <= packed + floats + 8000


def test_config_names_each_way_of_storing_and_what_stays_float(tmp_path):
    to_compressed_tensors(mixed_llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    schemes = [scheme["weights"] for scheme in config["config_groups"].values()]
    assert sorted((scheme["num_bits"], scheme["strategy"], scheme["group_size"]) for scheme in schemes) == [
        (2, "channel", None), (4, "group", 32)]
    assert config["ignore"] == ["lm_head"]


def test_weights_are_stored_without_loss():
    layer = with_gains(gft.quantize_(nn.Sequential(nn.Linear(63, 65)), 2, gain=True))[0]
    stored = packed_tensors(layer, 2)
    words = stored["weight_packed"].long() & 0xFFFFFFFF
    codes = torch.stack([words >> shift & 3 for shift in range(0, 32, 2)], -1).flatten(1)[:, :63]
    assert relative_error((codes - 2) * stored["weight_scale"], layer.float_weight()) <= 2**-22
    assert stored["weight_shape"].tolist() == [65, 63]


def test_exporting_leaves_the_model_as_it_is(tmp_path):
    model = llama(2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    to_compressed_tensors(model, tmp_path)
    assert model.training
    assert model.config.to_dict() == config
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_what_the_format_does_not_hold_is_told_in_one_sentence(tmp_path, refuses):
    image_model = transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4))
    gft.quantize_(image_model, 4)
    with refuses(ValueError, "projection is a Conv2d"):
        to_compressed_tensors(image_model, tmp_path / "a")
    mixture = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        vocab_size=20, num_local_experts=2))
    with refuses(ValueError, r"experts.gate_up.0 is part of a MixtralExperts"):
        to_compressed_tensors(gft.quantize_(mixture, 4), tmp_path / "a")
    with refuses(TypeError, "does not know Sequential"):
        to_compressed_tensors(gft.quantize_(nn.Sequential(nn.Linear(4, 4)), 4), tmp_path / "a")
    with refuses(ValueError, "has 4 bits"):
        to_compressed_tensors(llama(4), tmp_path / "a", bits=3)
    with refuses(ValueError, "no quantized layer"):
        to_compressed_tensors(nn.Linear(3, 2), tmp_path / "a")
    assert not list(tmp_path.iterdir())
