"""What exports share: a layer as levels and scales, and a model with other layers in the place of its quantized ones."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gft.errors import UsageError, UsageTypeError
from gft.layers import QuantLayer, quantized_layers


def layers_to_export(model: Any) -> dict[str, QuantLayer]:
    """The quantized layers of a model, by name, or an error that says why there is nothing to export."""
    if not isinstance(model, nn.Module):
        raise UsageTypeError(f"only a torch.nn.Module can be exported, not {type(model).__name__}; build the model and load "
                             "its weights first")
    layers = quantized_layers(model)
    if not layers:
        raise UsageError("no quantized layer in this model; call gft.quantize_(model, bits=…) first, or export it by "
                         "torch's own means")
    return layers


@torch.no_grad()
def levels_and_scales(layer: QuantLayer) -> tuple[Tensor, Tensor]:
    """(rows, columns) int8 levels, and (rows, groups) float32 scales with the gain in them; one group of columns after
    another shares a scale. levels · scales is the layer's weight up to one rounding of float32."""
    levels = layer.storage.levels(layer.qweight, layer.columns)
    scales = layer.scales_by_group()
    return levels, scales if layer.log_gain is None else scales * layer.gain().float()


def with_layers_replaced(model: nn.Module, build: Callable[[QuantLayer], nn.Module]) -> nn.Module:
    """A copy of the model, in eval mode, with build(layer) in the place of each quantized layer.

    All tensors of the other layers are the model's own, so the copy takes no memory worth mentioning, and the model is
    left as it is. Outputs of transformers' own types become plain dicts: whoever runs the graph may not have transformers.
    """
    layers = layers_to_export(model).values()
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    memo |= {id(layer): build(layer) for layer in layers}
    replaced = copy.deepcopy(model, memo).eval()
    replaced.register_forward_hook(lambda module, inputs, output: _plain(output))
    return replaced


def _plain(output: Any) -> Any:
    return {key: _plain(value) for key, value in output.items()} if isinstance(output, dict) else output


@torch.no_grad()
def packed(layer: QuantLayer) -> QuantLayer:
    """A copy of the layer without memory, the same levels side by side, and with its gain in its scale."""
    twin = copy.deepcopy(layer, {} if layer.bias is None else {id(layer.bias): layer.bias})
    if layer.memory:
        twin.change_storage_(*layer.packed())
    if layer.log_gain is not None:
        twin.scale, twin.log_gain = layer.scale.float() * layer.gain().float(), None
    return twin
