"""In which numbers a layer multiplies: `layer.compute`.

    None    x's float type, or autocast's; float32 on a CPU with AMX in fixed point as fine (ops.prefers_fixed)
    "bf16"  bfloat16, whatever x is
    "int8"  x and grad_output rounded to int8, token by token (ops/lowprecision.py); levels are integers anyway
    "fp8"   likewise to float8_e4m3, which holds levels of up to 5 bits exactly

y has x's type, or autocast's, in all of them. Votes are made of x and grad_output as they were before.
"""

from typing import Any

import torch

from gft import ops
from gft.errors import UsageError
from gft.settings import check_choice
from gft.storage import largest_level

COMPUTE = (None, "bf16", "int8", "fp8")
EIGHT_BITS: dict[str | None, torch.dtype] = {"int8": ops.INT8, "fp8": ops.FP8}
EXACT_IN_FP8 = 16  # integers up to it have four significant bits


def check_compute(compute: Any, bits: int, groups: bool = False) -> None:
    """Raise unless a linear layer of so many bits, with one scale a group of inputs or not, can multiply so."""
    check_choice("compute", compute, COMPUTE)
    if compute == "fp8" and largest_level(bits) > EXACT_IN_FP8:
        raise UsageError(f'compute="fp8" holds levels of up to 5 bits exactly, and these have {bits}; choose compute="int8"')
    if compute in EIGHT_BITS and groups:
        raise UsageError(f'compute="{compute}" cannot take a scale for each group of inputs out of a sum over all of them; '
                         'choose scales="tensor" or "row", or compute="bf16"')
