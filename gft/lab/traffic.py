"""What ranks send each other in a step, and what each keeps, by arithmetic: GFT and AdamW under fully_shard.

    gathered   the weights of a block before its forward and again before its backward      two all_gathers
    reduced    votes, or gradients, each to the rank that keeps those rows                  one reduce_scatter, or all_to_all
    small      sums of squares of votes, mean squares of x and grad_output of all layers    all_reduces

A ring sends each byte of a tensor (ranks - 1) / ranks times from every rank in a gather or a scatter, and twice that in an
all_reduce. Only the integer weights are counted: embeddings, norms and activations are the same for both.
"""

from dataclasses import dataclass

from gft.lab.markdown import table
from gft.storage import Storage

GB = 1e9
VOTE = 4  # bytes: int32
ON_THE_WIRE = {"int32": 4, "int8": 1}  # bytes a vote; of a row's one byte more nothing is said
MOMENTS = 8 + 4  # bytes by row and by column: an int64 sum of squares of votes; a float mean square of x or grad_output


@dataclass(frozen=True)
class Scheme:
    """A way to train: bytes a weight."""

    name: str
    gathered: float  # each time
    reduced: float  # on the wire
    kept: float  # by the ranks together, between backward and step: weight, optimizer state, votes or gradients
    whole: float  # votes or gradients of a layer before they are shared out, and copies of them on the way
    small: int = 0  # bytes by row and by column


@dataclass(frozen=True)
class Setup:
    """A model by its number of weights and its largest layer, on so many ranks."""

    name: str
    weights: float
    largest: tuple[int, int]
    ranks: int


def gft_scheme(bits: int, memory: bool, in_backward: bool = False, wire: str = "int32") -> Scheme:
    """GFT: weights are gathered as they are stored, votes are int32, at least where they are counted."""
    storage = Storage(bits, memory)
    stored = storage.field_bits / 8
    name = f"GFT, {bits} bit {'with memory' if memory else 'packed'}" + (f", {wire}" if wire != "int32" else "")
    name += ", `in_backward`" if in_backward else ""
    copies = 0 if wire == "int32" else 2 * ON_THE_WIRE[wire]  # sent, and arrived
    return Scheme(name, stored, ON_THE_WIRE[wire], stored + (0 if in_backward else VOTE), VOTE + copies, MOMENTS)


SCHEMES = (
    # bf16 for the products; fp32 weight, two moments and gradient. A gradient is copied before it is sent.
    Scheme("AdamW, fp32 gradients", 2, 4, 4 + 8 + 4, 2 + 4),
    Scheme("AdamW, bf16 gradients", 2, 2, 4 + 8 + 4, 2 + 2),
    gft_scheme(4, True),
    gft_scheme(4, True, wire="int8"),
    gft_scheme(2, False),
    gft_scheme(2, False, wire="int8"),
    gft_scheme(2, False, in_backward=True, wire="int8"),
)
SETUPS = (
    Setup("1B", 1e9, (8192, 2048), 8),
    Setup("70B", 70e9, (28672, 8192), 64),
    Setup("1T", 1e12, (65536, 16384), 1024),
)


def sent(scheme: Scheme, setup: Setup) -> dict[str, float]:
    """Bytes that every rank sends in a step, by kind."""
    share = (setup.ranks - 1) / setup.ranks
    rows, columns = setup.largest
    lines = setup.weights / (rows * columns) * (rows + columns)  # rows and columns of all layers, were all like the largest
    return {"gathered": 2 * scheme.gathered * setup.weights * share, "reduced": scheme.reduced * setup.weights * share,
            "small": 2 * scheme.small * lines * share}


def kept(scheme: Scheme, setup: Setup) -> float:
    """Bytes a rank keeps between backward and step."""
    return scheme.kept * setup.weights / setup.ranks


def passing(scheme: Scheme, setup: Setup) -> float:
    """Bytes a rank holds for a moment of the largest layer: its gathered weight, its whole votes or gradient."""
    rows, columns = setup.largest
    return (scheme.gathered + scheme.whole) * rows * columns


def traffic_table() -> str:
    """What `gft pages` writes into docs/scaling.md."""
    lines = []
    for setup in SETUPS:
        for scheme in SCHEMES:
            by_kind = sent(scheme, setup)
            lines.append([f"{setup.name}, {setup.ranks} ranks", scheme.name, *(_gb(by_kind[kind]) for kind in by_kind),
                          _gb(sum(by_kind.values())), _gb(kept(scheme, setup)), _gb(passing(scheme, setup))])
    return table(["", "", "gathered", "reduced", "small sums", "sent by a rank", "kept by a rank", "largest layer, passing"],
                 lines, "llrrrrrr")


def _gb(size: float) -> str:
    return "0" if size == 0 else f"{size / GB:.3g}" if size < 1000 * GB else f"{size / GB:,.0f}"
