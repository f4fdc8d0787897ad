"""The paper's tables: every cell of "FP32 params, Updates, Bits, Energy", held against our own models.

The paper works with rounded counts. Its integer weights are the printed size of the whole network less the printed FP32
params, in millions with two decimals, so 37.87M - 12.67M = 25.2M where the network has 25,165,824. A cell is therefore read
in two ways, both from our models alone:

    exact     the formulas on our counts, rounded to the digits the cell has
    rounded   the formulas on our counts after rounding these as the paper does

A cell that neither gives is one of the paper's slips. Each is listed in SLIPS with its cause, and each cause can be checked:
`verdict` says which it is.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from gft.lab.energy.estimate import bits_total, energy_estimate_j, updates_estimated

COLUMNS = ("FP32 params", "Updates", "Bits", "Energy")
SIZES = {"K": 1e3, "M": 1e6, "B": 1e9}


class Printed(NamedTuple):
    """A number as printed: 24.08B is 24.08e9, and its last digit counts 0.01e9."""

    value: float
    unit: float

    def matches(self, value: float) -> bool:
        """Would `value` be printed so? (A millionth of a digit is left to float arithmetic.)"""
        return abs(value - self.value) <= (0.5 + 1e-6) * self.unit

    def cut_from(self, value: float) -> bool:
        """Would `value` be printed so if its further digits were cut off?"""
        return math.floor(value / self.unit + 1e-6) == round(self.value / self.unit)

    def round(self, value: float) -> float:
        """`value` with the digits this number has."""
        return round(value / self.unit) * self.unit

    def write(self, value: float) -> str:
        """`value` in the form of this number."""
        size, letter = next(((size, letter) for letter, size in SIZES.items() if 1 <= self.value / size < 1e3), (1.0, ""))
        decimals = max(0, round(-math.log10(self.unit / size)))
        return f"{value / size:.{decimals}f}{letter}"


def read(text: str) -> Printed:
    """"24.08B" -> its value and the value of its last digit. Zeros that end a whole number are no digits: 70K is 0.07M."""
    digits, size = (text[:-1], SIZES[text[-1]]) if text[-1] in SIZES else (text, 1.0)
    whole, _, decimals = digits.partition(".")
    zeros = len(whole) - len(whole.rstrip("0")) if not decimals and whole != "0" else 0
    return Printed(float(digits) * size, size * 10.0 ** (zeros - len(decimals)))


class Counts(NamedTuple):
    """A network's parameters."""

    fp32: int
    quantized: int


@dataclass(frozen=True)
class Row:
    """One line of a table, with the words of the paper."""

    table: str
    name: str
    bits: int
    steps: int
    total: str  # FP32 params of the table's full-precision network
    cells: tuple[str, ...]  # in the order of COLUMNS

    def values(self, fp32: int, quantized: int) -> tuple[float, ...]:
        """The four columns by the paper's formulas."""
        return (fp32, updates_estimated(fp32, quantized, self.steps), bits_total(fp32, quantized, self.bits),
                energy_estimate_j(fp32, quantized, self.bits, self.steps))

    def values_the_papers_way(self, fp32: float, total: float) -> tuple[float, ...]:
        """The same from counts rounded as the paper rounds them: given either our counts, or its own."""
        fp32, total = read(self.cells[0]).round(fp32), read(self.total).round(total)
        return self.values(round(fp32), round((total - fp32) / 1e4) * 10_000)

    def values_of_printed_counts(self) -> tuple[float, ...]:
        """The same from the counts that the paper prints."""
        return self.values_the_papers_way(read(self.cells[0]).value, read(self.total).value)


# MNIST: 1960 steps, 10 epochs of ceil(50,000 / 256). The updates tell: 0.18 · 53.6M · 1959 would print as 18.90B.
TABLES = {
    "mnist-dnn": (1960, """
        Full-Precision | 53.6M   | 105B    | 1.72B   | 1.54
        Hybrid 4bit    | 3.22M   | 24.08B  | 304.56M | 0.60
        Hybrid 3bit    | 3.22M   | 24.08B  | 254.18M | 0.60
        Hybrid 2bit    | 3.22M   | 24.08B  | 203.8M  | 0.57
        Quantized 4bit | 0       | 18.91B  | 214.4M  | 0.54
        Quantized 3bit | 0       | 18.91B  | 160.8M  | 0.54
        Quantized 2bit | 0       | 18.91B  | 107.2M  | 0.50"""),
    "shakespeare-gpt": (2000, """
        Full-Precision | 10.8M   | 21.6B   | 345.6M  | 0.32
        Hybrid-1 4bit  | 3.7M    | 9.96B   | 146.8M  | 0.18
        Hybrid-1 3bit  | 3.7M    | 9.96B   | 139.7M  | 0.18
        Hybrid-1 2bit  | 3.7M    | 9.96B   | 132.6M  | 0.17
        Hybrid-2 4bit  | 158.21K | 4.15B   | 47.62M  | 0.11
        Hybrid-2 3bit  | 158.21K | 4.15B   | 36.98M  | 0.11
        Hybrid-2 2bit  | 158.21K | 4.15B   | 26.3M   | 0.10"""),
    "mnist-vit": (4000, """
        Full-Precision | 37.87M  | 151.48B | 1.2B    | 2.21
        Hybrid-1 4bit  | 12.67M  | 68.82B  | 506.24M | 1.26
        Hybrid-1 3bit  | 12.67M  | 68.82B  | 481.04M | 1.26
        Hybrid-1 2bit  | 12.67M  | 68.82B  | 455.84M | 1.22
        Hybrid-2 4bit  | 70K     | 27.5B   | 153.44M | 0.78
        Hybrid-2 3bit  | 70K     | 27.5B   | 115.64M | 0.78
        Hybrid-2 2bit  | 70K     | 27.5B   | 77.84M  | 0.72"""),
    "imagenette-vit": (5000, """
        Full-Precision | 38.33M  | 191.65B | 1.23B   | 2.8
        Hybrid-1 4bit  | 13.23M  | 88.74B  | 523.76M | 1.62
        Hybrid-1 3bit  | 13.23M  | 88.74B  | 498.66M | 1.62
        Hybrid-1 2bit  | 13.23M  | 74.1B   | 473.56M | 1.57
        Hybrid-2 4bit  | 1.03M   | 38.72B  | 182.16M | 1.04
        Hybrid-2 3bit  | 1.03M   | 38.72B  | 144.86M | 1.04
        Hybrid-2 2bit  | 1.03M   | 38.72B  | 107.56M | 0.97"""),
}


def _rows() -> list[Row]:
    rows = []
    for table, (steps, text) in TABLES.items():
        lines = [[word.strip() for word in line.split("|")] for line in text.strip().splitlines()]
        for name, *cells in lines:
            bits = int(name[-4]) if name.endswith("bit") else 32
            rows.append(Row(table, name, bits, steps, lines[0][1], tuple(cells)))
    return rows


ROWS = _rows()

# ---------------------------------------------------------------------------------------------------- its slips

CAUSES = {
    "count": "the printed count is not that of the network",
    "carried": "computed from such a count",
    "cut": "further digits are cut off, where other cells are rounded",
    "copied": "the row's accuracy stands in the place of its updates",
}


class Slip(NamedTuple):
    """Cells of a table that our network cannot give, and why."""

    table: str
    rows: tuple[str, ...]  # names that begin so
    column: str
    cause: str
    why: str


SLIPS = [
    Slip("mnist-dnn", ("Hybrid",), "FP32 params", "count",
         "784·4096 + 4096·10 = 3.25M; 3.22M is the first layer with its bias, without the last layer"),
    Slip("mnist-dnn", ("Hybrid",), "Updates", "cut", "from 3.22M: 24.085B, printed as 24.08B"),
    Slip("mnist-dnn", ("Hybrid",), "Bits", "carried", "from 3.22M"),
    Slip("shakespeare-gpt", ("Hybrid-1 2bit",), "Energy", "cut", "0.176 J printed as 0.17"),
    Slip("shakespeare-gpt", ("Hybrid-2 2bit",), "Energy", "cut", "0.107 J printed as 0.10"),
    Slip("mnist-vit", ("Hybrid-2 4bit", "Hybrid-2 3bit"), "Energy", "cut", "0.787 J printed as 0.78"),
    Slip("mnist-vit", ("Hybrid-2 2bit",), "Energy", "cut", "0.730 J printed as 0.72"),
    Slip("imagenette-vit", ("Hybrid-1",), "FP32 params", "count",
         "13.13M: the network has 0.46M parameters more than on MNIST, all FP32, and 12.67M + 0.46M = 13.13M"),
    Slip("imagenette-vit", ("Hybrid-1 4bit", "Hybrid-1 3bit"), "Updates", "carried", "from 13.23M"),
    Slip("imagenette-vit", ("Hybrid-1 2bit",), "Updates", "copied", "74.1B, beside an accuracy of 74.1 %"),
    Slip("imagenette-vit", ("Hybrid-1",), "Bits", "carried", "from 13.23M"),
    Slip("imagenette-vit", ("Hybrid-1",), "Energy", "carried", "from 13.23M"),
    Slip("imagenette-vit", ("Hybrid-2",), "FP32 params", "count", "0.53M, in the same way: 0.07M + 0.46M"),
    Slip("imagenette-vit", ("Hybrid-2",), "Updates", "carried", "from 1.03M"),
    Slip("imagenette-vit", ("Hybrid-2",), "Bits", "carried", "from 1.03M"),
    Slip("imagenette-vit", ("Hybrid-2",), "Energy", "carried", "from 1.03M"),
]
ACCURACY_IN_ITS_PLACE = {("imagenette-vit", "Hybrid-1 2bit"): 74.1e9}


def slip_at(row: Row, column: str) -> Slip | None:
    """The slip listed for a cell."""
    return next((slip for slip in SLIPS if slip.table == row.table and slip.column == column
                 and row.name.startswith(slip.rows)), None)


def verdict(row: Row, column: str, ours: Counts, total: int) -> str:
    """How a cell comes about: "exact", "rounded", a cause of CAUSES, or "unexplained".

    ours: the counts of our network; total: those of our full-precision one. Nothing here reads SLIPS.
    """
    place = COLUMNS.index(column)
    printed = read(row.cells[place])
    if printed.matches(row.values(*ours)[place]):
        return "exact"
    if printed.matches(row.values_the_papers_way(ours.fp32, total)[place]):
        return "rounded"
    if place == 0:
        return "count"
    if ACCURACY_IN_ITS_PLACE.get((row.table, row.name)) == printed.value:
        return "copied"
    of_its_own_counts = row.values_of_printed_counts()[place]
    if printed.matches(of_its_own_counts):
        return "carried"
    return "cut" if printed.cut_from(of_its_own_counts) else "unexplained"
