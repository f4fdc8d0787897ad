"""The ladder: Llamas of 10M to 1B weights on English Wikipedia, trained by gft and by others in the same loop.

    wiki-ladder-SIZE-ROW         wiki-ladder-10m-adamw, wiki-ladder-85m-gft-2bit-packed, …

One pass over the text at most, so that nothing can be learnt by heart. All matrices of the blocks are what a row trains in
its own way; embedding, norms and head are floats and learn by AdamW in all of them. Settings are chosen on val at the small
sizes (`gft tune`), into tuned.json beside the table's runs, and carried to other sizes by `transferred`; rows that were not
tuned have the library's defaults. The test split is read when a run of the table has ended, by `gft reproduce` alone.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gft.errors import UsageError
from gft.lab.models.llama import inner_width
from gft.lab.recipe import MOMENTUM, PAPERS_RULE, Data, Dense, Integers, Model, Recipe, Schedule
from gft.lab.records import read_chosen
from gft.storage import HALF

TABLE = "wiki-ladder"
BATCH, CONTEXT, VOCABULARY = 16, 1024, 16_384
STEPS = 2600  # of 16,384 tokens: 42.6M of the text's 43.9M
SHORT = 600  # at 1B
RATE, AT_WIDTH = 6e-4, 768  # AdamW's before anything was tuned, falling with the width


@dataclass(frozen=True)
class Size:
    width: int
    depth: int
    heads: int
    seeds: int = 1  # runs a row, unless --seeds says otherwise
    steps: int = STEPS


SIZES = {"10m": Size(384, 6, 6, seeds=3), "30m": Size(512, 10, 8, seeds=3), "85m": Size(768, 12, 12),
         "300m": Size(1024, 24, 16), "1b": Size(2048, 20, 32, steps=SHORT)}


@dataclass(frozen=True)
class Row:
    """One way to train the blocks."""

    title: str
    integers: Integers
    optimizer: str = "adamw"  # of floats
    own_lr: tuple[str, ...] = ("dense.lr",)  # what a row's lr is


def _gft(title: str, bits: int, **settings: Any) -> Row:
    return Row(f"{title} {bits}bit", Integers("blocks", bits, **settings), own_lr=("integers.lr",))


def _other(title: str, method: str, bits: int, lr: float) -> Row:
    return Row(f"{title} {bits}bit", Integers("blocks", bits, method=method, lr=lr), own_lr=("integers.lr",))


def _bitnet(title: str, bits: int) -> Row:
    """Its latents are floats that learn as all other floats do."""
    return Row(f"{title} {bits}bit", Integers("blocks", bits, method="bitnet", lr=RATE), own_lr=("dense.lr", "integers.lr"))


ROWS = {
    "adamw": Row("AdamW", Integers()),
    "muon": Row("Muon + AdamW", Integers(), "muon"),
    **{f"gft-{bits}bit": _gft("GFT", bits) for bits in (4, 3, 2)},
    **{f"gft-{bits}bit-momentum": _gft("GFT, momentum", bits, **MOMENTUM) for bits in (4, 3, 2)},
    **{f"gft-{bits}bit-packed": _gft("GFT, packed", bits, memory=False, momentum_rank=16) for bits in (4, 2)},
    "gft-2bit-half": _gft("GFT, half a byte", 2, memory=HALF, momentum_rank=16),
    "bitnet-2bit": _bitnet("BitNet b1.58", 2),
    "bitnet-4bit": _bitnet("BitNet's STE", 4),
    **{f"dqt-{bits}bit": _other("DQT", "dqt", bits, 3e-4) for bits in (4, 2)},
    **{f"eco-{bits}bit": _other("ECO", "eco", bits, 3e-4) for bits in (4, 2)},
    **{f"gft-{bits}bit-paper": _gft("GFT, the paper's rule", bits, **PAPERS_RULE) for bits in (4, 2)},
}
AT_1B = ("adamw", "gft-4bit", "gft-2bit")


def recipe(size_name: str, row_name: str) -> Recipe:
    size, row = SIZES[size_name], ROWS[row_name]
    lr = four_digits(RATE * AT_WIDTH / size.width)
    latents = row.integers.method == "bitnet"
    integers = dataclasses.replace(row.integers, lr=lr) if latents else row.integers
    return Recipe(f"{TABLE}-{size_name}-{row_name}", TABLE, f"{size_name.upper()}, {row.title}", None, "loss",
                  Data("wiki", batch=BATCH, eval_batch=BATCH, context=CONTEXT, vocabulary=VOCABULARY),
                  Model("llama", width=size.width, depth=size.depth, heads=size.heads, precision="bf16", compiled=True),
                  integers, Dense(lr=lr, beta2=0.95, optimizer=row.optimizer, clip=1.0),
                  Schedule(size.steps, warmup=size.steps // 26, eval_every=size.steps // 20))


def recipes() -> Iterator[Recipe]:
    for size in SIZES:
        yield from (recipe(size, row) for row in ROWS if size != "1b" or row in AT_1B)


def place_of(name: str) -> tuple[str, str]:
    """wiki-ladder-10m-gft-2bit -> 10m, gft-2bit."""
    size, _, row = name.removeprefix(f"{TABLE}-").partition("-")
    if size not in SIZES or row not in ROWS:
        raise UsageError(f"{name} is no recipe of {TABLE}; gft recipes {TABLE} lists them")
    return size, row


def seeds_of(one: Recipe) -> int:
    return SIZES[place_of(one.name)[0]].seeds


def body_weights(model: Mapping[str, Any]) -> int:
    """The weights of the blocks' matrices, of a recipe's config of a model."""
    width, heads = model["width"], model["heads"]
    kv_width = width * (model.get("kv_heads") or heads) // heads
    return model["depth"] * (2 * width**2 + 2 * width * kv_width + 3 * width * inner_width(width))


# ---------------------------------------------------------------------------------------------------- tuned settings


def four_digits(number: float) -> float:
    return float(f"{number:.4g}")


def as_reported(one: Recipe, folder: Path) -> Recipe:
    """The recipe as the table's command runs it: with the settings that were chosen on val, and tested at its end."""
    return with_chosen(one, read_chosen(folder / "tuned.json", SIZES)).updated(data={"test": True})


def with_chosen(one: Recipe, chosen: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """The recipe with the settings that were chosen: row -> size -> {"settings": {"dense.lr": …}, …}.

    Floats learn as AdamW's own row does, unless the row has a choice of its own; the share of the rate that the blocks' own
    floats take, matrices or gains, is for rows that have them. A method that was tuned at some number of bits has the same
    settings at others, of several those of the most bits.
    """
    _, row = place_of(one.name)
    alike = sorted(name for name in chosen if _without_bits(name) == _without_bits(row))
    own = chosen.get(row) or (chosen[alike[-1]] if alike else None)
    floats = {key: value for key, value in transferred(one, chosen.get("adamw", {})).items() if key.startswith("dense.")}
    share = floats.pop("dense.blocks", None)
    settings = floats | transferred(one, own or {})
    made = one.changed([f"{key}={value}" for key, value in settings.items()])
    if share is None or "dense.blocks" in settings or not made.has_rate_of_blocks:
        return made
    return made.updated(dense={"blocks": share})


def _without_bits(row: str) -> str:
    return re.sub(r"-\d+bit", "", row)


def transferred(one: Recipe, by_size: Mapping[str, Any]) -> dict[str, float]:
    """Settings chosen at some sizes, for any: at the same size as they are. Else those of the next smaller size (or of the
    smallest), AdamW's rates times its width over this one, as a step that adds up over the inputs must shrink. gft's own lr
    is measured so that it stays."""
    if not by_size:
        return {}
    size, _ = place_of(one.name)
    by_width = sorted(by_size, key=lambda name: SIZES[name].width)
    smaller = [name for name in by_width if SIZES[name].width <= SIZES[size].width]
    source = size if size in by_size else (smaller or by_width[:1])[-1]
    ratio = SIZES[source].width / SIZES[size].width
    stays = one.integers.layers != "none" and one.integers.method == "gft"
    return {key: four_digits(value * ratio) if key == "dense.lr" or (key == "integers.lr" and not stays) else value
            for key, value in by_size[source]["settings"].items()}
