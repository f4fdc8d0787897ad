"""What one wants to see of integer weights while they train: `statistics(model)`, per layer and cheap."""

from typing import Any

import torch
from torch import nn

from gft.hybrid import Hybrid
from gft.layers import quantized_layers
from gft.optim import GFT


def statistics(model: nn.Module, optimizer: GFT | Hybrid | None = None) -> dict[str, dict[str, Any]]:
    """Name of each quantized layer -> what its weights and votes look like. One pass over the weights, one sync a layer.

        histogram   share of the weights at each level -I..I
        zeros       share at level 0
        edges       share at ±I: near 1 the grid is too narrow
        margin      mean |votes| over the most they could be: 1 is a unanimous batch, 0 an even split; after backward
                    and before step, else absent
        flip_rate   share of the weights whose level the last step changed (needs the optimizer)
    """
    parts = optimizer.optimizers if isinstance(optimizer, Hybrid) else (optimizer,)
    states = {weight: state for part in parts if isinstance(part, GFT) for weight, state in part.state.items()}
    report: dict[str, dict[str, Any]] = {}
    for name, layer in quantized_layers(model).items():
        largest = layer.storage.largest
        count = max(layer.rows * layer.columns, 1)
        codes = layer.levels().reshape(-1).to(torch.int64) + largest
        shares = (torch.bincount(codes, minlength=2 * largest + 1) / count).tolist()
        row: dict[str, Any] = {"histogram": shares, "zeros": shares[largest], "edges": shares[0] + shares[-1]}
        votes = layer.votes
        if votes is not None and votes.votes is not None and votes.tokens:
            row["margin"] = float(votes.votes.abs().double().mean()) / (votes.samples * votes.vote.largest**2)
        if "last_flips" in states.get(layer.qweight, {}):
            row["flip_rate"] = int(states[layer.qweight]["last_flips"]) / count
        report[name] = row
    return report
