"""LoRA adapters on quantized layers: they train, the integers below stay or train too, and merging gives float layers."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft")
pytest.importorskip("transformers")
from hf_models import logits, quantized_llama, tokens, train_steps
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import gft
from gft.integrations.peft import LoraQuantLinear, lora
from gft.layers import quantized_layers

TARGETS = ["q_proj", "down_proj"]


def adapted(model: nn.Module, **settings: Any) -> Any:
    return get_peft_model(model, lora(LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": TARGETS, **settings})))


def integers_of(model: nn.Module) -> list[torch.Tensor]:
    return [layer.qweight.clone() for layer in quantized_layers(model).values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def loss_of(model: Any) -> float:
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens(seed=10), labels=tokens(seed=10)).loss)


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
def test_adapters_train_while_the_integers_stay(memory):
    base = quantized_llama(4, memory)
    expected = logits(base)
    model = adapted(base, target_modules=[*TARGETS, "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"])
    assert torch.equal(logits(model), expected)  # an adapter starts at zero
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    before, loss = integers_of(model), loss_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layer with an adapter is meant to be frozen, and does not complain
        train_steps(model, torch.optim.AdamW(gft.dense(model), lr=1e-2), 5)
    assert loss_of(model) < loss
    assert same(integers_of(model), before)


def test_adapters_and_integers_train_together_if_gft_gets_the_integers():
    model = adapted(quantized_llama(4))
    before = integers_of(model)
    train_steps(model, gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.3), torch.optim.AdamW(gft.dense(model), lr=1e-2)))
    assert not same(integers_of(model), before)


def test_adapters_get_the_gradients_they_get_on_the_float_model_of_the_same_values():
    model = adapted(quantized_llama(2), init_lora_weights=False).train()
    other = get_peft_model(gft.dequantize_(quantized_llama(2)), LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS))
    other.load_state_dict({name: value for name, value in model.state_dict().items() if "lora_" in name}, strict=False)
    torch.testing.assert_close(logits(model), logits(other))
    for one in (model, other):
        one.train()(input_ids=tokens(), labels=tokens()).loss.backward()
    theirs = dict(other.named_parameters())
    gradients = [(parameter.grad, theirs[name].grad) for name, parameter in model.named_parameters() if "lora_" in name]
    assert len(gradients) == 8
    for ours, expected in gradients:
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"lora_bias": True}], ids=["plain", "with biases"])
def test_merge_and_unload_makes_float_layers_of_the_adapted_ones(tmp_path, settings):
    model = adapted(quantized_llama(2), init_lora_weights=False, **settings)
    expected = logits(model)
    merged = model.merge_and_unload(safe_merge=True)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(merged.model.layers[0].self_attn.q_proj, nn.Linear)
    assert isinstance(merged.model.layers[0].self_attn.k_proj, gft.QuantLinear)
    if not settings:  # a Llama has no biases
        merged.save_pretrained(tmp_path)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(merged))


@pytest.mark.parametrize("fan_in_fan_out", [True, False])
def test_merge_and_unload_gives_gpt_2_its_own_class_of_layer_back(tmp_path, fan_in_fan_out):
    config = GPT2Config(n_embd=36, n_layer=1, n_head=2, vocab_size=50, n_positions=32)
    base = gft.quantize_(GPT2LMHeadModel(config).eval(), 2, lambda _, name: ".h." in name)
    # c_proj of the attention is square: the wrong way round it would fit as well.
    model = adapted(base, init_lora_weights=False, target_modules=["c_attn", "c_proj"], fan_in_fan_out=fan_in_fan_out)
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    attention = merged.transformer.h[0].attn
    assert (type(attention.c_attn), type(attention.c_proj)) == (Conv1D, Conv1D)
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(merged))


def test_adapters_can_be_switched_off_and_unloaded():
    base = quantized_llama(2)
    expected = logits(base)
    model = adapted(base, init_lora_weights=False)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    assert not torch.equal(logits(model), expected)
    assert torch.equal(logits(model.unload()), expected)
    assert not any(isinstance(module, LoraQuantLinear) for module in model.modules())


def test_a_saved_adapter_is_loaded_onto_a_loaded_base(tmp_path):
    base = quantized_llama(2)
    base.save_pretrained(tmp_path / "base")
    model = adapted(copy.deepcopy(base), init_lora_weights=False)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter",
                                      config=lora(LoraConfig.from_pretrained(tmp_path / "adapter")))
    assert torch.equal(logits(again), logits(model))


def test_without_the_integration_peft_refuses_a_quantized_layer_in_its_own_words():
    with pytest.raises(ValueError, match=r"Target module QuantLinear.* is not supported"):
        get_peft_model(quantized_llama(2), LoraConfig(target_modules=TARGETS))


def test_what_integers_cannot_do_is_refused(refuses):
    with refuses(gft.UsageError, "an adapter cannot be merged into integer weights"):
        adapted(quantized_llama(2)).merge_adapter()
    with refuses(gft.UsageError, "all-linear"):
        lora(LoraConfig(target_modules="all-linear"))
    with refuses(gft.UsageError, "init_lora_weights='pissa' would change the base weight"):
        lora(LoraConfig(target_modules=TARGETS, init_lora_weights="pissa"))
    with refuses(gft.UsageError, "not IA3Config"):
        lora(IA3Config())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unsupported variant combination: .*use_dora"):
        adapted(quantized_llama(2), use_dora=True)
