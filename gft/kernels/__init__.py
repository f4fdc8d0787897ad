"""Fast twins of the torch definitions in vote.py and step.py, equal to them bit for bit.

    fused     Triton, for CUDA
    native    C, for the CPU, built when first needed
    decode    Triton, for CUDA: the forward product of a few rows, equal to its definition but for float32's rounding

Each of the first two offers `quantize`, `rounding_factors` and `move`; `fused` also the last two of many layers in a few
launches, `round_together`. All are functions of plain tensors and numbers that know nothing of models or optimizers.
`twin_of`, `joint_of` and `decoder_of` say which can work on a tensor; they look when they are asked, never at import.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


@cache
def _triton(name: str) -> ModuleType | None:
    try:
        return import_module(f"gft.kernels.{name}")
    except ImportError:  # no Triton
        return None


@cache
def _native() -> ModuleType | None:
    from gft.kernels import native

    return native if native.library() is not None else None


@cache
def _has_bfloat16_cores(device: torch.device) -> bool:
    """Tensor cores that take bfloat16 came with compute capability 8."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def twin_of(tensor: Tensor) -> ModuleType | None:
    """The kernels for this tensor's device, if there are any: without them the definitions do the work."""
    if tensor.is_cuda:
        return _triton("fused")
    return _native() if tensor.device.type == "cpu" else None


def joint_of(weight: Tensor) -> ModuleType | None:
    """The kernels that move this weight together with others: on a GPU, where a small matrix takes no longer than its
    launches do."""
    return _triton("fused") if weight.is_cuda and weight.numel() else None


def lays_tokens_last(tensor: Tensor) -> bool:
    """Does `quantize` on this device lay its result out feature by feature?"""
    return tensor.is_cuda and _triton("fused") is not None


def decoder_of(x: Tensor, columns: int) -> ModuleType | None:
    """The kernel for a product of x (..., columns) with a stored weight, where x has so few rows that reading the weight
    is all the work, and a type the kernel knows."""
    if not x.is_cuda or x.shape[-1] != columns or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    kernel = _triton("decode")
    if kernel is None or not 0 < x.numel() <= kernel.MOST_ROWS * columns:
        return None
    return kernel if _has_bfloat16_cores(x.device) else None
