"""Every experiment that can be trained: the rows of the paper's tables, other methods beside them, the ladder on real text
(ladder/), convolutions beside tuned floats (convolutions/), and small demos.

Each is a function that returns a Recipe (recipe.py) with the library's default settings. Two variants of each integer row
stand beside it: "-paper" trains by the paper's own rule from the paper's start (`gft.PAPER`), "-packed" by the default rule
without memory, so that nothing but the packed levels is kept.
"""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from gft.errors import UsageError
from gft.lab import convolutions, ladder, transfer
from gft.lab import data as datasets
from gft.lab.recipe import PAPERS_RULE, Data, Dense, Integers, Model, Recipe, Schedule

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

# Settings of tables that were trained before these defaults became what they are.
WITHOUT_WARMUP: dict[str, Any] = {"own_warmup": 0}
BEFORE: dict[str, Any] = {"lr": 0.1, **WITHOUT_WARMUP}

# How the paper calls what is quantized.
ROWS = {"none": "Full-Precision", "hidden": "Hybrid", "all": "Quantized", "mlp": "Hybrid-1", "blocks": "Hybrid-2"}
NAMES = {"none": "fp", "hidden": "hybrid", "all": "quantized", "mlp": "hybrid1", "blocks": "hybrid2"}


def row(table: str, layers: str, bits: int, paper: float | None) -> dict[str, Any]:
    """What one row of a table says of itself."""
    suffix = "" if layers == "none" else f"-{bits}bit"
    return {"name": f"{table}-{NAMES[layers]}{suffix}", "table": table, "row": ROWS[layers] + suffix.replace("-", " "),
            "paper": paper}


def mnist_dnn(layers: str, bits: int) -> Recipe:
    """One row of Table 1.

    The norm (never with parameters) is what served each level best: batch norm where float layers learn, RMS norm where
    none does. Full precision overfits without some dropout; the integer rows lose by it. See docs/lab-notes.md.
    """
    full_precision = layers == "none"
    return Recipe(**row("mnist-dnn", layers, bits, MNIST_DNN[layers, bits]), data=Data(label_smoothing=0.1),
                  model=Model(norm="rms" if layers == "all" else "batch", dropout=0.2 if full_precision else 0.0,
                              input_dropout=0.1 if full_precision else 0.0),
                  integers=Integers(layers, bits, **BEFORE))


def depth(number: int) -> Recipe:
    """One column of Table 6: the ternary, all-quantized network with 2 to 10 layers."""
    return Recipe(name=f"mnist-dnn-depth-{number}", table="depth", row=f"{number} layers", paper=DEPTH[number],
                  model=Model(depth=number), integers=Integers("all", 2, **BEFORE))


def shakespeare_gpt(layers: str, bits: int) -> Recipe:
    """One row of Table 2: nanoGPT, 2000 steps of 128 windows of 256 characters."""
    return Recipe(**row("shakespeare-gpt", layers, bits, SHAKESPEARE_GPT[layers, bits]), metric="loss",
                  data=Data("shakespeare", batch=128, eval_batch=128),
                  model=Model("gpt", width=384, depth=6, heads=6, dropout=0.2, precision="bf16", compiled=True),
                  integers=Integers(layers, bits, **WITHOUT_WARMUP), schedule=Schedule(2000, warmup=10, eval_every=100))


def mnist_vit(layers: str, bits: int) -> Recipe:
    """One row of the upper half of Table 3: 28×28 in patches of 4, 4000 steps, the same jitter and label smoothing for all:
    without any, even full precision learns its 50,000 digits by heart and stays at 98 %."""
    return Recipe(**row("mnist-vit", layers, bits, MNIST_VIT[layers, bits]),
                  data=Data("mnist-images", "jitter", label_smoothing=0.1, eval_batch=1000),
                  model=Model("vit", width=512, depth=12, heads=8, patch=4, precision="bf16", compiled=True),
                  integers=Integers(layers, bits, **BEFORE), schedule=Schedule(4000, warmup=100, eval_every=400))


def imagenette_vit(layers: str, bits: int) -> Recipe:
    """One row of the lower half of Table 3: 224×224 in patches of 16, 15,000 steps that each see a quarter of the patches,
    the last tenth all of them: a little fewer in sum than the paper's 5,000 steps of whole images. The same strong
    augmentation and mixup for all: 9,469 photographs are few for 38M weights. Validation sees the middle 7/8. In so long a
    training MLPs learn more without inertia; attention does not."""
    return Recipe(**row("imagenette-vit", layers, bits, IMAGENETTE_VIT[layers, bits]),
                  data=Data("imagenette", "blended", label_smoothing=0.1, eval_batch=512, eval_crop=0.875),
                  model=Model("vit", width=512, depth=12, heads=8, patch=16, patch_dropout=0.75, positions="waves",
                              precision="bf16", compiled=True),
                  integers=Integers(layers, bits, **BEFORE, inertia=0.0, attention_lr=0.05 if layers == "blocks" else None),
                  dense=Dense(lr=3e-4), schedule=Schedule(15000, warmup=500, eval_every=1000, whole_images=0.1))


def digits(layers: str, bits: int) -> Recipe:
    """The demo's networks, small enough for a minute on a laptop."""
    return Recipe(**row("digits", layers, bits, None), data=Data("digits", batch=100), model=Model(width=256, depth=4),
                  integers=Integers(layers, bits), dense=Dense(lr=2e-3), schedule=Schedule(360))


def verses_gpt(layers: str, bits: int) -> Recipe:
    """A GPT on a few embedded sonnets: the transformer's demo."""
    return Recipe(**row("verses-gpt", layers, bits, None), metric="loss", data=Data("verses", batch=16, eval_batch=64),
                  model=Model("gpt", width=96, depth=2, heads=4), integers=Integers(layers, bits), dense=Dense(lr=3e-3),
                  schedule=Schedule(300, warmup=10, eval_every=50))


# ---------------------------------------------------------------------------------------------------- variants


VARIANTS = ("default", "paper", "packed")


def variant_of(name: str) -> str:
    """Which variant a recipe's name says it is."""
    return next((variant for variant in VARIANTS if name.endswith(f"-{variant}")), "default")


def as_paper(recipe: Recipe) -> Recipe:
    """The same network trained by the paper's rule from the paper's start, packed, with no state, and without the label
    smoothing that the paper does not name.

    It names no activation either. With ReLU its rule diverges on the all-quantized DNN, with tanh it trains. Photographs
    are seen in the paper's 5,000 steps, not in our 15,000, each of which sees a quarter of what the paper's do.
    """
    papers = {**PAPERS_RULE, "inertia": None, "attention_lr": None}
    activation = "tanh" if recipe.integers.layers == "all" else recipe.model.activation
    steps = 5000 if recipe.data.name == "imagenette" else recipe.schedule.steps
    return recipe.updated(name=f"{recipe.name}-paper", data={"label_smoothing": 0.0}, integers=papers,
                          model={"norm": "rms", "activation": activation}, schedule={"steps": steps})


def as_packed(recipe: Recipe) -> Recipe:
    """The same by the default rule without memory: 0.25 B a 2-bit weight, 0.5 B a 3- or 4-bit one, and no state.

    Packed transformers learn more with orthogonalized votes, GPTs with less dropout than the others (the coarser their
    integers, and the more of them, the less), ViTs with a running second moment. On MNIST that is so for integer attention
    only, on photographs for 3 and 4 bits. In as many steps as these take weights that move often forget what they were, so
    the threshold is higher: 2 rms, without orthogonalization 3. And floats around packed integers learn photographs by
    heart, unless they decay.
    """
    layers, bits = recipe.integers.layers, recipe.integers.bits
    packed = recipe.updated(name=f"{recipe.name}-packed", integers={"memory": False, "inertia": None, "attention_lr": None})
    if recipe.model.name == "gpt":
        dropout = 0.1 if layers == "mlp" else 0.05 if bits > 2 else 0.0
        return packed.updated(model={"dropout": dropout}, integers={"orthogonalize": True})
    if recipe.data.name == "imagenette":
        if bits == 2:
            return packed.updated(integers={"threshold": 3.0})
        return packed.updated(integers={"orthogonalize": True, "second_moment": "running", "threshold": 2.01438},
                              dense={"weight_decay": 0.5})
    if layers == "blocks":
        return packed.updated(integers={"orthogonalize": True, "second_moment": "running"})
    return packed


# ---------------------------------------------------------------------------------------------------- other methods


# The baselines' learning rates, by bits, chosen as docs/lab-notes.md says. They mean what baselines.py says of each method.
BASELINE_RATES = {
    "ste": {4: 2e-3, 3: 2e-3, 2: 2e-3},
    "signsgd": {4: 0.1, 2: 0.001},
    "bop": {4: 0.01, 2: 0.01},
    "dqt": {4: 2e-3, 2: 2e-3},
}
METHOD_ROWS = {"gft": "GFT", "ste": "STE", "signsgd": "Sign-majority SGD", "bop": "Bop", "dqt": "DQT", "eco": "ECO",
               "bitnet": "BitNet b1.58"}


def baselines_row(method: str, bits: int) -> Recipe:
    """One row of the comparison: Table 1's hybrid at width 1024, the same network, batches, steps and schedule for every
    method. bits=32 is AdamW on float weights."""
    model = Model(width=1024, norm="batch")
    if bits == 32:
        return Recipe(name="mnist-baselines-fp", table="baselines", row="AdamW, full precision", paper=None, model=model)
    lr = BEFORE["lr"] if method == "gft" else BASELINE_RATES.get(method, {}).get(bits, 2e-3)
    return Recipe(name=f"mnist-baselines-{method}-{bits}bit", table="baselines", row=f"{METHOD_ROWS[method]} {bits}bit",
                  paper=None, model=model, integers=Integers("hidden", bits, method=method, lr=lr, **WITHOUT_WARMUP))


def baselines_rows() -> Iterator[Recipe]:
    yield baselines_row("adamw", 32)
    yield from (baselines_row("gft", bits) for bits in (4, 3, 2))
    yield from (as_packed(baselines_row("gft", bits)).updated(row=f"GFT, packed {bits}bit") for bits in (4, 2))
    for bits in (4, 2):
        paper = as_paper(baselines_row("gft", bits))
        yield paper.updated(row=f"GFT, the paper's rule {bits}bit", model={"norm": "batch"})
    yield from (baselines_row(method, bits) for method, rates in BASELINE_RATES.items() for bits in rates)


# ---------------------------------------------------------------------------------------------------- all of them


def _rows_of_the_paper() -> Iterator[Recipe]:
    for make, values in ((mnist_dnn, MNIST_DNN), (shakespeare_gpt, SHAKESPEARE_GPT), (mnist_vit, MNIST_VIT),
                         (imagenette_vit, IMAGENETTE_VIT)):
        yield from (make(layers, bits) for layers, bits in values)
    yield from (depth(number) for number in DEPTH)


def _all() -> Iterator[Recipe]:
    for recipe in _rows_of_the_paper():
        yield recipe
        if recipe.integers.layers != "none":
            yield as_paper(recipe)
            yield as_packed(recipe)
    yield from baselines_rows()
    yield from ladder.recipes()
    yield from convolutions.recipes()
    yield from transfer.recipes()
    for key in (("none", 32), ("hidden", 4), ("all", 2)):
        yield digits(*key)
    for key in (("none", 32), ("mlp", 4), ("blocks", 2)):
        yield verses_gpt(*key)


RECIPES = {recipe.name: recipe for recipe in _all()}


def listed(words: Sequence[str] = ()) -> list[Recipe]:
    """The recipes whose name contains all of the words, those that need no download first."""
    chosen = [recipe for recipe in RECIPES.values() if all(word.lower() in recipe.name for word in words)]
    if not chosen:
        raise UsageError(f"no recipe's name contains {' and '.join(map(repr, words))}; gft recipes lists them all")
    return sorted(chosen, key=lambda recipe: not datasets.embedded(recipe.data.name))


def find(name: str) -> Recipe:
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1)
        raise UsageError(f"no recipe {name!r}; " + (f"did you mean {near[0]}? " if near else "") + "gft recipes lists them")
    return RECIPES[name]
