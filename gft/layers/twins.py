"""Which float layers have a twin with integer weights, and why the others have none."""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from gft.layers.attention import QuantMultiheadAttention
from gft.layers.convolution import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
)
from gft.layers.experts import QuantExperts, are_fused_experts
from gft.layers.layer import QuantLayer
from gft.layers.linear import QuantLinear, linear_of

# Exact types: a subclass may be used by its parent in ways of its own (nn.MultiheadAttention reads its out_proj's
# weight without calling it).
TWINS: dict[type[nn.Module], Any] = {
    nn.Linear: QuantLinear,
    nn.Conv1d: QuantConv1d,
    nn.Conv2d: QuantConv2d,
    nn.Conv3d: QuantConv3d,
    nn.ConvTranspose1d: QuantConvTranspose1d,
    nn.ConvTranspose2d: QuantConvTranspose2d,
    nn.ConvTranspose3d: QuantConvTranspose3d,
    nn.MultiheadAttention: QuantMultiheadAttention,
}
NOT_CHOSEN = "left out by filter_fn"
QUANTIZED = (QuantLayer, QuantMultiheadAttention, QuantExperts)  # what has a to_float()


def twin_of(module: nn.Module) -> Any:
    """The class with integer weights that stands for such a layer; None if there is none."""
    if _weight_is_computed(module) or why_not_its_weight(module):
        return None
    if is_transposed_linear(module):
        return QuantLinear
    return TWINS.get(type(module)) or (QuantExperts if are_fused_experts(module) else None)


def quantized_twin(module: Any, bits: int, **settings: Any) -> Any:
    """The layer with integer weights nearest to a float one that has a twin."""
    kind = twin_of(module)
    if not is_transposed_linear(module):
        return kind.from_float(module, bits, **settings)
    twin = kind.from_float(linear_of(module.weight.t(), module.bias).train(module.training), bits, **settings)
    twin.transposed_type = type(module)
    return twin


def float_twin(layer: Any) -> nn.Module:
    """The float layer that a quantized one was made of, with the values it computes with now."""
    kind = getattr(layer, "transposed_type", None)
    return layer.to_float() if kind is None else transposed_linear(layer.to_float(), kind)


def transposed_linear(linear: nn.Linear, kind: Any) -> nn.Module:
    """A linear layer as transformers' Conv1D, which always has a bias."""
    with torch.device("meta"):
        twin = kind(linear.out_features, linear.in_features)
    twin.weight = nn.Parameter(linear.weight.detach().t().contiguous())
    twin.bias = nn.Parameter(linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach())
    return twin.train(linear.training)


def _weight_is_computed(module: nn.Module) -> bool:
    """Is its weight made of other parameters before each forward pass (weight_norm, spectral_norm, prune)?"""
    return type(module) in TWINS and not isinstance(module, nn.MultiheadAttention) and "weight" not in module._parameters


def why_not_its_weight(module: nn.Module) -> str:
    """Why the weight itself cannot become integers, as that of nn.Linear(4, 0); empty if it can."""
    for weight in module.parameters(recurse=False):
        if not is_lazy(weight) and weight.dim() > 1 and not weight.numel():
            return "its weight is empty"
        if not is_lazy(weight) and not weight.is_floating_point():
            return f"its weight is {str(weight.dtype).removeprefix('torch.')}, not float"
    return ""


def is_transposed_linear(module: nn.Module) -> bool:
    """transformers' Conv1D (GPT-2): a linear layer with its weight the other way round. By name: transformers need not be
    there."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def why_float(module: nn.Module) -> str:
    """Why a layer with float weights of its own has stayed so, in a few words."""
    if twin_of(module) is not None:
        return NOT_CHOSEN
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return "has no weights before its first input"
    if why := why_not_its_weight(module):
        return why
    if _weight_is_computed(module) or isinstance(module, ParametrizationList):
        return "its weight is computed anew before each forward pass (weight_norm, spectral_norm, prune)"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "its rows are looked up, not multiplied"
    if isinstance(module, nn.RNNBase):
        return "torch runs all of it as one kernel on float weights"
    if all(parameter.dim() < 2 for parameter in module.parameters(recurse=False)):
        return "a vector, not a matrix"
    for kind in TWINS:
        if isinstance(module, kind):
            return f"a subclass of {kind.__name__}, which may be used in ways of its own"
    return "holds a weight in a way that gft does not know"
