"""Does one lr serve networks of all widths and depths? Small Llamas on English Wikipedia, each at several rates.

    transfer-WIDTHxDEPTH-ROW             transfer-256x4-gft-4bit, transfer-64x24-gft-2bit, …

`gft tune transfer` trains them all; results.md shows the loss on val of every rate. The rate of embedding and head falls
with the width beyond 256, as a step of the head adds up over it; all else is the same for all sizes.
"""

from collections.abc import Iterator

from gft.errors import UsageError
from gft.lab.recipe import Data, Dense, Integers, Model, Recipe, Schedule

TABLE = "transfer"
HEAD = 32  # features of an attention head
SIZES = ("64x4", "128x4", "256x4", "512x4", "1024x4", "2048x4", "64x12", "64x24", "256x12", "256x24")
RATE, AT_WIDTH = 8e-3, 256  # of embedding and head: the best of the ladder's at width 384, falling from this width on
STEPS, WARMUP = 400, 16


class Row:
    """One way to store the blocks' weights."""

    own_lr = ("integers.lr",)

    def __init__(self, bits: int, memory: bool = True) -> None:
        self.title = f"GFT{'' if memory else ', packed'} {bits}bit"
        self.integers = Integers("blocks", bits, memory=memory)


ROWS = {"gft-4bit": Row(4), "gft-2bit": Row(2), "gft-2bit-packed": Row(2, memory=False)}


def recipe(size: str, row: str) -> Recipe:
    width, depth = map(int, size.split("x"))
    return Recipe(f"{TABLE}-{size}-{row}", TABLE, f"{size}, {ROWS[row].title}", None, "loss",
                  Data("wiki", batch=16, eval_batch=64, context=128, vocabulary=1024),
                  Model("llama", width=width, depth=depth, heads=width // HEAD, precision="bf16"), ROWS[row].integers,
                  Dense(lr=RATE * min(1.0, AT_WIDTH / width), beta2=0.95, clip=1.0),
                  Schedule(STEPS, warmup=WARMUP, eval_every=STEPS))


def recipes() -> Iterator[Recipe]:
    for size in SIZES:
        yield from (recipe(size, row) for row in ROWS)


def place_of(name: str) -> tuple[str, str]:
    """transfer-64x24-gft-2bit -> 64x24, gft-2bit."""
    size, _, row = name.removeprefix(f"{TABLE}-").partition("-")
    if size not in SIZES or row not in ROWS:
        raise UsageError(f"{name} is no recipe of {TABLE}; gft recipes {TABLE} lists them")
    return size, row
