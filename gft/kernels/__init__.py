"""Fast twins of the torch definitions in vote.py and step.py, equal to them bit for bit.

    fused     Triton, for CUDA
    native    C, for the CPU, built when first needed

Each offers `quantize`, `rounding_factors` and `move`, functions of plain tensors and numbers that know nothing of layers
or optimizers. `twin_of` says which can work on a tensor; it looks when it is asked, never at import.
"""

from functools import cache
from types import ModuleType

from torch import Tensor


@cache
def _fused() -> ModuleType | None:
    try:
        from gft.kernels import fused
    except ImportError:  # no Triton
        return None
    return fused


@cache
def _native() -> ModuleType | None:
    from gft.kernels import native

    return native if native.library() is not None else None


def twin_of(tensor: Tensor) -> ModuleType | None:
    """The kernels for this tensor's device, if there are any: without them the definitions do the work."""
    if tensor.is_cuda:
        return _fused()
    return _native() if tensor.device.type == "cpu" else None


def lays_tokens_last(tensor: Tensor) -> bool:
    """Does `quantize` on this device lay its result out feature by feature?"""
    return tensor.is_cuda and _fused() is not None
