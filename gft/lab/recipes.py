"""Recipes: every experiment as a function that returns a typed config: the paper's tables, other methods, small demos.

A recipe trains by the library's default settings. Two variants of each integer row stand beside it: "-paper" trains by
the paper's own rule from the paper's start (`gft.PAPER`), "-packed" by the default rule without vote memory, so that
nothing but the packed levels is kept. Change any field with `gft train NAME --set field=value`.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

from gft.lab import baselines
from gft.lab import data as datasets
from gft.lab.models.dnn import ACTIVATIONS, NORMS
from gft.lab.models.vit import POSITIONS
from gft.optimizer import PAPER

CHOICES = {
    "metric": ("accuracy", "loss"),
    "model": ("dnn", "gpt", "vit"),
    "norm": NORMS,
    "activation": tuple(ACTIVATIONS),
    "quantize": ("none", "hidden", "all", "mlp", "blocks"),
    "method": ("gft", *baselines.METHODS),
    "precision": ("fp32", "bf16"),
    "augment": datasets.AUGMENT,
    "positions": POSITIONS,
}


@dataclass(frozen=True)
class Recipe:
    name: str
    table: str  # which table of the paper, if any
    row: str  # its row
    paper: float | None  # the paper's value
    metric: str = "accuracy"  # in %, or the validation loss in nats

    # data and budget
    data: str = "mnist"
    augment: str = "none"  # of the training images
    batch: int = 256
    steps: int = 1960  # 10 epochs of 50,000
    eval_every: int = 0  # steps; 0: once an epoch
    eval_batch: int = 2000
    eval_crop: float = 1.0  # of each side of an image, the middle that is evaluated: training's crops show things larger

    # the network
    model: str = "dnn"
    width: int = 4096
    depth: int = 5
    heads: int = 8  # gpt, vit
    patch: int = 4  # vit
    norm: str = "rms"  # dnn
    activation: str = "relu"  # dnn
    dropout: float = 0.0
    input_dropout: float = 0.0  # dnn
    patch_dropout: float = 0.0  # vit
    whole: float = 0.0  # vit with patch_dropout: the share of the steps, the last ones, that see every patch after all
    positions: str = "random"  # vit
    precision: str = "fp32"  # of the products on a GPU
    compiled: bool = False  # torch.compile, on a GPU: worth its quarter of a minute where steps are long or many

    # which of its layers are integers, and how they are kept
    quantize: str = "none"  # dnn: hidden (all but the first and last), all; gpt and vit: mlp, blocks (attention too)
    bits: int = 32
    memory: bool = True
    init: str = "keep"

    # how the integers learn: gft.GFT's arguments, or another method (baselines.py), which has an lr of its own kind
    method: str = "gft"
    threshold: float = baselines.THRESHOLD  # bop
    rule: str = "rounding"
    vote: str = "int8"
    sample: str = "token"
    mask: str = "none"
    lr: float = 0.1
    inertia: float = 0.9
    quorum: float = 1.6
    sizes: str = "step"
    directions: str = "voted"
    p_min: float = 0.001
    attention_lr: float = 0.0  # gpt, vit: integer attention has this lr and the next inertia; at 0 it learns as all others
    attention_inertia: float = 0.9

    # how the rest learns: AdamW's arguments
    dense_lr: float = 6e-4
    weight_decay: float = 0.1
    beta2: float = 0.999

    # both
    warmup: int = 0  # steps; then both rates fall linearly to 0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        datasets.check(self.data)
        for key, choices in CHOICES.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"{key}={getattr(self, key)!r}: choose one of {', '.join(choices)}")
        for key, least in (("steps", 1), ("batch", 1), ("eval_batch", 1), ("width", 1), ("depth", 1), ("heads", 1),
                           ("patch", 1), ("warmup", 0), ("eval_every", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)}: give at least {least}")
        for key in ("dropout", "input_dropout", "patch_dropout", "whole", "label_smoothing", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: it lies between 0 and 1")
        if not 0 < self.eval_crop <= 1:
            raise ValueError(f"eval_crop={self.eval_crop}: a share of an image's side, above 0 and at most 1")
        for key, nothing in (("eval_crop", 1), ("whole", 0)):
            if getattr(self, key) != nothing and self.model != "vit":
                raise ValueError(f"{key}={getattr(self, key)} is for images; leave it at {nothing} or choose model=vit")
        for key in ("dense_lr", "attention_lr"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key}={getattr(self, key)}: a rate must not be negative")
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold}: a number of rms, 0 or more")

    @property
    def lower_is_better(self) -> bool:
        return self.metric == "loss"

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


# What says nothing of a network without integers.
OF_INTEGERS = ("memory", "init", "method", "threshold", "rule", "vote", "sample", "mask", "lr", "inertia", "quorum", "sizes",
               "directions", "p_min", "attention_lr", "attention_inertia")
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

# The paper's values: top-1 % on validation, or the validation loss (Tables 1, 2, 3 and 6).
MNIST_DNN = {("none", 32): 98.7, ("hidden", 4): 98.1, ("hidden", 3): 97.7, ("hidden", 2): 95.2,
             ("all", 4): 96.7, ("all", 3): 93.4, ("all", 2): 87.4}
SHAKESPEARE_GPT = {("none", 32): 1.57, ("mlp", 4): 1.53, ("mlp", 3): 1.61, ("mlp", 2): 1.93,
                   ("blocks", 4): 1.59, ("blocks", 3): 1.72, ("blocks", 2): 2.55}
MNIST_VIT = {("none", 32): 99.5, ("mlp", 4): 95.6, ("mlp", 3): 95.0, ("mlp", 2): 86.4,
             ("blocks", 4): 90.1, ("blocks", 3): 87.5, ("blocks", 2): 22.1}
IMAGENETTE_VIT = {("none", 32): 90.8, ("mlp", 4): 84.9, ("mlp", 3): 85.4, ("mlp", 2): 74.1,
                  ("blocks", 4): 77.0, ("blocks", 3): 70.4, ("blocks", 2): 35.4}
DEPTH = {2: 84.46, 3: 88.82, 5: 89.24, 7: 88.53, 10: 88.47}

# How the paper calls what is quantized.
ROWS = {"none": "Full-Precision", "hidden": "Hybrid", "all": "Quantized", "mlp": "Hybrid-1", "blocks": "Hybrid-2"}
NAMES = {"none": "fp", "hidden": "hybrid", "all": "quantized", "mlp": "hybrid1", "blocks": "hybrid2"}


def row(table: str, quantize: str, bits: int, paper: float | None) -> dict[str, Any]:
    """What one row of a table says of itself."""
    suffix = "" if quantize == "none" else f"-{bits}bit"
    return {"name": f"{table}-{NAMES[quantize]}{suffix}", "table": table, "row": ROWS[quantize] + suffix.replace("-", " "),
            "paper": paper, "quantize": quantize, "bits": bits}


def mnist_dnn(quantize: str, bits: int) -> Recipe:
    """One row of Table 1.

    The norm (never with parameters) is what served each level best: batch norm where float layers learn, RMS norm where
    none does. Full precision overfits without some dropout; the integer rows lose by it. See docs/lab-notes.md.
    """
    full_precision = quantize == "none"
    return Recipe(**row("mnist-dnn", quantize, bits, MNIST_DNN[quantize, bits]),
                  norm="rms" if quantize == "all" else "batch",
                  dropout=0.2 if full_precision else 0.0, input_dropout=0.1 if full_precision else 0.0,
                  label_smoothing=0.1)


def depth(layers: int) -> Recipe:
    """One column of Table 6: the ternary, all-quantized network with 2 to 10 layers."""
    return Recipe(name=f"mnist-dnn-depth-{layers}", table="depth", row=f"{layers} layers", paper=DEPTH[layers],
                  quantize="all", bits=2, depth=layers)


def shakespeare_gpt(quantize: str, bits: int) -> Recipe:
    """One row of Table 2: nanoGPT, 2000 steps of 128 windows of 256 characters."""
    return Recipe(**row("shakespeare-gpt", quantize, bits, SHAKESPEARE_GPT[quantize, bits]), metric="loss", model="gpt",
                  data="shakespeare", batch=128, steps=2000, warmup=10, eval_every=100, eval_batch=128, width=384, depth=6,
                  heads=6, dropout=0.2, precision="bf16", compiled=True, lr=0.2)


def mnist_vit(quantize: str, bits: int) -> Recipe:
    """One row of the upper half of Table 3: 28×28 in patches of 4, 4000 steps, the same jitter and label smoothing for all:
    without any, even full precision learns its 50,000 digits by heart and stays at 98 %."""
    return Recipe(**row("mnist-vit", quantize, bits, MNIST_VIT[quantize, bits]), model="vit", data="mnist-images",
                  augment="jitter", batch=256, steps=4000, warmup=100, eval_every=400, eval_batch=1000, width=512, depth=12,
                  heads=8, patch=4, precision="bf16", compiled=True, label_smoothing=0.1)


def imagenette_vit(quantize: str, bits: int) -> Recipe:
    """One row of the lower half of Table 3: 224×224 in patches of 16, 15,000 steps that each see a quarter of the patches,
    the last tenth all of them: a little fewer in sum than the paper's 5,000 steps of whole images. The same strong
    augmentation and mixup for all: 9,469 photographs are few for 38M weights. Validation sees the middle 7/8. In so long a
    training MLPs learn more without inertia; attention does not."""
    return Recipe(**row("imagenette-vit", quantize, bits, IMAGENETTE_VIT[quantize, bits]), model="vit", data="imagenette",
                  augment="blended", batch=256, steps=15000, warmup=500, eval_every=1000, eval_batch=512, eval_crop=0.875,
                  width=512, depth=12, heads=8, patch=16, patch_dropout=0.75, whole=0.1, positions="waves", precision="bf16",
                  compiled=True, inertia=0.0, attention_lr=0.05 if quantize == "blocks" else 0.0, dense_lr=3e-4,
                  label_smoothing=0.1)


def digits(quantize: str, bits: int) -> Recipe:
    """The demo's networks, small enough for a minute on a laptop."""
    return Recipe(**row("digits", quantize, bits, None), data="digits", batch=100, steps=360, width=256, depth=4,
                  dense_lr=2e-3)


def verses_gpt(quantize: str, bits: int) -> Recipe:
    """A GPT on a few embedded sonnets: the transformer's demo."""
    return Recipe(**row("verses-gpt", quantize, bits, None), metric="loss", model="gpt", data="verses", batch=16, steps=300,
                  warmup=10, eval_every=50, eval_batch=64, width=96, depth=2, heads=4, dense_lr=3e-3)


def as_paper(recipe: Recipe) -> Recipe:
    """The same network trained by the paper's rule from the paper's start, packed, with no state, and without the label
    smoothing that the paper does not name.

    It names no activation either. With ReLU its rule diverges on the all-quantized DNN, with tanh it trains. Photographs
    are seen in the paper's 5,000 steps, not in our 15,000, each of which sees a quarter of what the paper's do.
    """
    activation = "tanh" if recipe.quantize == "all" else recipe.activation
    steps = 5000 if recipe.data == "imagenette" else recipe.steps
    return dataclasses.replace(recipe, name=f"{recipe.name}-paper", memory=False, init="paper", norm="rms", steps=steps,
                               activation=activation, attention_lr=0.0, label_smoothing=0.0, **PAPER)


def as_packed(recipe: Recipe) -> Recipe:
    """The same by the default rule without memory: 0.25 B a 2-bit weight, 0.5 B a 3- or 4-bit one, and no state.

    Packed transformers learn more by even directions, GPTs with less dropout than the others (the coarser their integers,
    and the more of them, the less), ViTs with running sizes. On MNIST that is so for integer attention only, on photographs
    for 3 and 4 bits. In as many steps as these take weights that move often forget what they were, so the quorum is higher:
    2 rms, by votes as cast 3. And floats around integers without memory learn photographs by heart, unless they decay.
    """
    packed = dataclasses.replace(recipe, name=f"{recipe.name}-packed", memory=False, attention_lr=0.0)
    if recipe.model == "gpt":
        dropout = 0.1 if recipe.quantize == "mlp" else 0.05 if recipe.bits > 2 else 0.0
        return dataclasses.replace(packed, dropout=dropout, directions="even")
    if recipe.data == "imagenette":
        if recipe.bits == 2:
            return dataclasses.replace(packed, quorum=8.5)
        return dataclasses.replace(packed, directions="even", sizes="running", quorum=5.7, weight_decay=0.5)
    if recipe.quantize == "blocks":
        return dataclasses.replace(packed, directions="even", sizes="running")
    return packed


VARIANTS = ("default", "paper", "packed")


def variant_of(name: str) -> str:
    """Which variant a recipe's name says it is."""
    return next((variant for variant in VARIANTS if name.endswith(f"-{variant}")), "default")


# The baselines' rates, by bits, chosen as docs/lab-notes.md says. They mean what baselines.py says of each method.
BASELINE_RATES = {
    "ste": {4: 2e-3, 3: 2e-3, 2: 2e-3},
    "signsgd": {4: 0.1, 2: 0.001},
    "bop": {4: 0.01, 2: 0.01},
    "dqt": {4: 2e-3, 2: 2e-3},
}
METHOD_ROWS = {"gft": "GFT", "ste": "STE", "signsgd": "Sign-majority SGD", "bop": "Bop", "dqt": "DQT"}


def baselines_row(method: str, bits: int) -> Recipe:
    """One row of the comparison: Table 1's hybrid at width 1024, the same network, batches, steps and schedule for every
    method. bits=32 is AdamW on float weights."""
    if bits == 32:
        return Recipe(name="mnist-baselines-fp", table="baselines", row="AdamW, full precision", paper=None, width=1024,
                      norm="batch")
    recipe = Recipe(name=f"mnist-baselines-{method}-{bits}bit", table="baselines", row=f"{METHOD_ROWS[method]} {bits}bit",
                    paper=None, width=1024, norm="batch", quantize="hidden", bits=bits, method=method)
    return recipe if method == "gft" else dataclasses.replace(recipe, lr=BASELINE_RATES[method][bits])


def baselines_rows() -> Iterator[Recipe]:
    yield baselines_row("adamw", 32)
    yield from (baselines_row("gft", bits) for bits in (4, 3, 2))
    for bits in (4, 2):
        packed = as_packed(baselines_row("gft", bits))
        yield dataclasses.replace(packed, row=f"GFT, packed {bits}bit")
    for bits in (4, 2):
        paper = as_paper(baselines_row("gft", bits))
        yield dataclasses.replace(paper, row=f"GFT, the paper's rule {bits}bit", norm="batch")
    yield from (baselines_row(method, bits) for method, rates in BASELINE_RATES.items() for bits in rates)


def _rows_of_the_paper() -> Iterator[Recipe]:
    for make, values in ((mnist_dnn, MNIST_DNN), (shakespeare_gpt, SHAKESPEARE_GPT), (mnist_vit, MNIST_VIT),
                         (imagenette_vit, IMAGENETTE_VIT)):
        yield from (make(quantize, bits) for quantize, bits in values)
    yield from (depth(layers) for layers in DEPTH)


def _all() -> Iterator[Recipe]:
    for recipe in _rows_of_the_paper():
        yield recipe
        if recipe.quantize != "none":
            yield as_paper(recipe)
            yield as_packed(recipe)
    yield from baselines_rows()
    for key in (("none", 32), ("hidden", 4), ("all", 2)):
        yield digits(*key)
    for key in (("none", 32), ("mlp", 4), ("blocks", 2)):
        yield verses_gpt(*key)


RECIPES = {recipe.name: recipe for recipe in _all()}


def find(name: str) -> Recipe:
    if name not in RECIPES:
        import difflib

        near = difflib.get_close_matches(name, RECIPES, 1)
        raise ValueError(f"no recipe {name!r}; " + (f"did you mean {near[0]}? " if near else "") + "gft recipes lists them")
    return RECIPES[name]
