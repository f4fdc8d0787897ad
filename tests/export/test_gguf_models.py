"""GGUF of other models than Llama: llama.cpp computes the same network, or they are refused before a file is written."""

import pytest
import torch
from export_models import in_blocks, language_model, with_random_gains
from gguf_reading import GgufFile, divergence

import gft
from gft.errors import UsageError
from gft.export.gguf import to_gguf
from gft.export.gguf_architectures import ARCHITECTURES
from gft.layers import QuantExperts, quantized_layers

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

ODD = {"hidden_size": 48, "intermediate_size": 80, "initializer_range": 0.2}  # rows that fit into no block
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
PROMPT = list(range(40, 80))


@pytest.mark.parametrize(("kind", "settings", "gain"), [
    ("Mistral", {}, True),
    ("Mistral", {"sliding_window": 128}, False),
    ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
    ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}, False),
    ("Qwen2", {}, False),
    ("Qwen2", {"tie_word_embeddings": True, **LINEAR}, False),
    ("Qwen3", {"head_dim": 20}, True),
    ("Qwen3", {"head_dim": 12, **LINEAR}, False),
], ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value))
def test_llama_cpp_computes_the_same_network_of_other_models(kind, settings, gain, tokenizer, tmp_path):
    """Nothing differs but the order of sums: with one scale a layer and a gain, and with scales of rows."""
    model = language_model(kind, **ODD, **settings)
    tied = settings.get("tie_word_embeddings")
    gft.quantize_(model, 4, in_blocks if tied else None, gain=gain, scales="tensor" if gain else "row")
    path = to_gguf(with_random_gains(model), tmp_path / "model.gguf", tokenizer=tokenizer, fallback="F32")
    *_, kl = divergence(model, path, PROMPT, 12)
    assert kl.max() < 2e-6
    assert GgufFile(path).settings["general.architecture"] == ARCHITECTURES[model.config.model_type].name


def test_no_model_that_can_be_written_is_left_untested():
    assert set(ARCHITECTURES) == {"llama", "mistral", "mixtral", "qwen2", "qwen3"}


def test_a_file_promises_no_longer_texts_than_a_sliding_window(tmp_path):
    """Within the window llama.cpp, which attends to all tokens, sees the same."""
    model = gft.quantize_(language_model("Mistral", sliding_window=100), 2, in_blocks)
    assert GgufFile(to_gguf(model, tmp_path / "model.gguf")).settings["llama.context_length"] == 100


@pytest.mark.parametrize(("bits", "expected"), [(2, "TQ2_0"), (3, "Q4_0")])
def test_every_expert_is_in_the_file_bit_for_bit(bits, expected, tmp_path):
    model = with_random_gains(gft.quantize_(language_model("Mixtral", num_local_experts=3), bits, in_blocks, gain=True))
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts, QuantExperts)
    file = GgufFile(to_gguf(model, tmp_path / "model.gguf"))
    assert file.types["blk.1.ffn_up_exps.weight"] == expected
    read = {part: file.floats(f"blk.1.ffn_{part}_exps.weight") * file.floats(f"blk.1.ffn_{part}_exps.scale").view(-1, 1, 1)
            for part in ("gate", "up", "down")}
    for number in range(3):
        both, down = experts.gate_up[number], experts.down[number]
        exact = both.levels() * (both.scale * both.gain().detach())
        assert torch.equal(torch.cat([read["gate"][number], read["up"][number]]), exact)
        assert torch.equal(read["down"][number], down.levels() * (down.scale * down.gain().detach()))


def test_experts_left_float_are_written_as_floats(tokenizer, tmp_path):
    model = language_model("Mixtral", num_local_experts=3, **ODD)
    gft.quantize_(model, 4, lambda _, name: "self_attn" in name)
    path = to_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer, fallback="F32", dtype="F32")
    *_, kl = divergence(model, path, PROMPT, 4)
    assert kl.max() < 2e-6


def test_scales_rounded_to_float16_need_no_place_of_their_own(tokenizer, tmp_path, refuses):
    """What Qwen 2's graph has not."""
    model, path = with_random_gains(gft.quantize_(language_model("Qwen2"), 4, in_blocks, gain=True)), tmp_path / "model.gguf"
    with refuses(UsageError, "q_proj has a scale or gain that llama.cpp's qwen2 has no place for; pass float16_scales=True"):
        to_gguf(model, path)
    assert not path.exists()
    file = GgufFile(to_gguf(model, path, tokenizer=tokenizer, float16_scales=True))
    assert not [name for name in file.types if name.endswith(".scale")]
    for name, layer in quantized_layers(model).items():
        if name.endswith("mlp.up_proj"):
            weight = layer.float_weight()
            written = file.floats(f"blk.{name.split('.')[2]}.ffn_up.weight")
            assert ((written - weight).abs() <= weight.abs() / 2048).all()
    *_, kl = divergence(model, path, PROMPT, 12)
    assert kl.max() < 1e-4  # activations of 8 bits
    model.model.layers[0].mlp.up_proj.scale.fill_(1e-7)
    with refuses(UsageError, "which float16 would spoil"):
        to_gguf(model, path, float16_scales=True)


@pytest.mark.parametrize(("kind", "settings", "says"), [
    ("Phi3", {}, "a Phi3ForCausalLM cannot be written; GGUF export takes .* llama, mistral, mixtral, qwen2, qwen3"),
    ("Gemma", {}, "a GemmaForCausalLM cannot be written"),
    ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 64}, "a Qwen3MoeForCausalLM cannot be written"),
    ("Qwen3", {"attention_bias": True}, "o_proj has a bias, which llama.cpp's qwen3 has no place for"),
    ("Qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "qwen3 only default, linear"),
    ("Mixtral", {"hidden_act": "gelu", "num_local_experts": 2}, "hidden_act='gelu'"),
], ids=lambda value: value if isinstance(value, str) and " " not in value else "")
def test_what_llama_cpp_would_compute_otherwise_is_refused(kind, settings, says, tmp_path, refuses):
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    model = gft.quantize_(language_model(kind, **{**sizes, **settings}), 4, in_blocks)
    with refuses(UsageError, says):
        to_gguf(model, tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_experts_that_differ_in_bits_are_refused(tmp_path, refuses):
    model = gft.quantize_(language_model("Mixtral", num_local_experts=2), 4, in_blocks)
    layer = model.model.layers[0].mlp.experts.down
    layer[1] = gft.QuantLinear(512, 256, bits=8)
    with refuses(UsageError, r"the experts model.layers.0.mlp.experts.down differ in bits"):
        to_gguf(model, tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
