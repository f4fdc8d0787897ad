"""A kernel that begins before the one ahead of it has ended.

Between two kernels of a stream a GPU first runs dry and then fills up again, a few microseconds that a small matrix feels.
From compute capability 9 on a kernel can be launched so that its programs start as soon as all of the one before have said
`let_next_begin` or ended. They do what does not depend on it, then `wait_for_previous` until it has ended and all it wrote
can be seen (CUDA calls this programmatic dependent launch). Elsewhere, and in Triton's interpreter, one follows the other.

What a kernel reads before it waits must have been there before the last kernel of the stream that was launched in the usual
way: that one began when all before it had ended, those in between began early.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@cache
def _can_overlap(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def overlaps(tensor: Tensor) -> bool:
    """Can kernels overlap on this tensor's device?"""
    return tensor.is_cuda and _can_overlap(tensor.device)


def launched_early(early: bool) -> dict[str, bool]:
    """The options of a launch that may begin before the one ahead of it has ended. The interpreter knows none."""
    return {"launch_pdl": True} if early else {}
