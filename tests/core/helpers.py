"""What tests of training share."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gft
from gft.layers import quantized_layers
from gft.rules.matrices import BOUND


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, scheduler: Any = None) -> list[float]:
    """The losses before each step."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def moved(rule: gft.Rounding, lr: float, votes: torch.Tensor, bits: int = 4, memory: bool = True) -> torch.Tensor:
    """The weight of one layer after a step on votes that nobody cast."""
    torch.manual_seed(1)
    layer = gft.QuantLinear(*reversed(votes.shape), bits=bits, memory=memory)
    optimizer = gft.GFT([layer.qweight], lr, rule, seed=5)
    layer.votes.votes, layer.votes.tokens = votes, BOUND  # more tokens than such votes need
    optimizer.step()
    return layer.qweight.clone()


def integer_net(bits: int = 2, **kept: Any) -> nn.Module:
    """Two integer layers of odd width and a float one, for five classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 41), nn.ReLU(), nn.Linear(41, 5))
    return gft.quantize_(model, bits, lambda module, name: name != "4", **kept)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 30) -> list[float]:
    """Losses of so many steps on one batch that an `integer_net` can learn."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 24, generator=generator)
    return train(model, optimizer, [(x, (x @ torch.randn(24, 5, generator=generator)).argmax(1))] * count)


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


def losses_step_by_step_and_captured(model: nn.Module, lr: float, rule: gft.Rounding) -> tuple[list[float], list[float]]:
    """What the model, on a GPU, has lost after each of 40 steps on one batch: taken one by one, and by `gft.Captured`. Float
    products may differ in the last bit between a graph and its first steps, so they are alike and no more."""
    results = []
    for capture in (False, True):
        trained = copy.deepcopy(model).cuda()
        optimizer = gft.Hybrid(gft.GFT(gft.quantized(trained), lr, rule, seed=3),
                               torch.optim.AdamW(gft.dense(trained), lr=1e-3, fused=True, capturable=True))

        def step(x, y, model=trained, optimizer=optimizer):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        take = gft.Captured(step, optimizer) if capture else step
        x = torch.randn(120, 24, generator=torch.Generator().manual_seed(1)).cuda()
        y = x[:, :5].argmax(1)
        results.append([take(x, y).item() for _ in range(40)])
    return results[0], results[1]
