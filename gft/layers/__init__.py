"""The layers whose weights are small integers.

    layer         QuantLayer: the stored weight, its scale, its votes, its life in a state_dict
    linear        QuantLinear
    convolution   QuantConv2d
    parameters    which parameters of a model are integers, and which are not
    registry      whose weight a parameter is
"""

from gft.layers.convolution import QuantConv2d
from gft.layers.layer import QuantLayer
from gft.layers.linear import QuantLinear
from gft.layers.parameters import FilterFn, dense, number_layers, quantized, quantized_layers, some_names
from gft.layers.registry import layer_of

__all__ = ["FilterFn", "QuantConv2d", "QuantLayer", "QuantLinear", "dense", "layer_of", "number_layers", "quantized",
           "quantized_layers", "some_names"]
