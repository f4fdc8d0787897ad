"""Which parameters of a model are integer weights, for `gft.GFT`, and which are not."""

import itertools
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from gft.errors import UsageError
from gft.layers.layer import QuantLayer
from gft.layers.registry import register

FilterFn = Callable[[nn.Module, str], bool]  # of a layer and its name: is it meant?

def quantized_layers(model: nn.Module) -> dict[str, QuantLayer]:
    """Name -> quantized layer, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLayer)}


def names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """id of each parameter -> all names it has in the model: several where layers share it."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), []).append(f"{name}.{own}" if name else own)
    return names


def quantized(model: nn.Module, filter_fn: FilterFn | None = None) -> list[nn.Parameter]:
    """The integer weights of a model, for `gft.GFT`; with filter_fn(module, name) those of the layers it chooses, so that
    kinds of layers can be groups with an lr of their own."""
    layers = quantized_layers(model)
    if not layers:
        raise UsageError("no quantized layer in this model; call gft.quantize_(model, bits=…) first")
    for layer in layers.values():
        register(layer)
    number_layers(layers.values())
    chosen = [layer for name, layer in layers.items() if filter_fn is None or filter_fn(layer, name)]
    if not chosen:
        raise UsageError(f"filter_fn chose none of the model's quantized layers ({some_names(list(layers))}); widen it")
    return [layer.qweight for layer in chosen]


def number_layers(layers: Iterable[QuantLayer]) -> None:
    """Give each layer of a model that has none a number, so that it draws its own random numbers, whichever optimizer it
    goes to."""
    layers = list(layers)
    taken = {layer.number for layer in layers}
    free = (number for number in itertools.count() if number not in taken)
    for layer in layers:
        if layer.number is None:
            layer.number = next(free)


def some_names(names: Sequence[str]) -> str:
    """The first of many, for an error to name."""
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def dense(model: nn.Module) -> list[nn.Parameter]:
    """Every trainable parameter that is not an integer weight, for AdamW and its kin."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
