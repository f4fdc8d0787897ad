"""Triton twins of the torch definitions in vote.py and step.py, equal to them bit for bit.

Each is a function of plain tensors and numbers and knows nothing of layers or optimizers. `usable` says whether they can
run on a tensor; it asks for Triton the first time it sees a CUDA tensor, never at import.
"""

from functools import cache

from torch import Tensor


@cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def usable(tensor: Tensor) -> bool:
    return tensor.is_cuda and _has_triton()
