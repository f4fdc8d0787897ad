"""quantize_ and dequantize_: a model's float layers onto the grid, in place, and back."""

import importlib
import re
import sys

from torch import nn

from gft.errors import UsageError
from gft.layers import FilterFn, QuantConv2d, QuantLayer, QuantLinear, number_layers, quantized_layers, some_names
from gft.storage import check_bits

# Exact types: a subclass may be used by its parent in ways of its own (nn.MultiheadAttention reads its out_proj's
# weight without calling it).
CONVERTIBLE: dict[type[nn.Module], type[QuantLinear] | type[QuantConv2d]] = {nn.Linear: QuantLinear, nn.Conv2d: QuantConv2d}


def quantize_(model: nn.Module, bits: int = 4, filter_fn: FilterFn | None = None, *, memory: bool = True,
              init: str = "keep", bias: bool = True, gain: bool | None = None) -> nn.Module:
    """Replace nn.Linear and nn.Conv2d layers by quantized ones, in place; returns the model.

    filter_fn(module, name) says which; all of them without it. init="keep" takes the float weights over, rounded to the
    grid, so a model's own initialisation or a pre-trained model carries over; "paper" (90 % zeros) and "variance"
    (a Gaussian) start anew. bias=False leaves the layers' biases out: the paper's quantized layers have none. gain=True
    multiplies each layer's product by a number that AdamW learns with the biases, False by none. By default ternary layers
    have gains, and in a model without any norm all do, since nothing else lets them grow beyond their grids; but neither
    with bias=False nor from the paper's start. Call it before the optimizers are built; nothing is changed if it raises.
    """
    check_bits(bits)
    if init not in ("keep", "paper", "variance"):
        raise UsageError(f"init={init!r}: choose keep, paper or variance")
    if type(model) in CONVERTIBLE:
        raise UsageError(f"the model is itself one {type(model).__name__} and cannot be replaced in place; use "
                         f"gft.{CONVERTIBLE[type(model)].__name__}.from_float(layer, bits={bits})")
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if type(module) in CONVERTIBLE]
    chosen = [(name, module) for name, module in named if filter_fn is None or filter_fn(module, name)]
    if not chosen:
        found = some_names([name for name, _ in named]) or "none"
        raise UsageError(f"no layer to quantize: filter_fn chose none of the model's nn.Linear and nn.Conv2d ({found}); "
                         "widen it")
    _refuse_shared(model, chosen)
    _refuse_other_quantizers(model)
    if gain is None:
        gain = bias and init != "paper" and (bits == 2 or not has_norms(model))
    layers = {name: CONVERTIBLE[type(module)].from_float(module, bits, memory=memory, init=init, gain=gain)  # type: ignore[arg-type]
              for name, module in chosen}
    for name, layer in layers.items():
        if not bias:
            layer.bias = None
        _replace(model, name, layer)
    number_layers(quantized_layers(model).values())
    _leave_fused_paths(model)
    _tell_transformers(model)
    return model


def dequantize_(model: nn.Module) -> nn.Module:
    """Replace every quantized layer by a float one with the same values, in place; returns the model."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, (QuantLinear, QuantConv2d))]
    if not layers or isinstance(model, QuantLayer):
        raise UsageError("no quantized layer inside this model; for a single layer call its to_float()")
    for name, layer in layers:
        _replace(model, name, layer.to_float())
    _tell_transformers(model)
    return model


def has_norms(model: nn.Module) -> bool:
    """Is there a normalisation layer, torch's own or another's (LayerNorm, BatchNorm2d, LlamaRMSNorm)? The word "norm" must
    end or be followed by another word: Normalize prepares images."""
    return any(re.search(r"[Nn]orm(?![a-z])", type(module).__name__) for module in model.modules())


def _refuse_shared(model: nn.Module, chosen: list[tuple[str, nn.Module]]) -> None:
    """A weight under two names would become two weights that drift apart."""
    users: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for own_name, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{own_name}" if name else own_name
            other = users.setdefault(id(parameter), full)
            shared = other != full and any(full == f"{layer}.weight" or other == f"{layer}.weight" for layer, _ in chosen)
            if shared:
                raise UsageError(f"{other} and {full} are one shared weight; leave its layers out with filter_fn, or "
                                 "untie them first")


def _refuse_other_quantizers(model: nn.Module) -> None:
    """transformers saves a model by the one quantizer it knows of it."""
    for module in model.modules():
        config = getattr(getattr(module, "hf_quantizer", None), "quantization_config", None)
        if config is not None and config.quant_method != "gft":
            raise UsageError(f"this model is quantized by another method already ({type(config).__name__}); load it without "
                             "that quantization_config first")


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, child, layer)


def _tell_transformers(model: nn.Module) -> None:
    """A model of transformers saves itself, and must know what its layers are now, or it would be loaded wrong without a
    word. Looked up by name: this room knows nothing of that library, and nothing is imported for other models."""
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is not None and any(isinstance(module, loaded.PreTrainedModel) for module in model.modules()):
        importlib.import_module("gft.integrations.hf.quantizer").attach(model)


def _leave_fused_paths(model: nn.Module) -> None:
    """torch's transformer encoder hands its layers' float weights to one kernel at inference; these are its own
    switches for "not applicable"."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and quantized_layers(module):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and quantized_layers(module):
            module.use_nested_tensor = False
