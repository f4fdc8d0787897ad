"""The numbers that every trainer's log gets: `record(model, optimizer)`."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from gft.capture import parts_of
from gft.hybrid import Hybrid
from gft.layers import quantized_layers
from gft.optim import GFT
from gft.statistics import statistics


def record(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> dict[str, float]:
    """One flat record of a model's integer weights, all layers together. One pass over the weights: for a log, not for
    every step.

        gft/zeros, gft/edges   share of the weights at level 0, and at the ends of their grids
        gft/flip_rate          share of the weights whose level the last step changed (needs the optimizer)
        gft/flips              level changes since the start (needs the optimizer)
        gft/weight_bytes       bytes of the integer weights and their scales
        gft/model_bytes        bytes of all parameters and buffers
        gft/peak_gpu_bytes     the most GPU memory that tensors have taken so far; on a GPU only
    """
    layers = quantized_layers(model)
    if not layers:
        return {}
    gfts = [part for optimizer in optimizers for part in parts_of(unwrapped(optimizer)) if isinstance(part, GFT)]
    rows = statistics(model, Hybrid(*gfts) if gfts else None)
    sizes = {name: layer.rows * layer.columns for name, layer in layers.items()}
    count = max(sum(sizes.values()), 1)
    totals = {f"gft/{key}": sum(row[key] * sizes[name] for name, row in rows.items()) / count for key in ("zeros", "edges")}
    if gfts:
        totals["gft/flip_rate"] = sum(row.get("flip_rate", 0.0) * sizes[name] for name, row in rows.items()) / count
        totals["gft/flips"] = float(sum(part.flips() for part in gfts))
    totals["gft/weight_bytes"] = float(sum(layer.qweight.nbytes + layer.scale.nbytes for layer in layers.values()))
    totals["gft/model_bytes"] = float(model_bytes(model))
    device = next(iter(layers.values())).qweight.device
    if device.type == "cuda":
        totals["gft/peak_gpu_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return totals


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """An optimizer out of the wrappers that trainers put around it (`.optimizer`)."""
    while not isinstance(optimizer, (GFT, Hybrid)) and isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each counted once."""
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})


def weights_of(model: nn.Module) -> tuple[int, int]:
    """How many weights a model has, and how many of them are integers: a packed byte holds several."""
    integers = {layer.qweight: layer.rows * layer.columns for layer in quantized_layers(model).values()}
    floats = sum(parameter.numel() for parameter in model.parameters() if parameter not in integers)
    return floats + sum(integers.values()), sum(integers.values())
