"""Triton kernels for CUDA, bit-equal to the torch definitions: one launch where those take dozens, with Philox inside.

Integer arithmetic throughout; the float products are followed by no addition, so no multiply-add can be fused into them.
"""

from gft.kernels.fused.alike import Layer
from gft.kernels.fused.choice import kth_largest
from gft.kernels.fused.factors import rounding_factors
from gft.kernels.fused.levels import float_levels, pack
from gft.kernels.fused.rounding import quantize
from gft.kernels.fused.update import move, round_together
from gft.kernels.fused.votes import sequence_votes, votes_product

__all__ = ["Layer", "float_levels", "kth_largest", "move", "pack", "quantize", "round_together", "rounding_factors",
           "sequence_votes", "votes_product"]
