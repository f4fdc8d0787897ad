"""The paper's dense network: `depth` linear layers without bias, all hidden ones `width` wide."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from gft.errors import UsageError


class RMSNorm(nn.Module):
    """x / rms(x), with nothing to learn: "Quantized" networks have no float parameter at all."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:])


def norm_layer(name: str, width: int) -> nn.Module:
    if name == "batch":
        return nn.BatchNorm1d(width, affine=False)
    return {"rms": RMSNorm, "none": nn.Identity}[name]()


ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
NORMS = ("rms", "batch", "none")


class DNN(nn.Module):
    """(batch, inputs) -> (batch, classes): linear, norm, activation, dropout, …, linear.

    784-4096-4096-4096-4096-10 is the paper's: 53.6M weights. The paper states no normalisation; without any, the
    all-quantized network does not train (docs/lab-notes.md).
    """

    def __init__(self, inputs: int, classes: int, width: int = 4096, depth: int = 5, norm: str = "rms",
                 activation: str = "relu", dropout: float = 0.0, input_dropout: float = 0.0) -> None:
        super().__init__()
        if depth < 2:
            raise UsageError(f"depth={depth}: the network needs at least an input and an output layer, 2")
        sizes = [inputs, *[width] * (depth - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)  # type: ignore[union-attr]
        self.norms = nn.ModuleList(norm_layer(norm, width) for _ in range(depth - 1))
        self.activation = ACTIVATIONS[activation]()
        self.dropout, self.input_dropout = nn.Dropout(dropout), nn.Dropout(input_dropout)

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        x = self.input_dropout(x)
        for linear, norm in zip(hidden, self.norms, strict=True):
            x = self.dropout(self.activation(norm(linear(x))))
        return last(x)
