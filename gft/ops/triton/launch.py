"""Launching a kernel again and again.

Triton binds, specialises and looks up at every launch, which takes the host longer than many a kernel runs. What all that
finds depends on types, on whether pointers and sizes are multiples of 16, and on constants. Where a caller can tell in a few
words that these are as they were (`key`), the kernel that was found the last time is launched directly.
"""

from collections.abc import Hashable, Iterable, Mapping
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
        # By key and device: which arguments are tensors or tuples of them; what was found, by which of these are aligned.
        self._known: dict[Hashable, tuple[tuple[int, ...], dict[int, _Found]]] = {}

    def __call__(self, key: Hashable,  # equal keys: the same constants, options, types of tensors and specialised numbers
                 grid: tuple[int, int, int],
                 arguments: tuple[Any, ...],  # all that are no constants, in the kernel's order; the first of them tensors
                 constants: Mapping[str, Any],  # the rest, in the kernel's order
                 **options: Any) -> None:
        first = arguments[0]
        device = (first[0] if isinstance(first, tuple) else first).device.index
        if device is not None and device != torch.cuda.current_device():  # Triton launches on the current device
            with torch.cuda.device(device):
                return self(key, grid, arguments, constants, **options)
        known = self._known.get((key, device))
        found = None if known is None else known[1].get(_unaligned(arguments, known[0]))
        if found is None:
            self._find((key, device), grid, arguments, constants, options)
        else:
            found.run(*grid, driver.active.get_current_stream(device), found.function, found.metadata, None, None, None,
                      *arguments, *found.constants)
        return None

    def _find(self, key: Hashable, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: Mapping[str, Any],
              options: Mapping[str, Any]) -> None:
        """Launch it by Triton, and keep what Triton has found."""
        compiled = self.kernel[grid](*arguments, **constants, **options)
        if compiled is None or not REPEATS:  # the interpreter compiles nothing
            return
        assert self.kernel.arg_names[len(arguments) :] == list(constants), "constants in the kernel's order"
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        tensors = tuple(place for place, one in enumerate(arguments) if _begins(one))
        _, by_alignment = self._known.setdefault(key, (tensors, {}))
        by_alignment[_unaligned(arguments, tensors)] = _Found(
            compiled.run, compiled.function, compiled.packed_metadata, tuple(constants.values()))


def _begins(one: Any) -> bool:
    """Is it a tensor, or a tuple of them?"""
    return isinstance(one, Tensor) or (isinstance(one, tuple) and isinstance(one[0], Tensor))


def _unaligned(arguments: tuple[Any, ...], tensors: Iterable[int]) -> int:
    """Which tensors begin where Triton cannot read 16 bytes at a time, a bit each."""
    bits, bit = 0, 1
    for place in tensors:
        one = arguments[place]
        for each in one if isinstance(one, tuple) else (one,):
            if each.data_ptr() & ALIGNED:
                bits |= bit
            bit <<= 1
    return bits
