"""Tiny random models of transformers, whole: integers in, one step, the same logits out."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gft
from gft.layers import quantized_layers

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**LAYERS, "vocab_size": 64, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**TEXT, "num_key_value_heads": 2}
MIXTURE = {**GROUPED, "num_experts_per_tok": 2}
IMAGE = {**LAYERS, "image_size": 16, "patch_size": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1,
          "topk_group": 1, "first_k_dense_replace": 1}

# name -> (model, its configuration, settings, kind of batch, least share of weights that become integers)
MODELS: dict[str, tuple[str, str, dict[str, Any], str, float]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, "language", 0.85),
    "Phi": ("PhiForCausalLM", "PhiConfig", TEXT, "language", 0.85),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32,
                                                "bos_token_id": 1, "eos_token_id": 2}, "language", 0.85),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**MIXTURE, "num_local_experts": 4}, "language", 0.94),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 24,
                                                            "head_dim": 8}, "language", 0.9),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**TEXT, **LATENT, "n_routed_experts": 4,
                    "num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, "language", 0.9),
    "GPT-OSS": ("GptOssForCausalLM", "GptOssConfig", {**MIXTURE, "num_local_experts": 4, "head_dim": 8}, "language", 0.9),
    "ViT": ("ViTForImageClassification", "ViTConfig", {**IMAGE, "num_labels": 5}, "image", 0.95),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", IMAGE, "image", 0.95),
    "DINOv2": ("Dinov2ForImageClassification", "Dinov2Config", {**IMAGE, "num_labels": 5}, "image", 0.95),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", IMAGE, "image", 0.95),
    "Swin": ("SwinForImageClassification", "SwinConfig", {"image_size": 16, "patch_size": 2, "embed_dim": 16,
             "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "num_labels": 5}, "image", 0.9),
    "ConvNeXt": ("ConvNextForImageClassification", "ConvNextConfig", {"hidden_sizes": [8, 16], "depths": [1, 1],
                 "num_stages": 2, "num_labels": 5}, "image", 0.9),
    "ResNet": ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16],
               "depths": [1, 1], "layer_type": "basic", "num_labels": 5}, "image", 0.95),
    "BERT": ("BertForSequenceClassification", "BertConfig", TEXT, "text", 0.75),
    "T5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4,
           "vocab_size": 64, "decoder_start_token_id": 0}, "language", 0.85),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64, "num_mel_bins": 8, "max_source_positions": 16,
        "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
                "speech", 0.8),
}


def build(name: str) -> nn.Module:
    kind, configuration, settings, _, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, configuration)(**settings))


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, (3, 10), generator=generator)
    return {"language": {"input_ids": tokens, "labels": tokens},
            "text": {"input_ids": tokens, "labels": torch.tensor([0, 1, 0])},
            "image": {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)},
            "speech": {"input_features": torch.randn(3, 8, 32, generator=generator), "labels": tokens}}[kind]


def output_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result = model(**batch)
    return result.logits if "logits" in result else result.pooler_output


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result = model(**batch)
    return result.loss if result.get("loss") is not None else output_of(model, batch).square().mean()


def hybrid_of(model: nn.Module, lr: float) -> gft.Hybrid:
    return gft.Hybrid(gft.GFT(gft.quantized(model), lr=lr), torch.optim.AdamW(gft.dense(model), lr=1e-3))


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_becomes_integers_takes_a_step_and_comes_back(name, memory):
    _, _, _, kind, least = MODELS[name]
    model, batch = build(name), batch_of(kind)
    kinds = {path: type(module) for path, module in model.named_modules()}
    gft.quantize_(model, bits=4, memory=memory, skip_tied=True)
    assert gft.summary(model).share > least
    optimizer = hybrid_of(model, lr=1.0)
    before = [weight.clone() for weight in gft.quantized(model)]
    loss_of(model, batch).backward()
    optimizer.step()
    assert all(not torch.equal(*pair) for pair in zip(before, gft.quantized(model), strict=True))

    model.eval()
    with torch.no_grad():
        logits = output_of(model, batch)
        assert logits.isfinite().all()
        gft.dequantize_(model)
        assert torch.allclose(output_of(model, batch), logits, atol=1e-5)
    now = {path: type(module) for path, module in model.named_modules()}
    assert now == kinds


@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3", "GPT-OSS", "GPT-2"])
def test_eight_bits_compute_what_floats_do(name):
    """On a grid so fine that rounding hardly shows: the routing, the gates, and GPT-2's transposed weights are right."""
    model, batch = build(name).eval(), batch_of("language")
    with torch.no_grad():
        wanted = output_of(model, batch)
        found = output_of(gft.quantize_(model, bits=8, skip_tied=True), batch)
    error = (found - wanted).square().mean() / wanted.square().mean()
    assert float(error) < 1e-3


def test_the_whole_body_of_gpt2_is_integers_and_learns():
    model, batch = build("GPT-2"), batch_of("language")
    gft.quantize_(model, bits=4, skip_tied=True)
    left = [path for path, weight in model.named_parameters()
            if path.startswith("transformer.h.") and weight.is_floating_point() and weight.dim() > 1]
    assert left == []
    assert len(quantized_layers(model)) == 8
    optimizer = hybrid_of(model, lr=0.1)
    losses = []
    for _ in range(20):
        loss = loss_of(model, batch)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_a_tied_head_is_refused_or_left_out(refuses):
    model = build("GPT-2")
    with refuses(ValueError, r"transformer\.wte\.weight and lm_head\.weight are one shared weight; pass skip_tied=True"):
        gft.quantize_(model)
    assert not quantized_layers(model)


def test_mamba_trains_by_the_lines_that_the_errors_say(refuses):
    """It multiplies the weights of two layers of each block by itself."""
    ends: list[str] = []

    def train() -> gft.Hybrid:
        torch.manual_seed(0)
        model = transformers.MambaForCausalLM(transformers.MambaConfig(
            vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4))
        gft.quantize_(model, 4, lambda module, name: not name.endswith(tuple(ends)), skip_tied=True)
        optimizer = hybrid_of(model, lr=1.0)
        loss_of(model, batch_of("language")).backward()
        optimizer.step()
        return optimizer

    for _ in range(2):
        with refuses(ValueError, r"backbone\.layers\.1\.mixer\.\w+ \(Quant"):
            try:
                train()
            except ValueError as error:
                ends.append(str(error).split("name.endswith('")[1].split("'")[0])
                raise
    assert sorted(ends) == [".mixer.conv1d", ".mixer.dt_proj"]
    assert train().optimizers[0].flips() > 0


# ---------------------------------------------------------------------------------------------------- experts


def experts_of(**rest: Any) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**MIXTURE, "num_local_experts": 4, **rest}))
    return model.model.layers[0].mlp.experts


def route(experts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.tensor(experts)
    return torch.randn(len(index), 32), index, torch.rand(index.shape)


def test_experts_without_tokens_stay_where_they_are():
    plain = experts_of()
    layer = gft.QuantExperts.from_float(plain, bits=3)
    optimizer = gft.GFT(gft.quantized(layer), lr=1.0)
    before = {path: weight.clone() for path, weight in layer.named_parameters()}
    x, index, weights = route([[0, 2], [2, 0], [0, 4], [4, 2]])  # 4: beyond the last, which means none
    for _ in range(2):
        optimizer.zero_grad()
        layer(x.requires_grad_(), index, weights).square().sum().backward()
        optimizer.step()
    moved = {path.split(".")[1] for path, weight in layer.named_parameters() if not torch.equal(weight, before[path])}
    assert moved == {"0", "2"}
    assert x.grad.any()


def test_experts_equal_the_float_module_they_give_back():
    layer = gft.QuantExperts.from_float(experts_of(), bits=3)
    plain = layer.to_float()
    arguments = route([[0, 2], [2, 1], [3, 0], [1, 2], [0, 3]])
    results = []
    for module in (plain, layer):
        x, index, weights = (value.clone() for value in arguments)
        y = module(x.requires_grad_(), index, weights.requires_grad_())
        y.square().sum().backward()
        results.append((y, x.grad, weights.grad))
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*results, strict=True))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(*arguments), layer(*arguments))
    assert sum(weight.numel() for weight in twin.parameters()) == sum(weight.numel() for weight in plain.parameters())


def test_experts_are_rounded_for_the_tokens_that_they_get():
    model, batch, lost = build("Mixtral").eval(), batch_of("language"), {}
    expected = output_of(model, batch)
    for init in ("fit", gft.GPTQ([batch])):
        one = gft.quantize_(copy.deepcopy(model), 3, lambda _, name: name.endswith("experts"), init=init, scales="row")
        lost[str(init)[:4]] = float((output_of(one, batch) - expected).detach().square().mean())
    assert lost["GPTQ"] < 0.5 * lost["fit"]


@pytest.mark.parametrize("spoil", [
    lambda experts: setattr(experts, "extra", nn.Linear(3, 3)),  # another parameter, whose part is not known
    lambda experts: delattr(experts, "is_transposed"),  # does not say how its weights lie
    lambda experts: setattr(experts, "forward", lambda x: x),  # computes something else
], ids=["another weight", "silent", "another forward"])
def test_experts_of_another_make_are_left_float_and_named(spoil: Callable[[Any], None], caplog):
    experts = experts_of()
    spoil(experts)
    model = nn.Sequential(nn.Linear(32, 32), nn.ModuleDict({"experts": experts}))
    gft.quantize_(model)
    assert type(model[1]["experts"]) is type(experts)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the largest part left float is 1.experts (MixtralExperts), holds a weight in a way" in record.message
