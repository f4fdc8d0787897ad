"""What the lab needs to know of a quantized layer's inside, asked in one place."""

from typing import Any


def shape_of(layer: Any) -> tuple[int, int]:
    """(out, in) of a quantized layer's weights, as the matrix they are stored as."""
    return layer.rows, layer.columns


def weights_of(layer: Any) -> int:
    """How many weights a quantized layer has, whatever bytes hold them."""
    out, features = shape_of(layer)
    return out * features


def votes_of(layer: Any) -> Any:
    """What a quantized layer holds of its votes between backward and step, tensors and all; None without an optimizer."""
    return layer.votes and vars(layer.votes)
