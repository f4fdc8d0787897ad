"""The parts of a run: the recipe's network with its layers on the grid, its optimizers, its schedule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gft
from gft.lab import baselines
from gft.lab import data as datasets
from gft.lab.models import DNN, GPT, ViT
from gft.lab.recipes import Recipe

Data = datasets.Dataset | datasets.Text


def build_float_model(recipe: Recipe, data: Data) -> nn.Module:
    """The recipe's network before any of its layers is quantized."""
    if recipe.model == "gpt":
        if not isinstance(data, datasets.Text):
            raise ValueError(f"model=gpt reads text, but data={recipe.data} is not; choose data=shakespeare or text:FILE")
        return GPT(data.classes, data.context, recipe.width, recipe.depth, recipe.heads, recipe.dropout)
    if isinstance(data, datasets.Text):
        raise ValueError(f"data={recipe.data} is text, which model={recipe.model} cannot read; choose model=gpt")
    if recipe.model == "vit":
        if len(data.shape) != 3:
            raise ValueError(f"model=vit sees images, but data={recipe.data} has none; choose mnist-images or imagenette")
        channels, size, _ = data.shape
        return ViT(channels, size, data.classes, recipe.patch, recipe.width, recipe.depth, recipe.heads, recipe.dropout,
                   recipe.patch_dropout, recipe.positions)
    return DNN(data.inputs, data.classes, recipe.width, recipe.depth, recipe.norm, recipe.activation, recipe.dropout,
               recipe.input_dropout)


def chosen_layers(recipe: Recipe) -> Callable[[nn.Module, str], bool]:
    """The filter of gft.quantize_ that makes the paper's hybrids: which layers become integers, by name."""
    outer = ("layers.0", f"layers.{recipe.depth - 1}")
    return {
        "all": lambda module, name: True,
        "hidden": lambda module, name: name.startswith("layers.") and name not in outer,
        "mlp": lambda module, name: ".mlp." in name,
        "blocks": lambda module, name: name.startswith("blocks."),
    }[recipe.quantize]


def build_model(recipe: Recipe, data: Data) -> nn.Module:
    model = build_float_model(recipe, data)
    if recipe.quantize == "none":
        return model
    if recipe.method != "gft":
        return baselines.put_on_grid_(model, recipe.bits, chosen_layers(recipe), recipe.method)
    return gft.quantize_(model, recipe.bits, chosen_layers(recipe), memory=recipe.memory, init=recipe.init, bias=False)


def groups_of(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """The integer weights, attention apart from the others where the recipe has it learn in its own way."""
    if recipe.quantize != "blocks" or recipe.attention_lr == 0:
        return [{"params": gft.quantized(model)}]
    return [{"params": gft.quantized(model, lambda module, name: ".attention." not in name)},
            {"params": gft.quantized(model, lambda module, name: ".attention." in name),
             "lr": recipe.attention_lr, "inertia": recipe.attention_inertia}]


def build_optimizer(recipe: Recipe, model: nn.Module, seed: int) -> gft.Hybrid:
    parts: list[torch.optim.Optimizer] = []
    if recipe.quantize != "none" and recipe.method == "gft":
        parts.append(gft.GFT(groups_of(recipe, model), recipe.lr, recipe.rule, recipe.vote, sample=recipe.sample,
                             mask=recipe.mask, inertia=recipe.inertia, quorum=recipe.quorum, sizes=recipe.sizes,
                             directions=recipe.directions, p_min=recipe.p_min, seed=seed))
    elif recipe.quantize != "none":
        parts.append(baselines.make_optimizer(recipe.method, model, recipe.lr, recipe.beta2, recipe.threshold, seed))
    rest = baselines.dense(model)
    if rest:
        on_gpu = rest[0].is_cuda
        parts.append(torch.optim.AdamW(rest, lr=recipe.dense_lr, weight_decay=recipe.weight_decay, betas=(0.9, recipe.beta2),
                                       fused=on_gpu, capturable=on_gpu))
    return gft.Hybrid(*parts)


def build_scheduler(recipe: Recipe, optimizer: gft.Hybrid) -> torch.optim.lr_scheduler.LambdaLR:
    """Both rates rise linearly for `warmup` steps, then fall linearly to 0."""

    def share(step: int) -> float:
        rising = (step + 1) / (recipe.warmup + 1)
        falling = (recipe.steps - step) / max(recipe.steps - recipe.warmup, 1)
        return max(0.0, min(rising, falling, 1.0))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)
