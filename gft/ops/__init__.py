"""Every heavy computation, once: a torch definition, and where there is one a C or Triton twin with the same result.

    activations   quantize, take_mean                            x, grad_output -> int8; their mean squares
    prepare       read_and_quantize, preparer                    the first two of these and of levels, in one launch
    windows       patches, row_votes, depthwise_votes            int8 images -> what a kernel saw of them; their votes
    products      votes_product, sequence_votes                  int8 -> votes
                  along_levels, linear                           votes · weight; x, stored weight -> y
    lowprecision  round_tokens, multiply_tokens                  the same product of whole numbers
    levels        float_levels, pack_fields, unpack_fields       stored bytes -> numbers, and back
    rounding      rounding_plan, round_weights, round_many       votes -> plan -> moved weights
                  sums_of_squares, round_some_rows               the same where ranks have some rows each
    momentum      mean_amax, renew_mean, renew_means             votes -> a running mean of them, and what moves weights
    units         as_floats, in_units                            votes -> floats; floats -> whole numbers of a unit
    noise         draw_noise                                     random numbers as a tensor
    topk          kth_largest, topk_weights                      the same by the paper's rule

They are functions of tensors and of three values (Storage, NoiseKey, a plan) and know nothing of models or optimizers.
operation.py says how the twin is found; native/ is C for the CPU, triton/ for CUDA.
"""

from gft.ops.activations import MeanSquare, Quantized, mean_square, quantize, take_mean
from gft.ops.levels import PLAIN, Scaling, float_levels, pack_fields, runs_of, times_factors, tokens_last, unpack_fields
from gft.ops.lowprecision import (
    FIXED,
    FP8,
    INT8,
    Tokens,
    multiply_tokens,
    prefers_fixed,
    round_tokens,
)
from gft.ops.momentum import KeptMean, mean_amax, renew_mean, renew_means
from gft.ops.noise import draw_noise
from gft.ops.operation import Operation, twins
from gft.ops.prepare import Preparer, StoredWeight, preparer, read_and_quantize
from gft.ops.products import (
    FEW_ROWS,
    along_levels,
    grouped_votes_product,
    linear,
    multiply,
    sequence_votes,
    sequence_votes_and_counts,
    votes_product,
)
from gft.ops.rounding import (
    Rounded,
    RoundingJob,
    RoundingPlan,
    round_many,
    round_some_rows,
    round_weights,
    rounding_plan,
    sums_of_squares,
)
from gft.ops.topk import TopKPlan, kth_largest, topk_plan, topk_plan_of_rows, topk_weights
from gft.ops.units import as_floats, in_units
from gft.ops.windows import RowPatches, Unfolded, Window, depthwise_votes, patches, row_votes

__all__ = ["FEW_ROWS", "FIXED", "FP8", "INT8", "PLAIN", "KeptMean", "MeanSquare", "Operation", "Preparer",
           "Quantized", "Rounded", "RoundingJob", "RoundingPlan", "RowPatches", "Scaling", "StoredWeight", "Tokens",
           "TopKPlan", "Unfolded", "Window", "along_levels", "as_floats", "depthwise_votes", "draw_noise", "float_levels",
           "grouped_votes_product", "in_units", "kth_largest", "linear", "mean_amax", "mean_square", "multiply",
           "multiply_tokens", "pack_fields", "patches", "prefers_fixed", "preparer", "quantize", "read_and_quantize",
           "renew_mean", "renew_means", "round_many", "round_some_rows", "round_tokens", "round_weights", "rounding_plan",
           "row_votes", "runs_of", "sequence_votes", "sequence_votes_and_counts", "sums_of_squares", "take_mean",
           "times_factors", "tokens_last", "topk_plan", "topk_plan_of_rows", "topk_weights", "twins", "unpack_fields",
           "votes_product"]
