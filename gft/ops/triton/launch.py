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


class Found(NamedTuple):
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
        self._known: dict[Hashable, tuple[tuple[int, ...], dict[int, Found]]] = {}

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
        if known is not None:
            tensors, by_alignment = known
            unaligned, addresses = _addresses(arguments, tensors)
            found = by_alignment.get(unaligned)
            if found is not None:
                found.run(*grid, driver.active.get_current_stream(device), found.function, found.metadata, None, None, None,
                          *addresses, *found.constants)
                return None
        self._find((key, device), grid, arguments, constants, options)
        return None

    def found(self, key: Hashable, device: torch.device) -> Found | None:
        """What an earlier launch with this key and with aligned tensors has found, for who launches it by himself."""
        known = self._known.get((key, device.index))
        return None if known is None else known[1].get(0)

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
        by_alignment[_addresses(arguments, tensors)[0]] = Found(
            compiled.run, compiled.function, compiled.packed_metadata, tuple(constants.values()))


def _begins(one: Any) -> bool:
    """Is it a tensor, or a tuple of them?"""
    return isinstance(one, Tensor) or (isinstance(one, tuple) and isinstance(one[0], Tensor))


def _addresses(arguments: tuple[Any, ...], tensors: Iterable[int]) -> tuple[int, list[Any]]:
    """Which tensors begin where Triton cannot read 16 bytes at a time, a bit each; and all arguments, addresses in the place
    of tensors: of those Triton would ask the driver whose they are."""
    bits, bit, addresses = 0, 1, list(arguments)
    for place in tensors:
        one = arguments[place]
        if isinstance(one, tuple):
            addresses[place] = tuple(each.data_ptr() for each in one)
        else:
            addresses[place] = one.data_ptr()
        for address in addresses[place] if isinstance(one, tuple) else (addresses[place],):
            if address & ALIGNED:
                bits |= bit
            bit <<= 1
    return bits, addresses
