"""Recipes: every experiment of the paper as a function that returns a typed config.

A recipe with the suffix "-paper" trains by the paper's own rule and start (`gft.PAPER`); the one without it by the
library's default settings. Change any field with `gft train NAME --set field=value`.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

from gft.lab.data import LOADERS
from gft.lab.models.dnn import ACTIVATIONS, NORMS
from gft.optimizer import PAPER

QUANTIZE = ("none", "hidden", "all")


@dataclass(frozen=True)
class Recipe:
    name: str
    table: str  # which table of the paper, if any
    row: str  # its row
    paper: float | None  # the paper's value
    metric: str = "accuracy"  # in %

    # data and budget
    data: str = "mnist"
    batch: int = 256
    steps: int = 1960  # 10 epochs of 50,000

    # the network
    width: int = 4096
    depth: int = 5
    norm: str = "rms"
    activation: str = "relu"
    dropout: float = 0.0  # after each hidden layer
    input_dropout: float = 0.0

    # which of its layers are integers, and how they are kept
    quantize: str = "none"  # none, hidden (all but the first and last), all
    bits: int = 32
    memory: bool = True
    init: str = "keep"

    # how the integers learn: gft.GFT's arguments
    rule: str = "rounding"
    vote: str = "int8"
    sample: str = "token"
    mask: str = "none"
    lr: float = 0.2
    p_min: float = 0.001

    # how the rest learns: AdamW's arguments
    dense_lr: float = 6e-4
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        for key, choices in (("quantize", QUANTIZE), ("data", tuple(LOADERS)), ("norm", NORMS),
                             ("activation", tuple(ACTIVATIONS))):
            if getattr(self, key) not in choices:
                raise ValueError(f"{key}={getattr(self, key)!r}: choose one of {', '.join(choices)}")
        for key in ("steps", "batch", "width"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: give at least 1")
        if not self.dense_lr >= 0 or not 0 <= self.dropout < 1 or not 0 <= self.input_dropout < 1:
            raise ValueError(f"dense_lr={self.dense_lr}, dropout={self.dropout}, input_dropout={self.input_dropout}: a rate "
                             "must not be negative, dropout lies between 0 and 1")

    def changed(self, settings: list[str]) -> "Recipe":
        """A copy with each "key=value" applied, read as the field's type."""
        hints = get_type_hints(Recipe)
        changes: dict[str, Any] = {}
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not equals or key not in hints or key in ("name", "table", "row", "paper"):
                fields = ", ".join(field for field in hints if field not in ("name", "table", "row", "paper"))
                raise ValueError(f"--set {setting}: write key=value with one of the keys {fields}")
            try:
                changes[key] = _BOOLS[text.lower()] if hints[key] is bool else hints[key](text)
            except (KeyError, ValueError):
                raise ValueError(f"--set {setting}: {key} takes a value of type {hints[key].__name__}") from None
        return dataclasses.replace(self, **changes)


_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

# The paper's values, top-1 % on validation (Tables 1 and 6).
MNIST_DNN = {("none", 32): 98.7, ("hidden", 4): 98.1, ("hidden", 3): 97.7, ("hidden", 2): 95.2,
             ("all", 4): 96.7, ("all", 3): 93.4, ("all", 2): 87.4}
DEPTH = {2: 84.46, 3: 88.82, 5: 89.24, 7: 88.53, 10: 88.47}
LEVELS = {"none": "fp", "hidden": "hybrid", "all": "quantized"}
ROWS = {"none": "Full-Precision", "hidden": "Hybrid", "all": "Quantized"}


def as_paper(recipe: Recipe) -> Recipe:
    """The same network trained by the paper's rule from the paper's start, packed, with no state.

    The paper names no activation. With ReLU its rule diverges on the all-quantized network, with tanh it trains.
    """
    activation = "tanh" if recipe.quantize == "all" else recipe.activation
    return dataclasses.replace(recipe, name=f"{recipe.name}-paper", memory=False, init="paper", norm="rms",
                               activation=activation, **PAPER)


def mnist_dnn(quantize: str, bits: int) -> Recipe:
    """One row of Table 1.

    The norm (never with parameters) is what served each level best: batch norm where float layers learn, RMS norm where
    none does. Full precision overfits without some dropout; the integer rows lose by it. See docs/lab-notes.md.
    """
    suffix = "" if quantize == "none" else f"-{bits}bit"
    full_precision = quantize == "none"
    return Recipe(name=f"mnist-dnn-{LEVELS[quantize]}{suffix}", table="mnist-dnn",
                  row=ROWS[quantize] + suffix.replace("-", " "), paper=MNIST_DNN[quantize, bits],
                  quantize=quantize, bits=bits, norm="rms" if quantize == "all" else "batch",
                  dropout=0.2 if full_precision else 0.0, input_dropout=0.1 if full_precision else 0.0)


def depth(layers: int) -> Recipe:
    """One column of Table 6: the ternary, all-quantized network with 2 to 10 layers."""
    return Recipe(name=f"mnist-dnn-depth-{layers}", table="depth", row=f"{layers} layers", paper=DEPTH[layers],
                  quantize="all", bits=2, depth=layers)


def digits(quantize: str, bits: int) -> Recipe:
    """The demo's networks, small enough for a minute on a laptop."""
    suffix = "" if quantize == "none" else f"-{bits}bit"
    return Recipe(name=f"digits-{LEVELS[quantize]}{suffix}", table="demo", row=ROWS[quantize] + suffix.replace("-", " "),
                  paper=None, data="digits", batch=100, steps=360, width=256, depth=4, quantize=quantize, bits=bits,
                  dense_lr=2e-3)


def _all() -> Iterator[Recipe]:
    for key in MNIST_DNN:
        recipe = mnist_dnn(*key)
        yield recipe
        if recipe.quantize != "none":
            yield as_paper(recipe)
    for layers in DEPTH:
        yield depth(layers)
        yield as_paper(depth(layers))
    for key in (("none", 32), ("hidden", 4), ("all", 2)):
        yield digits(*key)


RECIPES = {recipe.name: recipe for recipe in _all()}


def find(name: str) -> Recipe:
    if name not in RECIPES:
        import difflib

        near = difflib.get_close_matches(name, RECIPES, 1)
        raise ValueError(f"no recipe {name!r}; " + (f"did you mean {near[0]}? " if near else "") + "gft recipes lists them")
    return RECIPES[name]
