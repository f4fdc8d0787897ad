"""What a layer takes over of a state_dict, looked at before anything of it is copied.

Integers that mean something else, levels outside of the grid, scales that are not above 0: each would be multiplied by
without a word. A model on the meta device, or one whose rows ranks share out, has nothing to look at here yet.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gft.errors import UsageError, shortened
from gft.saved import is_plain
from gft.sharding import is_sharded
from gft.storage import Storage


def rename(state_dict: dict[str, Any], prefix: str) -> None:
    """Give the weight its name of today: in a float layer's state_dict, which is refused, and at a time when integers had
    this name it is "weight"."""
    weight = state_dict.pop(prefix + "weight", None)
    if isinstance(weight, Tensor) and weight.dim() > 1:  # else what integrations/hf puts there to be refused by float layers
        state_dict[prefix + "qweight"] = weight


def check_state(layer: Any, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Raise unless a layer can take over what a state_dict has of it. To compare shapes of weights and biases is torch's."""
    name = prefix.rstrip(".") or type(layer).__name__
    stored, scale, log_gain = (state_dict.get(f"{prefix}{own}") for own in ("qweight", "scale", "log_gain"))
    if scale is not None:
        check_scale(layer, scale, name)
    if log_gain is not None and not (isinstance(log_gain, Tensor) and log_gain.shape in ((), (1,)) and
                                     log_gain.is_floating_point()):
        raise UsageError(f"{name}: the state_dict holds a log_gain that is {shortened(log_gain)} where one float belongs")
    if stored is None:
        if f"{prefix}qweight" in state_dict:
            raise UsageError(f"{name}: the state_dict holds None where the weight belongs; it is damaged")
        return
    if not isinstance(stored, Tensor) or stored.dtype != layer.qweight.dtype:
        found = f"a {stored.dtype}" if isinstance(stored, Tensor) else shortened(stored)
        raise UsageError(f"{name}: the state_dict holds {found} weight, this layer stores {layer.qweight.dtype}; load "
                         "float weights into the float model and call gft.quantize_ after, or build the layer with the same "
                         "memory")
    if is_plain(layer.qweight) and not is_plain(stored):
        raise UsageError(f"{name}: the state_dict holds a weight without numbers of its own (sparse, or on meta); "
                         "load one that has them")
    code = state_dict.get(f"{prefix}_extra_state")
    storage = layer.storage if code is None else storage_of(layer, code, name)
    if stored.shape == layer.qweight.shape:
        check_levels(stored, storage, name, is_older(code, storage))


def check_scale(layer: Any, scale: Any, name: str) -> None:
    """Raise unless these can be the layer's scales."""
    if not isinstance(scale, Tensor) or not scale.is_floating_point():
        raise UsageError(f"{name}: the state_dict holds scales that are {shortened(scale)} where floats belong")
    if scale.shape != layer.scale.shape:
        raise UsageError(f"{name}: the state_dict holds scales of shape {tuple(scale.shape)}, this layer "
                         f"{tuple(layer.scale.shape)}; build it with the same scales=")
    if is_plain(layer.scale) and not is_plain(scale):
        raise UsageError(f"{name}: the state_dict holds scales without numbers of their own (sparse, or on meta); "
                         "load some that have them")
    if _has_numbers(scale) and not are_scales(scale):
        raise UsageError(f"{name}: the state_dict holds scales that are NaN, inf, 0 or below; it is damaged")


def are_scales(scale: Tensor) -> bool:
    """Are all of them numbers above 0?"""
    return bool(((scale > 0) & torch.isfinite(scale)).all())


def check_levels(stored: Tensor, storage: Storage, name: str, older: bool = False) -> None:
    """Raise unless all levels of a stored weight are on its grid."""
    if _has_numbers(stored) and not storage.holds(stored, older):
        raise UsageError(f"{name}: the state_dict holds levels beyond ±{storage.largest}, which {storage.bits} bits do not "
                         "have; it is damaged")


def storage_of(layer: Any, code: Any, name: str) -> Storage:
    """The storage that a file's `_extra_state` tells, if this layer can take it over."""
    numbers = code.tolist() if isinstance(code, Tensor) and is_plain(code) and code.dim() == 1 and len(code) < 9 else None
    storage = Storage.from_code(numbers)
    if (storage.bits, storage.asked_for) != (layer.bits, layer.memory):
        raise UsageError(f"{name}: the state_dict holds {storage.bits}-bit weights with memory={storage.asked_for!r}, this "
                         f"layer has bits={layer.bits}, memory={layer.memory!r}; build it the same way")
    return storage


def is_older(code: Tensor | None, storage: Storage) -> bool:
    """Is a packed weight of a time when spare bits were left unused?"""
    return code is not None and len(code) == 2 and storage.spare_bits > 0


def _has_numbers(tensor: Tensor) -> bool:
    return not is_sharded(tensor) and is_plain(tensor) and tensor.numel() > 0
