"""The network that most tests train. In a module of its own, so that it can be pickled."""

import torch
from torch import nn


class TinyNet(nn.Module):
    """A float layer, two layers to quantize (named .mlp.), dropout, and a float head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 24)
        self.block = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 24, bias=False))})
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.embed(x))
        return self.head(self.dropout(h + self.block["mlp"](h)))
