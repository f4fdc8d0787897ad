"""The layers whose weights are small integers.

    layer         QuantLayer: the stored weight, its scale, its votes, its life in a state_dict
    computing     in which numbers a layer multiplies
    linear        QuantLinear
    convolution   QuantConv1d, 2d, 3d and their transposes
    attention     QuantMultiheadAttention
    experts       QuantExperts: mixtures of experts of transformers
    twins         which float layers become which of these
    parameters    which parameters of a model are integers, and which are not
    registry      whose weight a parameter is
"""

from gft.layers.attention import QuantMultiheadAttention
from gft.layers.computing import COMPUTE, EIGHT_BITS, check_compute
from gft.layers.convolution import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvolution,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
)
from gft.layers.experts import QuantExperts
from gft.layers.layer import QuantLayer
from gft.layers.linear import QuantLinear
from gft.layers.parameters import (
    FilterFn,
    check_filter,
    check_model,
    dense,
    gains,
    names_by_parameter,
    number_layers,
    quantized,
    quantized_layers,
    some_names,
)
from gft.layers.registry import layer_of
from gft.layers.residual import is_norm, tell_branches
from gft.layers.twins import (
    NOT_CHOSEN,
    QUANTIZED,
    float_twin,
    is_transposed_linear,
    quantized_twin,
    transposed_linear,
    twin_of,
    why_float,
)

__all__ = ["COMPUTE", "EIGHT_BITS", "NOT_CHOSEN", "QUANTIZED", "FilterFn", "QuantConv1d", "QuantConv2d", "QuantConv3d",
           "QuantConvTranspose1d", "QuantConvTranspose2d", "QuantConvTranspose3d", "QuantConvolution", "QuantExperts",
           "QuantLayer", "QuantLinear", "QuantMultiheadAttention", "check_compute", "check_filter", "check_model", "dense",
           "float_twin", "gains", "is_norm", "is_transposed_linear", "layer_of", "names_by_parameter", "number_layers",
           "quantized", "quantized_layers", "quantized_twin", "some_names", "tell_branches", "transposed_linear", "twin_of",
           "why_float"]
