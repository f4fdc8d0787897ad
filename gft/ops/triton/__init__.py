"""Triton's twins of the operations, for CUDA: one launch where the torch definitions take dozens, with Philox inside.

Integer arithmetic throughout; the float products are followed by no addition, so no multiply-add can be fused into them.

    activations      quantize, take_mean                        noise      Philox inside a kernel; draw_noise
    votes            votes_product and its kin, row_votes       constants  what a kernel must know of a storage
    levels           float_levels, pack_fields, unpack_fields   alike      several weights in one launch
    factors, update  sums_of_squares, rounding_plan; moving     overlap    kernels that begin before the last has ended
    choice, along    kth_largest; along_levels                  grids      launches longer than a grid's second size
    prepare          read_and_quantize, preparer                launch     launching a kernel again and again
    windows          patches, depthwise_votes                   lowprecision  round_tokens, multiply_tokens
    sequences        sequence_votes                             decode     linear
    momentum         mean_amax, renew_mean, renew_means         units      as_floats, in_units
"""

from collections.abc import Callable
from typing import Any

from gft.ops.triton.activations import quantize, take_mean
from gft.ops.triton.along import along_levels
from gft.ops.triton.choice import kth_largest
from gft.ops.triton.decode import linear
from gft.ops.triton.factors import rounding_plan, sums_of_squares
from gft.ops.triton.levels import float_levels, pack_fields, unpack_fields
from gft.ops.triton.lowprecision import multiply_tokens, round_tokens
from gft.ops.triton.momentum import mean_amax, renew_mean, renew_means
from gft.ops.triton.noise import draw_noise
from gft.ops.triton.prepare import preparer, read_and_quantize
from gft.ops.triton.sequences import sequence_votes
from gft.ops.triton.units import as_floats, in_units
from gft.ops.triton.update import round_many, round_weights, topk_weights
from gft.ops.triton.votes import grouped_votes_product, row_votes, votes_product
from gft.ops.triton.windows import depthwise_votes, patches


def twins() -> dict[str, Callable[..., Any]]:
    """The operations that Triton does, by name."""
    offered = (read_and_quantize, preparer, quantize, take_mean, float_levels, pack_fields, unpack_fields, patches,
               votes_product, grouped_votes_product, row_votes, depthwise_votes, sequence_votes, along_levels, linear,
               kth_largest, sums_of_squares, rounding_plan, round_weights, topk_weights, round_many, round_tokens,
               multiply_tokens, mean_amax, renew_mean, renew_means, as_floats, in_units, draw_noise)
    return {function.__name__: function for function in offered}
