"""The CPU's twins of the operations: native.c, called on ranges of rows by as many threads as torch has.

Where there is no compiler, or GFT_NATIVE=0 is set, the torch definitions do the same work, more slowly.

    build      compiles and loads native.c
    interface  the structs and types that C and Python agree on
    threads    how work is shared out
    memory     where it is done
    products   votes; x or grad_output times levels
    moves      running means of votes, factors, moved weights
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gft.ops import checks
from gft.ops.activations import LARGEST_SQUARED, Quantized
from gft.ops.levels import PLAIN, Scaling
from gft.ops.native.build import library
from gft.ops.native.interface import LevelsJob, QuantizeJob, c_key, c_storage
from gft.ops.native.memory import scratch
from gft.ops.native.moves import (
    ROWS_OF_SQUARES,
    mean_amax,
    renew_mean,
    round_weights,
    rounding_plan,
    sums_of_squares,
    topk_weights,
)
from gft.ops.native.products import multiply_tokens, round_tokens, votes_product
from gft.ops.native.threads import functions, side_by_side
from gft.philox import NoiseKey
from gft.storage import Storage


def twins() -> dict[str, Callable[..., Any]]:
    """The operations that C does, by name; none where it cannot be built."""
    if library() is None:
        return {}
    offered = (quantize, float_levels, votes_product, round_tokens, multiply_tokens, mean_amax, renew_mean,
               sums_of_squares, rounding_plan, round_weights, topk_weights)
    return {function.__name__: function for function in offered}


def quantize(values: Tensor, factors: Tensor | None, largest: int, key: NoiseKey,
             not_finite: Tensor | None = None) -> Quantized:
    """Round x or grad_output to int8 (activations.quantize); signs are left to torch."""
    checks.check_values(values, factors, not_finite)
    if factors is None or values.dtype not in checks.FLOATS or not 0 < values.numel() <= checks.MOST_ELEMENTS:
        return NotImplemented
    values, factors = values.float().contiguous(), factors.contiguous()
    tokens, features = values.shape
    q = torch.empty(tokens, features, dtype=torch.int8)
    squares = torch.zeros(-(-tokens // ROWS_OF_SQUARES), features, dtype=torch.float64)
    job = QuantizeJob(values.data_ptr(), factors.data_ptr(), q.data_ptr(), squares.data_ptr(), features, ROWS_OF_SQUARES,
                      largest * 65536.0, LARGEST_SQUARED, c_key(key))
    bad = side_by_side(functions().gft_quantize, job, tokens, values.numel(), ROWS_OF_SQUARES)
    if not_finite is not None and bad:
        not_finite += bad
    return Quantized(q, squares.sum(0, keepdim=True).float())


def float_levels(stored: Tensor, storage: Storage, columns: int, dtype: torch.dtype, scaling: Scaling = PLAIN,
                 places: int = 1, turned: bool = False) -> Tensor:
    """Read a weight out as float32, or its levels alone as int8 (levels.float_levels)."""
    checks.check_stored(stored, storage, columns)
    checks.check_scaling(scaling, stored, columns)
    if not (dtype is torch.float32 or (dtype is torch.int8 and scaling is PLAIN)) or places != 1 or turned:
        return NotImplemented
    stored, rows = stored.contiguous(), len(stored)
    levels, factors = scratch.borrow((rows, columns), dtype), scaling.factors()
    by_group = factors if isinstance(factors, Tensor) and factors.dim() else None
    factor = 1.0 if by_group is not None else float(factors)
    job = LevelsJob(stored.data_ptr(), levels.data_ptr(), factor, columns, dtype is torch.int8, c_storage(storage))
    side_by_side(functions().gft_levels, job, rows, levels.numel())
    if by_group is not None and levels.numel():
        levels.view(*by_group.shape, columns // by_group.shape[1]).mul_(by_group[:, :, None])
    return levels
