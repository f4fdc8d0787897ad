"""save_pretrained and from_pretrained for quantized models, by transformers' own registration of quantizers.

A folder tells in config.json which layers are integers and how they are built:

    "quantization_config": {"quant_method": "gft", "bits": 4, …, "layers": [{"bits": 4, "memory": true, …, "names": […]}]}

from_pretrained builds the float model on the meta device, `gft.quantize_` replaces those layers there, and transformers
fills them from the file, `_extra_state` included. Where a float layer would look for its `weight`, the file holds the four
numbers of the storage instead: transformers without this module would only warn of an unknown quant_method and start those
layers at random; so it refuses, since a weight of that size fits nowhere.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

import gft
from gft.convert import dequantize_, quantize_, report, unreported
from gft.errors import UsageError, shortened
from gft.initialize import groups_a_row
from gft.layers import (
    COMPUTE,
    QuantLayer,
    QuantMultiheadAttention,
    check_compute,
    number_layers,
    quantized_layers,
    some_names,
    twin_of,
)
from gft.saved import mapping, sequence, whole_number
from gft.settings import check_choice
from gft.storage import HALF, Storage, check_bits
from gft.summary import summary

METHOD = "gft"
KNOWN = ("names", "numbers", "bits", "memory", "gain", "bias", "scales", "compute", "gain_dtype",
         "scale_dtype")  # of a group of layers


class GftConfig(QuantizationConfigMixin):
    """How a model is quantized: `from_pretrained(…, quantization_config=GftConfig(bits=2))` takes it, config.json holds it.

    bits, memory, gain, scales, compute: `gft.quantize_`'s.
    modules_to_not_convert: names, ends of names or patterns of layers that stay float; by default the output head and what
        it is tied to. [] leaves nothing out.
    layers: which layers are integers and how each is built; written by save_pretrained.
    """

    def __init__(self, bits: int = 4, memory: bool | str = True, gain: bool | None = None, scales: str | int = "tensor",
                 modules_to_not_convert: list[str] | None = None, layers: list[dict[str, Any]] | None = None,
                 compute: str | None = None, **kwargs: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.bits, self.gain, self.scales = check_bits(bits), gain, scales
        self.memory = Storage.as_asked(bits, memory).asked_for
        check_compute(compute, bits)
        self.compute = compute
        self.modules_to_not_convert, self.layers = modules_to_not_convert, None if layers is None else checked_layers(layers)
        unknown = kwargs.keys() - {"quant_method", "gft_version"}
        if unknown:
            raise UsageError(f"GftConfig has no setting {', '.join(sorted(unknown))}; its settings are bits, memory, gain, "
                             "scales, compute and modules_to_not_convert")

    @classmethod
    def of(cls, model: nn.Module, packed: bool = False) -> "GftConfig":
        """The config of a model as it is now, or with packed=True as it is when its memory is left out."""
        layers = quantized_layers(model)
        by_number = [layer.number for layer in layers.values()] != list(range(len(layers)))
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        for name, layer in layers.items():
            settings = settings_of(layer, packed)
            group = groups.setdefault(tuple(settings.values()), {**settings, "names": []})
            group["names"].append(name)
            if by_number and layer.number is not None:  # they decide which random numbers a layer draws
                group.setdefault("numbers", []).append(layer.number)
        most = max(groups.values(), key=lambda group: len(group["names"]))
        return cls(most["bits"], most["memory"], most["gain"], most["scales"], layers=list(groups.values()),
                   compute=most.get("compute"))

    def to_dict(self) -> dict[str, Any]:
        config = {**super().to_dict(), "gft_version": gft.__version__}
        if config["compute"] is None:  # earlier versions read it
            del config["compute"]
        return config


def checked_layers(groups: Any) -> list[dict[str, Any]]:
    """What a config.json says of layers, if that is what `GftConfig.of` can have written."""
    for group in sequence(groups, "layers in config.json"):
        group = mapping(group, "a group of layers in config.json")
        names, numbers = group.get("names"), group.get("numbers", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UsageError("a group of layers in config.json has no list of names; save the quantized model anew")
        if not isinstance(numbers, list) or len(numbers) not in (0, len(names)):
            raise UsageError("a group of layers in config.json has other numbers than names; save the quantized model anew")
        for number in numbers:
            whole_number(number, "the number of a layer in config.json", 2**30)
        check_bits(group.get("bits"))  # type: ignore[arg-type]
        check_choice("memory in config.json", group.get("memory"), (False, True, HALF))
        for key in ("gain", "bias"):
            check_choice(f"{key} in config.json", group.get(key, True if key == "bias" else None), (False, True))
        check_choice("compute in config.json", group.get("compute"), COMPUTE)
        if group.get("scales") not in ("tensor", "row"):
            whole_number(group.get("scales"), "scales in config.json", 2**31)
        for key in ("gain_dtype", "scale_dtype"):
            if key in group:
                check_choice(f"{key} in config.json", group[key], ("float32", "float16", "bfloat16", "float64"))
        unknown = [key for key in group if key not in KNOWN]
        if unknown:
            raise UsageError(f"config.json says {shortened(unknown[0])} of layers, which this version of gft does not know; "
                             "update gft")
    return groups


def settings_of(layer: QuantLayer, packed: bool = False) -> dict[str, Any]:
    """What `gft.quantize_` has to be told to build this layer again."""
    settings: dict[str, Any] = {"bits": layer.bits, "memory": False if packed else layer.memory,
                                "gain": layer.log_gain is not None, "bias": layer.bias is not None, "scales": "tensor"}
    if layer.compute is not None:
        settings["compute"] = layer.compute
    if layer.log_gain is not None:
        settings["gain_dtype"] = str(layer.log_gain.dtype).removeprefix("torch.")
    if layer.scale.dim():
        settings["scales"] = "row" if layer.scale.shape[-1] == 1 else layer.group
        settings["scale_dtype"] = str(layer.scale.dtype).removeprefix("torch.")
    return settings


def quantize_as(model: nn.Module, settings: Mapping[str, Any], chosen: Any) -> None:
    quantize_(model, settings["bits"], chosen, memory=settings["memory"], gain=settings["gain"],
              bias=settings.get("bias", True), scales=settings["scales"], compute=settings.get("compute"))


class GftQuantizer(HfQuantizer):
    """What transformers asks while it saves and loads a quantized model."""

    quantization_config: GftConfig
    pack = False  # while hf.save writes: leave the memory out

    # ------------------------------------------------------------------ loading

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if not self.pre_quantized:  # the float weights are loaded first
            return model
        if not self.quantization_config.layers:
            raise UsageError("config.json names no quantized layers; save the quantized model anew with save_pretrained")
        with unreported():
            self._build_layers(model, self.quantization_config.layers)
        layers = quantized_layers(model)
        if not any("numbers" in group for group in self.quantization_config.layers):
            for layer in layers.values():
                layer.number = None
        number_layers(layers)
        self._expect_codes(model, layers)
        return model

    def _build_layers(self, model: PreTrainedModel, groups: list[dict[str, Any]]) -> None:
        """Put empty quantized layers where the folder has them."""
        for group in groups:
            names = names_in(model, group["names"])
            new = set(names) - quantized_layers(model).keys()
            if new:  # a layer may be made of a part of a float one, whose name is then the beginning of its own
                new |= {".".join(parts[:size]) for parts in (name.split(".") for name in new) for size in range(len(parts))}
                quantize_as(model, group, lambda _, name, new=frozenset(new): name in new)
            layers = quantized_layers(model)
            refuse_missing(model, [name for name in names if name not in layers])
            for name, number in zip(names, group.get("numbers", ()), strict=False):
                layers[name].number = number
            for layer in (layers[name] for name in names):  # whatever type the model is loaded in: to round one of these
                if "gain_dtype" in group:  # would move all weights
                    layer.log_gain = nn.Parameter(torch.zeros(1, dtype=getattr(torch, group["gain_dtype"])))
                if "scale_dtype" in group:
                    count = groups_a_row(group["scales"], layer.columns)  # parts of one module can differ in it
                    assert count is not None
                    layer.scale = layer.scale.new_ones(layer.rows, count, dtype=getattr(torch, group["scale_dtype"]))
        for module in model.modules():  # transformers would start an attention anew by its float weights, which it has not
            if any(isinstance(child, QuantMultiheadAttention) for child in module.children()):
                module._is_hf_initialized = True  # type: ignore[assignment]

    def _expect_codes(self, model: PreTrainedModel, layers: Iterable[str]) -> None:
        """The storage's four numbers in a float weight's place are for others to read: no surprise to this model."""
        prefix = f"{model.base_model_prefix}."
        names = "|".join(re.escape(name.removeprefix(prefix)) for name in layers)
        known = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = known | {rf"(?:^|\.)(?:{names})\.weight$"}  # type: ignore[assignment]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if self.pre_quantized:
            empty = [name for name, layer in quantized_layers(model).items()
                     if not (getattr(layer.qweight, "_is_hf_initialized", False) or layer.qweight.is_meta)]  # offloaded
            if empty:
                raise UsageError(f"the folder holds no integer weights for {some_names(empty)}; save the quantized model "
                                 "anew with save_pretrained")
            for name, layer in quantized_layers(model).items():
                layer.check_loaded(name)
            report(summary(model))  # now that tied weights are one
        else:
            self._quantize_loaded(model)
        attach(model)
        return model

    def _quantize_loaded(self, model: PreTrainedModel) -> None:
        config = self.quantization_config
        left = self.get_modules_to_not_convert(model, config.modules_to_not_convert)
        offloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if offloaded:
            raise UsageError(f"weights to quantize are offloaded ({some_names(offloaded)}); load the model with a "
                             "device_map that keeps it in memory")
        quantize_as(model, {key: getattr(config, key) for key in ("bits", "memory", "gain", "scales", "compute")},
                    lambda _, name: should_convert_module(name, left))

    # ------------------------------------------------------------------ saving

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """What save_pretrained writes; called before it writes config.json, which is renewed here."""
        layers = quantized_layers(model)
        if not layers:  # dequantized since
            self.remove_quantization_config(model)
            return None, {}
        model.config.quantization_config = GftConfig.of(model, self.pack)  # type: ignore[union-attr]
        state = dict(model.state_dict())
        for name, layer in layers.items():
            if self.pack and layer.memory:
                storage, state[f"{name}.qweight"] = layer.packed()
                state[f"{name}._extra_state"] = torch.tensor(storage.code, dtype=torch.uint8)
            state[f"{name}.weight"] = state[f"{name}._extra_state"].clone()
        return state, {}

    def is_serializable(self) -> bool:
        return True

    # ------------------------------------------------------------------ what else transformers asks

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        return dequantize_(model)


def names_in(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Names of layers, as a folder tells them, in this model: which may be that model with a head or without one."""
    modules, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."

    def has(name: str) -> bool:  # the layer, or what it is a part of once that is quantized: experts, an attention
        parts = name.split(".")
        whole = (modules.get(".".join(parts[:size])) for size in range(1, len(parts)))
        return name in modules or any(module is not None and twin_of(module) is not None for module in whole)

    own = {name: next(filter(has, (name, name.removeprefix(prefix), prefix + name)), None) for name in names}
    refuse_missing(model, [name for name, choice in own.items() if choice is None])
    return [choice for choice in own.values() if choice is not None]


def refuse_missing(model: nn.Module, missing: list[str]) -> None:
    if missing:
        raise UsageError(f"the folder has quantized layers that {type(model).__name__} has not ({some_names(missing)}); "
                         "load it as the model it was saved as")


def attach(model: nn.Module) -> nn.Module:
    """Let every transformers model in `model` save and load what its layers are now; returns `model`. `gft.quantize_` and
    `gft.dequantize_` call it; call it yourself after you have put quantized layers into a model by hand."""
    inside = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in reversed(inside):  # a model and its base share one config, which is to name the layers of the model
        quantizer = getattr(module, "hf_quantizer", None)
        ours = isinstance(quantizer, GftQuantizer)
        if quantized_layers(module):
            module.config.quantization_config = GftConfig.of(module)
            module.hf_quantizer = GftQuantizer(module.config.quantization_config)  # type: ignore[assignment]
            # Set while loading; transformers then refuses .half(), .float() and compiled training, which all work here.
            module.__dict__.pop("is_quantized", None)
        elif ours:
            quantizer.remove_quantization_config(module)  # type: ignore[union-attr]
    return model


register_quantization_config(METHOD)(GftConfig)
register_quantizer(METHOD)(GftQuantizer)
