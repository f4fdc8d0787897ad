"""gft: train networks whose weights are 2-4-bit integers, and stay so while they train.

    gft.quantize_(model, bits=4, filter_fn=lambda m, name: ".mlp." in name)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model)), torch.optim.AdamW(gft.dense(model), lr=6e-4))
"""

from gft import reference
from gft.capture import Captured
from gft.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from gft.convert import dequantize_, quantize_
from gft.layers import QuantConv2d, QuantLinear, dense, quantized
from gft.optimizer import GFT, PAPER, Hybrid
from gft.statistics import statistics

__version__ = "0.1.0"

__all__ = [
    "GFT",
    "PAPER",
    "Captured",
    "CheckpointError",
    "Hybrid",
    "QuantConv2d",
    "QuantLinear",
    "dense",
    "dequantize_",
    "load_checkpoint",
    "quantize_",
    "quantized",
    "reference",
    "save_checkpoint",
    "statistics",
]
