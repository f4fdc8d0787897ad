"""What of a model is integers, what is float, and why: `summary(model)`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import is_lazy

from gft.layers import NOT_CHOSEN, QuantLayer, check_model, names_by_parameter, why_float


@dataclass
class Kind:
    """Layers of one type that are stored alike, or float ones that are so for one reason."""

    name: str  # QuantLinear, Embedding, …
    bits: int | None  # None: float
    why: str  # are they float; empty of integers
    layers: int = 0
    weights: int = 0
    bytes_before: int = 0  # as the float type of the layer would take
    bytes: int = 0  # as they are stored, with their scales
    largest: str = ""  # the layer with the most weights
    _most: int = field(default=-1, repr=False)

    def add(self, name: str, weights: int, bytes_before: int, stored: int) -> None:
        self.layers, self.weights = self.layers + 1, self.weights + weights
        self.bytes_before, self.bytes = self.bytes_before + bytes_before, self.bytes + stored
        if weights > self._most:
            self._most, self.largest = weights, name


@dataclass(frozen=True)
class Summary:
    """`str()` of it is a table; the numbers are attributes."""

    integers: tuple[Kind, ...]  # by type and bits, most weights first
    floats: tuple[Kind, ...]  # by type and reason, likewise

    @property
    def integer_weights(self) -> int:
        return sum(kind.weights for kind in self.integers)

    @property
    def float_weights(self) -> int:
        """Biases, norms and gains, too."""
        return sum(kind.weights for kind in self.floats)

    @property
    def share(self) -> float:
        """Of all weights, how many are integers: 0 to 1."""
        return self.integer_weights / max(self.integer_weights + self.float_weights, 1)

    @property
    def bytes_before(self) -> int:
        """What all weights would take in float."""
        return sum(kind.bytes_before for kind in (*self.integers, *self.floats))

    @property
    def bytes(self) -> int:
        return sum(kind.bytes for kind in (*self.integers, *self.floats))

    def line(self) -> str:
        """All of it in a line."""
        layers, weights = sum(kind.layers for kind in self.integers), self.integer_weights + self.float_weights
        left = "; ".join(f"{kind.layers} {kind.name}, {kind.weights:,} ({kind.why})" for kind in self.floats[:4])
        return (f"{self.share:.1%} of {weights:,} weights are integers, in {layers} layers; "
                f"{_size(self.bytes_before)} -> {_size(self.bytes)}" + (f"; float: {left}" if left else "")
                + ("; …" if len(self.floats) > 4 else ""))

    def __str__(self) -> str:
        head = ("layers", "of type", "bits", "weights", "bytes", "in float", "why float")
        rows = [(f"{kind.layers:,}", kind.name, str(kind.bits or ""), f"{kind.weights:,}", _size(kind.bytes),
                 _size(kind.bytes_before), kind.why) for kind in (*self.integers, *self.floats)]
        total = ("", f"{self.share:.1%} integers", "", f"{self.integer_weights + self.float_weights:,}", _size(self.bytes),
                 _size(self.bytes_before), "")
        widths = [max(len(row[at]) for row in (head, *rows, total)) for at in range(len(head))]
        aligned = ["  ".join(cell.ljust(width) if at in (1, 6) else cell.rjust(width)
                             for at, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
                   for row in (head, *rows, total)]
        rule = "-" * max(len(line) for line in aligned)
        return "\n".join([aligned[0], rule, *aligned[1:-1], rule, aligned[-1]])


def summary(model: nn.Module) -> Summary:
    """What of a model is integers now, and what is float and why. print() it for a table.

    Each weight is counted once, also where several layers share it. A layer that could be integers and is not was left out
    by filter_fn or, where its weight is shared, by skip_tied.
    """
    check_model(model)
    kinds: dict[tuple[str, int | None, str], Kind] = {}
    seen: set[int] = set()
    for name, kind, weights, bytes_before, stored in _parts(model, names_by_parameter(model), seen):
        kinds.setdefault((kind.name, kind.bits, kind.why), kind).add(name, weights, bytes_before, stored)
    by_size = sorted(kinds.values(), key=lambda kind: -kind.weights)
    return Summary(tuple(kind for kind in by_size if kind.bits), tuple(kind for kind in by_size if not kind.bits))


def _parts(model: nn.Module, users: dict[int, list[str]], seen: set[int]) -> Iterator[tuple[str, Kind, int, int, int]]:
    """(name, an empty kind, weights, bytes in float, bytes) of each layer's own parameters."""
    for name, module in model.named_modules():
        weights = dict(module.named_parameters(recurse=False))
        if isinstance(module, QuantLayer):
            count = module.rows * module.columns
            yield name, Kind(type(module).__name__, module.bits, ""), count, count * module.dtype.itemsize, (
                module.qweight.nbytes + module.scale.nbytes)
            del weights["qweight"]
        own = [weight for weight in weights.values() if id(weight) not in seen and not is_lazy(weight)]
        seen.update(id(weight) for weight in own)
        if weights:
            why = "bias or gain" if isinstance(module, QuantLayer) else why_float(module)
            if why == NOT_CHOSEN and any(weight.dim() > 1 and len(users[id(weight)]) > 1 for weight in weights.values()):
                why = "its weight is another layer's, too"
            size = sum(weight.nbytes for weight in own)
            yield name, Kind(type(module).__name__, None, why), sum(weight.numel() for weight in own), size, size


def _size(count: int) -> str:
    """Bytes for a reader."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
