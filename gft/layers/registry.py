"""Whose weight a parameter is: an optimizer gets parameters, and finds their layers here."""

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gft.sharding import is_sharded

if TYPE_CHECKING:
    from gft.layers.layer import QuantLayer

# Weight -> its layer, both held weakly: none of this keeps a model alive.
_LAYER_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register(layer: "QuantLayer") -> None:
    """Let the optimizer find this layer by its weight."""
    _LAYER_OF[layer.qweight] = weakref.ref(layer)


def layer_of(weight: Any) -> "QuantLayer | None":
    """The living layer whose weight this is, if it is one."""
    if not isinstance(weight, Tensor) or weight not in _LAYER_OF:
        return None
    layer = _LAYER_OF[weight]()
    if layer is None or layer.qweight is weight:
        return layer
    gathered = is_sharded(weight) and not is_sharded(layer.qweight)  # fully_shard has all rows there for the moment
    return layer if gathered else None
