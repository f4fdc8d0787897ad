"""PEFT: LoRA adapters on quantized layers.

    from gft.integrations.peft import lora
    model = peft.get_peft_model(model, lora(LoraConfig(target_modules=["q_proj", "v_proj"])))
    model = PeftModel.from_pretrained(base, folder, config=lora(LoraConfig.from_pretrained(folder)))

The adapters are floats that any optimizer trains. The integers below stay as they are, unless gft.GFT is given them too.
`merge_and_unload` makes float layers of those that have adapters: a product of two float matrices fits no grid.
"""

import warnings
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import nn

from gft.errors import UsageError
from gft.layers import QuantLinear, transposed_linear

STARTS = (True, False, "gaussian")  # of adapters; others take the base weight apart


def lora(config: LoraConfig) -> LoraConfig:
    """The same config, which now knows what an adapter of a QuantLinear is. It is not kept in adapter_config.json: call this
    again where a saved adapter is loaded."""
    if not isinstance(config, LoraConfig):
        raise UsageError(f"lora takes a peft.LoraConfig, not {type(config).__name__}; other adapters need float layers")
    if config.target_modules == "all-linear":
        raise UsageError('target_modules="all-linear" finds float layers alone; name the layers, as in ["q_proj", "v_proj"]')
    if config.init_lora_weights not in STARTS:
        raise UsageError(f"init_lora_weights={config.init_lora_weights!r} would change the base weight, which is integers; "
                         'choose True, False or "gaussian"')
    config._register_custom_module({QuantLinear: LoraQuantLinear})
    return config


class LoraQuantLinear(Linear):
    """A QuantLinear and its adapters: y = base(x) + scaling · B(A(x))."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Unsupported layer type")  # peft of a type it has not heard of
            super().__init__(base_layer, adapter_name, config, **kwargs)
        # What GPT-2's Conv1D wants, whose weight lies the other way round; that of its quantized twin does not.
        self.fan_in_fan_out = False
        base = self.get_base_layer()
        if isinstance(base, QuantLinear):
            base._warned = True  # that nobody trains it: that is the point of an adapter

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Plain LoRA. Variants such as DoRA read and write the base weight; peft refuses them by this."""
        return {(): None}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise UsageError("an adapter cannot be merged into integer weights; merge_and_unload() makes float layers of them, "
                         "which gft.quantize_ can round again")

    @torch.no_grad()
    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool = False,
                                           adapter_names: list[str] | None = None) -> nn.Module:
        """The layer without adapters: the quantized one, or with merge=True a float one that has them in its weight, of
        the class that the layer had before it was quantized."""
        base = self.get_base_layer()
        if not merge:
            return base
        assert isinstance(base, QuantLinear)
        linear = base.to_float()
        for adapter in adapter_names or self.active_adapters:
            if adapter not in self.lora_A:
                continue
            linear.weight += self.get_delta_weight(adapter).to(linear.weight.dtype)
            if self.lora_bias[adapter]:
                up: Any = self.lora_B[adapter]
                extra = up.bias.detach() * self.scaling[adapter]
                linear.bias = nn.Parameter(extra if linear.bias is None else linear.bias + extra)
        if safe_merge and not bool(torch.isfinite(linear.weight).all()):
            raise UsageError("the merged weight holds NaN or inf; the adapter is broken")
        return linear if base.transposed_type is None else transposed_linear(linear, base.transposed_type)
