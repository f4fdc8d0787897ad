"""What one wants to see of integer weights while they train: `statistics(model)`, per layer and cheap."""

from typing import Any

import torch
from torch import nn

from gft.grid import largest_level
from gft.layers import quantized_layers
from gft.optimizer import GFT, Hybrid


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
        largest = largest_level(layer.bits)
        count = max(layer.grid.rows * layer.grid.columns, 1)
        codes = layer.levels().reshape(-1).to(torch.int64) + largest
        shares = (torch.bincount(codes, minlength=2 * largest + 1) / count).tolist()
        row: dict[str, Any] = {"histogram": shares, "zeros": shares[largest], "edges": shares[0] + shares[-1]}
        ballot = layer.ballot
        if ballot is not None and ballot.votes is not None and ballot.tokens:
            most = ballot.voices * ballot.code.largest**2
            row["margin"] = float(ballot.votes.abs().double().mean()) / most
        if "last_flips" in states.get(layer.weight, {}):
            row["flip_rate"] = int(states[layer.weight]["last_flips"]) / count
        report[name] = row
    return report
