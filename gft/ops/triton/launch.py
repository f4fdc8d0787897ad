"""Launching a kernel again and again.

Triton binds, specialises and looks up at every launch, which takes the host longer than many a kernel runs. What all that
finds depends on types, on whether pointers and sizes are multiples of 16, and on constants. Where a caller can tell in a few
words that these are as they were (`key`), the kernel that was found the last time is launched directly.
"""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

ALIGNED = 15  # bits of an address that are 0 where Triton reads 16 bytes at a time
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
REPEATS = VERSION >= (3, 3)  # older compiled kernels take other arguments


class _Found(NamedTuple):
    """A compiled kernel and what its launches have in common."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class Launcher:
    """Launches one kernel: launcher(key, grid, arguments, constants)."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._found: dict[Hashable, _Found] = {}

    def __call__(self, key: Hashable,  # equal keys: the same constants, options, types of tensors and specialised numbers
                 grid: tuple[int, int, int],
                 arguments: tuple[Any, ...],  # all that are no constants, in the kernel's order; the first is a tensor
                 constants: Mapping[str, Any],  # the rest, in the kernel's order
                 **options: Any) -> None:
        device = arguments[0].device.index
        if device is not None and device != torch.cuda.current_device():  # Triton launches on the current device
            with torch.cuda.device(device):
                return self(key, grid, arguments, constants, **options)
        found = self._found.get((key, device))
        if found is None or not _aligned(arguments):
            compiled = self.kernel[grid](*arguments, **constants, **options)
            if compiled is not None and REPEATS and _aligned(arguments):  # the interpreter compiles nothing
                assert self.kernel.arg_names[len(arguments) :] == list(constants), "constants in the kernel's order"
                compiled = compiled.result() if hasattr(compiled, "result") else compiled
                self._found[key, device] = _Found(compiled.run, compiled.function, compiled.packed_metadata,
                                                  tuple(constants.values()))
            return None
        stream = driver.active.get_current_stream(device)
        found.run(*grid, stream, found.function, found.metadata, None, None, None, *arguments, *found.constants)
        return None


def _aligned(arguments: tuple[Any, ...]) -> bool:
    """Do all tensors, also those in tuples, begin where Triton can read 16 bytes at a time?"""
    for one in arguments:
        if isinstance(one, Tensor):
            if one.data_ptr() & ALIGNED:
                return False
        elif isinstance(one, tuple) and not _aligned(one):
            return False
    return True
