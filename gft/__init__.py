"""gft: train networks whose weights are 2-4-bit integers, and stay so while they train.

    gft.quantize_(model, bits=4, filter_fn=lambda m, name: ".mlp." in name)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model)), torch.optim.AdamW(gft.dense(model), lr=6e-4))
"""

from gft import reference
from gft.averaging import averaged
from gft.calibrate import GPTQ
from gft.capture import Captured
from gft.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from gft.convert import dequantize_, quantize_
from gft.errors import UsageError
from gft.hybrid import Hybrid
from gft.layers import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantExperts,
    QuantLinear,
    QuantMultiheadAttention,
    dense,
    gains,
    quantized,
)
from gft.optim import GFT, PAPER
from gft.pack import pack_
from gft.rules import Rounding, TopK
from gft.statistics import statistics
from gft.summary import summary
from gft.votes import Int4, Int8, Sign, Ternary

__version__ = "0.3.0"

__all__ = [
    "GFT",
    "GPTQ",
    "PAPER",
    "Captured",
    "CheckpointError",
    "Hybrid",
    "Int4",
    "Int8",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantExperts",
    "QuantLinear",
    "QuantMultiheadAttention",
    "Rounding",
    "Sign",
    "Ternary",
    "TopK",
    "UsageError",
    "averaged",
    "dense",
    "dequantize_",
    "gains",
    "load_checkpoint",
    "pack_",
    "quantize_",
    "quantized",
    "reference",
    "save_checkpoint",
    "statistics",
    "summary",
]
