"""pack_: weights with memory to levels packed side by side, losslessly, for inference and shipping."""

from torch import nn

from gft.errors import UsageError
from gft.layers import quantized_layers
from gft.sharding import is_sharded


def pack_(model: nn.Module) -> nn.Module:
    """Pack the levels of every quantized layer, in place: 0.25 B a weight at 2 bits, 0.5 B at 3 and 4, where memory took
    1 B, or "half" half a byte; returns the model.

    The levels, and so what the network computes, stay as they are to the bit. What is given up is the memory of votes not
    yet spent, so release the optimizer first, and keep a checkpoint if the model may be trained on: a packed weight trains
    too, but learns less well.
    """
    layers = quantized_layers(model)
    if not layers:
        raise UsageError("no quantized layer in this model; call gft.quantize_(model, bits=…) first")
    for name, layer in layers.items():
        if is_sharded(layer.qweight):
            raise UsageError("fully_shard has shared this model's weights out; load its checkpoint into a model that is "
                             "whole, and call gft.pack_ there")
        if layer.votes is not None and layer.votes.optimizer() is not None:
            raise UsageError(f"{name or type(layer).__name__} is being trained; call the optimizer's release() first")
    for layer in layers.values():
        if layer.memory:
            layer.change_storage_(*layer.packed())
    return model
