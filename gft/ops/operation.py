"""One table of operations, each with a definition in torch and, for some devices, a faster twin.

An operation is called like a function. It runs the twin that the backend of the tensor's device offers under its name, and
its own torch definition where there is none, or where the twin answers NotImplemented for this input. A twin gives the same
result as the definition, bit for bit where integers are concerned; the tests compare the two.

Backends are looked up when first needed, never at import: the C library is compiled then, and Triton is imported then.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, update_wrapper
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

# Device type -> the module whose `twins()` returns {operation's name: function}, empty where it cannot run.
BACKENDS = {"cpu": "gft.ops.native", "cuda": "gft.ops.triton"}


@cache
def twins(device_type: str) -> Mapping[str, Callable[..., Any]]:
    """The twins of a kind of device, by the operation's name; none where there is no compiler or no Triton."""
    if device_type not in BACKENDS:
        return {}
    try:
        return import_module(BACKENDS[device_type]).twins()
    except ImportError:  # Triton is not installed
        return {}


def _device_of(subject: Any) -> torch.device:
    """The device of a tensor, of something with a `stored` weight, or of the first in a sequence of either."""
    if isinstance(subject, Tensor):
        return subject.device
    return _device_of(subject[0]) if isinstance(subject, Sequence) else subject.stored.device


class Operation(Generic[P, R]):
    """A torch definition that a twin may stand in for. The first argument says on which device."""

    def __init__(self, definition: Callable[P, R]) -> None:
        update_wrapper(self, definition)
        self.definition = definition
        self.name = definition.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        device = first.device if isinstance(first, Tensor) else _device_of(first)
        twin = twins(device.type).get(self.name)
        if twin is not None:
            result = twin(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.definition(*args, **kwargs)


def operation(definition: Callable[P, R]) -> Operation[P, R]:
    """Enter a torch definition into the table."""
    return Operation(definition)
