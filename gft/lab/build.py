"""The parts of a run: the recipe's network with its layers on the grid, its optimizers, its schedule."""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

import gft
from gft.errors import UsageError
from gft.lab import baselines
from gft.lab import data as datasets
from gft.lab.models import CNN, DNN, GPT, Llama, ViT
from gft.lab.models.resnet import resnet_for
from gft.lab.muon import Muon
from gft.lab.recipe import SEES_IMAGES, Integers, Recipe
from gft.rules import Rule
from gft.votes import Vote

DataSet = datasets.Dataset | datasets.Text | datasets.Corpus
OF_USERS = ("llama", "resnet", "cnn")  # networks that are quantized as a user does it
MOMENTUM = 0.9  # SGD's


# ---------------------------------------------------------------------------------------------------- the network


def build_float_model(recipe: Recipe, data: DataSet) -> nn.Module:
    """The recipe's network before any of its layers is quantized."""
    model, name = recipe.model, recipe.data.name
    if model.name in ("gpt", "llama"):
        if isinstance(data, datasets.Dataset):
            raise UsageError(f"model={model.name} reads text, but data={name} is not; choose data=shakespeare or text:FILE")
        if model.name == "llama":
            return Llama(data.classes, data.context, model.width, model.depth, model.heads, model.kv_heads)
        return GPT(data.classes, data.context, model.width, model.depth, model.heads, model.dropout)
    if not isinstance(data, datasets.Dataset):
        raise UsageError(f"data={name} is text, which model={model.name} cannot read; choose model=gpt or llama")
    if model.name in SEES_IMAGES and len(data.shape) != 3:
        raise UsageError(f"model={model.name} sees images, but data={name} has none; choose mnist-images or imagenette")
    if model.name == "resnet":
        return resnet_for(data.shape, data.classes, model.width, model.depth)
    if model.name == "cnn":
        return CNN(data.shape, data.classes, model.width, model.depth)
    if model.name == "vit":
        vit = ViT(data.shape, data.classes, model.patch, model.width, model.depth, model.heads, model.dropout,
                  model.positions)
        vit.drop_patches(model.patch_dropout)
        return vit
    return DNN(data.inputs, data.classes, model.width, model.depth, model.norm, model.activation, model.dropout,
               model.input_dropout)


def chosen_layers(recipe: Recipe) -> Callable[[nn.Module, str], bool]:
    """The filter of gft.quantize_ that makes the paper's hybrids: which layers become integers, by name."""
    outer = ("layers.0", f"layers.{recipe.model.depth - 1}")
    return {
        "all": lambda module, name: True,
        "hidden": lambda module, name: name.startswith("layers.") and name not in outer,
        "mlp": lambda module, name: ".mlp." in name,
        "blocks": lambda module, name: name.startswith("blocks."),
    }[recipe.integers.layers]


def build_model(recipe: Recipe, data: DataSet) -> nn.Module:
    """The recipe's network, with the layers that it names on the grid."""
    model, integers = build_float_model(recipe, data), recipe.integers
    if integers.layers == "none":
        return model
    if integers.method != "gft":
        return baselines.put_on_grid_(model, integers.bits, chosen_layers(recipe), integers.method)
    scales = int(integers.scales) if integers.scales.isdecimal() else integers.scales
    # The paper's networks have neither biases nor gains. Others have no biases to leave out: as a user quantizes them.
    return gft.quantize_(model, integers.bits, chosen_layers(recipe), memory=integers.memory, init=integers.init,
                         bias=recipe.model.name in OF_USERS, gain=integers.gain, scales=scales, compute=integers.compute)


# ---------------------------------------------------------------------------------------------------- how it learns


def rule_of(integers: Integers, inertia: float | None) -> Rule:
    """How votes move weights. What is None is left to the library."""
    if integers.rule == "topk":
        return gft.TopK(**given(p_min=integers.p_min))
    return gft.Rounding(inertia=inertia, threshold=integers.threshold, second_moment=integers.second_moment,
                        orthogonalize=bool(integers.orthogonalize), momentum=integers.momentum,
                        momentum_rank=integers.momentum_rank, warmup=integers.own_warmup)


def vote_of(integers: Integers) -> Vote:
    """How activations and errors are quantized for votes."""
    if integers.vote == "sign":
        return gft.Sign(**given(per=integers.vote_per, literal_mask=integers.literal_mask))
    return {"int8": gft.Int8, "int4": gft.Int4, "ternary": gft.Ternary}[integers.vote or "int8"]()


def given(**settings: Any) -> dict[str, Any]:
    """Those that are not None: the others are left to the library."""
    return {key: value for key, value in settings.items() if value is not None}


def groups_of(integers: Integers, model: nn.Module) -> list[dict[str, Any]]:
    """The integer weights, attention apart from the others where it has a learning rate of its own."""
    if integers.layers != "blocks" or integers.attention_lr is None:
        return [{"params": gft.quantized(model)}]
    return [{"params": gft.quantized(model, lambda module, name: ".attention." not in name)},
            {"params": gft.quantized(model, lambda module, name: ".attention." in name), "lr": integers.attention_lr,
             "rule": rule_of(integers, integers.attention_inertia)}]


def build_optimizer(recipe: Recipe, model: nn.Module, seed: int) -> gft.Hybrid:
    """GFT, or another method, for the integers, and AdamW, or Muon and AdamW, or SGD, for everything else."""
    integers, dense = recipe.integers, recipe.dense
    parts: list[torch.optim.Optimizer] = []
    if integers.layers != "none" and integers.method == "gft":
        parts.append(gft.GFT(groups_of(integers, model), integers.lr, rule_of(integers, integers.inertia), vote_of(integers),
                             seed=seed))
    elif integers.layers != "none":
        parts.append(baselines.make_optimizer(baselines.Method(integers.method, integers.lr, dense.beta2, dense.weight_decay,
                                                               integers.bop_threshold, seed), model))
    rest = baselines.dense(model)
    matrices = {id(weight): weight for name, weight in model.named_parameters()
                if name.startswith("blocks.") and weight.dim() == 2}
    if dense.optimizer == "muon":
        parts.append(Muon(list(matrices.values()), dense.lr * dense.blocks, dense.weight_decay))
        rest = [weight for weight in rest if id(weight) not in matrices]
    on_gpu = bool(rest) and rest[0].is_cuda
    groups = groups_of_floats(recipe, rest, matrices.keys(), {id(gain) for gain in gft.gains(model)})
    if rest and dense.optimizer == "sgd":
        # All that a step changes lies on the device, and fused it reads lr there; so it can be captured, which gft.Captured
        # takes from "capturable". torch has no such setting for SGD.
        parts.append(torch.optim.SGD([{**group, "capturable": True} for group in groups], lr=dense.lr, momentum=MOMENTUM,
                                     nesterov=True, weight_decay=dense.weight_decay, fused=on_gpu))
    elif rest:
        parts.append(torch.optim.AdamW(groups, lr=dense.lr, weight_decay=dense.weight_decay, betas=(0.9, dense.beta2),
                                       fused=on_gpu, capturable=on_gpu))
    return gft.Hybrid(*parts)


def groups_of_floats(recipe: Recipe, parameters: list[nn.Parameter], blocks: Collection[int],
                     gains: Collection[int]) -> list[dict[str, Any]]:
    """As language models are trained: what the blocks have of their own, matrices or integer layers' gains (by id), at their
    share of lr; other matrices; and vectors, which do not decay, as gains do not. The paper's networks, and convolutional
    ones, learn and decay as a whole."""
    if recipe.model.name != "llama":
        return [{"params": list(parameters)}]
    share = recipe.dense.lr * recipe.dense.blocks
    groups = [{"params": [one for one in parameters if id(one) in blocks], "lr": share},
              {"params": [one for one in parameters if id(one) in gains], "lr": share, "weight_decay": 0.0},
              {"params": [one for one in parameters if one.dim() > 1 and id(one) not in blocks]},
              {"params": [one for one in parameters if one.dim() < 2 and id(one) not in gains], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_scheduler(recipe: Recipe, optimizer: gft.Hybrid) -> torch.optim.lr_scheduler.LambdaLR:
    """Rates rise linearly for `warmup` steps, then fall to 0, those of floats only if they are to."""
    steps, warmup = recipe.schedule.steps, recipe.schedule.warmup

    def rising(step: int) -> float:
        return min((step + 1) / (warmup + 1), 1.0)

    def share(step: int) -> float:
        falling = (steps - step) / max(steps - warmup, 1)
        if recipe.schedule.falls == "cosine":
            falling = (1 - math.cos(math.pi * min(max(falling, 0.0), 1.0))) / 2
        return max(0.0, min(rising(step), falling))

    shares = [share if recipe.schedule.floats_fall or isinstance(part, gft.GFT) else rising
              for part in optimizer.optimizers for _ in part.param_groups]
    if not recipe.schedule.floats_fall:
        if rising not in shares:
            raise UsageError(f"schedule.floats_fall=false would not be used: nothing in {recipe.name} is a float; leave it "
                             "out")
        if recipe.integers.method != "gft":
            raise UsageError(f"schedule.floats_fall=false tells floats from weights that gft.GFT trains, not from those of "
                             f"method={recipe.integers.method}; leave it out")
    return torch.optim.lr_scheduler.LambdaLR(optimizer, shares)
