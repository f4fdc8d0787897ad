"""compressed-tensors: a quantized transformers model as a folder that `from_pretrained` loads without gft.

    to_compressed_tensors(model, "folder")
    AutoModelForCausalLM.from_pretrained("folder")      # with the package compressed-tensors; gft need not be there

The format is `pack-quantized`: levels of 2 to 8 bits side by side in int32 words, a float32 scale for each row or group of a
row, no activations quantized. Nothing is rounded: a loaded weight is levels · scale with the gain in the scale, which is the
layer's own up to one rounding of float32, or of the type that the model is loaded in.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gft.errors import UsageError, UsageTypeError, install_hint
from gft.export.weights import layers_to_export, levels_and_scales
from gft.files import make_folder
from gft.layers import QuantLayer, QuantLinear
from gft.storage import check_bits

PACKED_AT_ONCE = 1 << 24  # weights whose single bits are held at once, a byte each


def to_compressed_tensors(model: Any, folder: str | Path, *, bits: int | None = None,
                          tokenizer: Any = None) -> Path:
    """Save a transformers model with its integer weights in compressed-tensors' pack-quantized; returns the folder.

    bits: None stores each layer in its own bits, so a ternary weight takes 0.25 B and one of 3 bits 0.375 B. 4 or 8 stores
        all layers in so many, for runtimes that have kernels for those alone; fewer than a layer has are refused.

    tokenizer: saved beside the model.

    Only layers that are nn.Linear in the float model can be stored so; any other is refused before a file is written. The
    model is left as it is.
    """
    layers = layers_to_export(model)
    float_model = _float_model(model)
    for name, layer in layers.items():
        _refuse(name, layer, float_model, bits)
    stored = {name: layer.bits if bits is None else bits for name, layer in layers.items()}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in layers}
    for name, layer in layers.items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in packed_tensors(layer, stored[name]).items()}
        if float_model.get_submodule(name).bias is not None:
            bias = torch.zeros(layer.rows, dtype=model.dtype) if layer.bias is None else layer.bias.detach()
            tensors[f"{name}.bias"] = bias
    float_model.config.quantization_config = quantization_config(layers, stored, float_model)
    float_model.save_pretrained(make_folder(folder), state_dict=tensors)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return Path(folder)


def packed_tensors(layer: QuantLayer, bits: int) -> dict[str, Tensor]:
    """What the format keeps of a layer's weight."""
    levels, scales = levels_and_scales(layer)
    return {"weight_packed": pack_words(levels.cpu(), bits), "weight_scale": scales.cpu().contiguous(),
            "weight_shape": torch.tensor([layer.rows, layer.columns])}


def pack_words(levels: Tensor, bits: int) -> Tensor:
    """(rows, columns) int8 -> (rows, words) int32: number i of a row is level + 2^(bits-1), and lies at the bits
    i · bits … (i+1) · bits - 1 of the row, the lowest of a word first. A short last word ends in zeros."""
    rows, columns = levels.shape
    words = np.zeros((rows, -(-columns * bits // 32) * 4), dtype=np.uint8)
    places, at_once = np.arange(bits, dtype=np.uint8), max(1, PACKED_AT_ONCE // columns)
    for start in range(0, rows, at_once):
        codes = (levels[start : start + at_once].numpy().astype(np.int16) + (1 << bits - 1)).astype(np.uint8)
        single = (codes[:, :, None] >> places & 1).reshape(len(codes), -1)
        packed = np.packbits(single, axis=1, bitorder="little")
        words[start : start + at_once, : packed.shape[1]] = packed
    return torch.from_numpy(words.view("<i4").astype(np.int32))


def quantization_config(layers: dict[str, QuantLayer], stored: dict[str, int], float_model: nn.Module) -> dict[str, Any]:
    """What config.json says of the weights: a group of layers for each way of storing them."""
    groups: dict[tuple[int, int | None], list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault((stored[name], None if layer.group == layer.columns else layer.group), []).append(name)
    linears = [name for name, module in float_model.named_modules() if isinstance(module, nn.Linear)]
    schemes = {}
    for number, ((bits, group), names) in enumerate(groups.items()):
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if group else "channel",
                   "group_size": group, "dynamic": False}
        # By type where one group has all of them, as other tools write it, else by name.
        schemes[f"group_{number}"] = {"targets": ["Linear"] if len(groups) == 1 else names, "weights": weights,
                                      "input_activations": None, "output_activations": None, "format": "pack-quantized"}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": schemes, "ignore": [name for name in linears if name not in layers], "kv_cache_scheme": None}


def _float_model(model: Any) -> Any:
    """The float model that `from_pretrained` will build, without values."""
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise UsageError("compressed-tensors folders are written with transformers; install it with: "
                         f"{install_hint('hf')}") from error
    if not isinstance(model, PreTrainedModel):
        raise UsageTypeError(f"a compressed-tensors folder is loaded by transformers, which does not know "
                             f"{type(model).__name__}; export it with gft.export.onnx or gft.export.program")
    config: Any = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        float_model: Any = type(model)(config)
    float_model.to(model.dtype)
    if model.can_generate():
        float_model.generation_config = model.generation_config
    return float_model


def _refuse(name: str, layer: QuantLayer, float_model: nn.Module, bits: int | None) -> None:
    """Raise for what the format, or its loader, has no place for."""
    modules, parts = dict(float_model.named_modules()), name.split(".")
    there = next(modules[whole] for size in range(len(parts), -1, -1) if (whole := ".".join(parts[:size])) in modules)
    is_part = name not in modules  # of experts, or of an attention in one module
    if is_part or type(there) is not nn.Linear or not isinstance(layer, QuantLinear):
        raise UsageError(f"{name} is {'part of ' if is_part else ''}a {type(there).__name__}, and compressed-tensors "
                         "stores nn.Linear only; leave such layers float with filter_fn, or export with gft.export.onnx")
    if bits is not None and check_bits(bits) < layer.bits:
        raise UsageError(f"bits={bits}: {name} has {layer.bits} bits; store it in at least as many")
