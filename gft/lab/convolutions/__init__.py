"""Convolutions: a ResNet-18 on photographs and a plain convolutional net on digits, integers beside floats at their best.

    conv-SIZE-ROW                conv-64px-10ep-adamw, conv-128px-30ep-gft-2bit, conv-mnist-10ep-sgd, …

A user's training: photographs cropped and mirrored at random, batch norm with torch's momentum, rates that rise for a
twentieth of the steps and fall as a cosine. Rows of floats are tuned on val (`gft tune convolutions`), into tuned.json
beside the table's runs. GFT's rows have the library's defaults, or momentum besides; their floats, which are stem, norms,
head and gains, learn as AdamW's own row does. The test split is read when a run of the table has ended; Imagenette has none,
and val serves.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gft.errors import UsageError
from gft.lab.recipe import MOMENTUM, Data, Dense, Integers, Model, Recipe, Schedule, dotted
from gft.lab.records import read_chosen

TABLE = "convolutions"
SEEDS = 2  # runs a row, unless --seeds says otherwise
BATCH, EVAL_BATCH = 128, 500
EPOCHS = (10, 30)
WARMUP = 0.05  # of the steps
FLOATS = ("adamw", "sgd")


@dataclass(frozen=True)
class Task:
    """A network and what it learns."""

    title: str
    data: Data
    model: Model


def _photographs(pixels: int) -> Task:
    return Task(f"ResNet-18, {pixels} px", Data(f"imagenette-{pixels}", "light", BATCH, eval_batch=EVAL_BATCH),
                Model("resnet", width=64, depth=2, precision="bf16"))


TASKS = {
    "64px": _photographs(64),
    "128px": _photographs(128),
    "mnist": Task("CNN, MNIST", Data("mnist-images", batch=BATCH, eval_batch=EVAL_BATCH),
                  Model("cnn", width=32, depth=3, precision="bf16")),
}
SIZES = tuple(f"{task}-{epochs}ep" for task in TASKS for epochs in EPOCHS)


@dataclass(frozen=True)
class Row:
    """One way to train the blocks. Rates are those before anything was tuned."""

    title: str
    dense: Dense
    integers: Integers
    own_lr: tuple[str, ...] = ("dense.lr",)  # what a row's lr is


def _gft(title: str, bits: int, **settings: Any) -> Row:
    return Row(f"{title} {bits}bit", ADAMW, Integers("blocks", bits, **settings), ("integers.lr",))


ADAMW, SGD = Dense(lr=2e-3, weight_decay=0.05), Dense(lr=0.1, weight_decay=5e-4, optimizer="sgd")
ROWS = {
    "adamw": Row("AdamW", ADAMW, Integers()),
    "sgd": Row("SGD", SGD, Integers()),
    **{f"gft-{bits}bit": _gft("GFT", bits) for bits in (4, 2)},
    **{f"gft-{bits}bit-momentum": _gft("GFT momentum", bits, **MOMENTUM) for bits in (4, 2)},
}


def recipe(size: str, row: str) -> Recipe:
    name, _, epochs = size.removesuffix("ep").partition("-")
    task, how = TASKS[name], ROWS[row]
    one = Recipe(f"conv-{size}-{row}", TABLE, f"{task.title}, {epochs} epochs, {how.title}", None, "accuracy", task.data,
                 task.model, how.integers, how.dense, Schedule(falls="cosine"))
    one = one.changed([f"epochs={epochs}"])
    return one.updated(schedule={"warmup": round(WARMUP * one.schedule.steps)})


def recipes() -> Iterator[Recipe]:
    for size in SIZES:
        yield from (recipe(size, row) for row in ROWS)


def place_of(name: str) -> tuple[str, str]:
    """conv-64px-10ep-gft-2bit -> 64px-10ep, gft-2bit."""
    for size in SIZES:
        row = name.removeprefix(f"conv-{size}-")
        if row in ROWS:
            return size, row
    raise UsageError(f"{name} is no recipe of {TABLE}; gft recipes conv lists them")


def seeds_of(_: Recipe) -> int:
    return SEEDS


# ---------------------------------------------------------------------------------------------------- tuned settings


def chosen_in(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """What `gft tune` has chosen for the table of this folder, if it did."""
    return read_chosen(folder / "tuned.json", SIZES)


def as_reported(one: Recipe, folder: Path) -> Recipe:
    """The recipe as the table's command runs it: with the settings that were chosen on val, and tested at its end."""
    return with_chosen(one, chosen_in(folder)).updated(data={"test": True})


def with_chosen(one: Recipe, chosen: Mapping[str, Mapping[str, Any]]) -> Recipe:
    return one.changed([f"{key}={value}" for key, value in chosen_for(*place_of(one.name), chosen).items()])


def chosen_for(size: str, row: str, chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Settings of a row: AdamW's where it trains the floats, then the row's own choice, if it has one."""
    settings: dict[str, float] = {}
    for name in dict.fromkeys(("adamw", row) if ROWS[row].dense.optimizer == "adamw" else (row,)):
        settings |= _at(size, chosen.get(name, {})).get("settings", {})
    return settings


def _at(size: str, by_size: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was chosen at that size, or for the same network and images in another number of epochs."""
    task = size.partition("-")[0]
    alike = [size, *(other for other in SIZES if other.partition("-")[0] == task)]
    return next((by_size[one] for one in alike if one in by_size), {})


def tuned_for(config: Mapping[str, Any], size: str, row: str, chosen: Mapping[str, Mapping[str, Any]]) -> int | None:
    """For how many steps the settings of a run of floats were tuned; None: it was not made with what was chosen."""
    best, flat = _at(size, chosen.get(row, {})), dotted(config)
    made_with = best and all(flat[key] == value for key, value in best["settings"].items())
    return best["steps"] if made_with else None
