"""What tests of training share."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gft
from gft.layers import quantized_layers


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, scheduler: Any = None) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def hybrid_of(model: nn.Module, **settings: Any) -> gft.Hybrid:
    return gft.Hybrid(gft.GFT(gft.quantized(model), **{"lr": 0.4, "seed": 11, **settings}),
                      torch.optim.AdamW(gft.dense(model), lr=3e-3))


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def levels_of(model: nn.Module) -> list[torch.Tensor]:
    return [layer.levels().clone() for layer in quantized_layers(model).values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a refused call must leave as it was."""
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def same(one: Any, other: Any) -> bool:
    """Equal nests of dicts, lists, tensors and numbers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other
