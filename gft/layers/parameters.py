"""Which parameters of a model are integer weights, for `gft.GFT`, and which are not."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from gft.errors import UsageError, UsageTypeError
from gft.layers.layer import QuantLayer
from gft.layers.registry import register
from gft.layers.residual import tell_branches

FilterFn = Callable[[nn.Module, str], bool]  # of a layer and its name: is it meant?


def check_model(model: Any) -> None:
    """A list of layers, or a model's parameters, are easily given for the model."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UsageTypeError(f"gft takes a model, an nn.Module, not {given}; put layers of a list into an nn.ModuleList")


def quantized_layers(model: nn.Module) -> dict[str, QuantLayer]:
    """Name -> quantized layer, in the model's order."""
    check_model(model)
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLayer)}


def names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """id of each parameter -> all names it has in the model: several where layers share it."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), []).append(f"{name}.{own}" if name else own)
    return names


def check_filter(filter_fn: Any) -> None:
    """A list of names is easily given for the function that chooses by them."""
    if filter_fn is None or callable(filter_fn):
        return
    names = [filter_fn] if isinstance(filter_fn, str) else list(filter_fn) if isinstance(filter_fn, Iterable) else ["…"]
    named = repr([str(name) for name in names[:4]]) + (" and so on" if len(names) > 4 else "")
    raise UsageTypeError(f"filter_fn is a function of a layer and its name, not a {type(filter_fn).__name__}; give "
                         f"filter_fn=lambda module, name: name in {named}")


def quantized(model: nn.Module, filter_fn: FilterFn | None = None) -> list[nn.Parameter]:
    """The integer weights of a model, for `gft.GFT`; with filter_fn(module, name) those of the layers it chooses, so that
    kinds of layers can be groups with an lr of their own."""
    check_filter(filter_fn)
    layers = quantized_layers(model)
    if not layers:
        raise UsageError("no quantized layer in this model; call gft.quantize_(model, bits=…) first")
    for layer in layers.values():
        register(layer)
    number_layers(layers)
    tell_branches(model)
    chosen = [layer for name, layer in layers.items() if filter_fn is None or filter_fn(layer, name)]
    if not chosen:
        raise UsageError(f"filter_fn chose none of the model's quantized layers ({some_names(list(layers))}); widen it")
    return [layer.qweight for layer in chosen]


def number_layers(layers: Mapping[str, QuantLayer]) -> None:
    """Give each layer of a model that has none a number, so that it draws its own random numbers, whichever optimizer it
    goes to; and tell it its name."""
    taken = {layer.number for layer in layers.values()}
    free = (number for number in itertools.count() if number not in taken)
    for name, layer in layers.items():
        if layer.number is None:
            layer.number = next(free)
        layer.name = layer.name or name or None  # empty: the model is this layer


def some_names(names: Sequence[str]) -> str:
    """The first of many, for an error to name."""
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def dense(model: nn.Module) -> list[nn.Parameter]:
    """Every trainable parameter that is not an integer weight, for AdamW and its kin."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gains(model: nn.Module) -> list[nn.Parameter]:
    """The gains that are trained, for a param group of their own; `dense` has them among the others. A gain moves all of a
    layer, so at 4 bits it learns best at the rate of hidden matrices, where embedding and head learn faster than those:

        own = {id(gain) for gain in gft.gains(model)}
        torch.optim.AdamW([{"params": [one for one in gft.dense(model) if id(one) not in own], "lr": 1e-2},
                           {"params": gft.gains(model), "lr": 6e-4, "weight_decay": 0.0}])
    """
    own = (layer.log_gain for layer in quantized_layers(model).values())
    return [gain for gain in own if gain is not None and gain.requires_grad]
