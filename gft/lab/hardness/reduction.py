"""The paper's Theorem 1 as a program: a formula becomes a data set that weights of a few levels separate if and only if the
formula can be satisfied, and each separator is an assignment.

±1 weights (paper, Appendix A). One point a clause, d = variables + 1, every label 1:

    x[j] = 1 if variable j is in the clause, -1 if its negation is, else 0;      x[d] = 2 for a clause of three literals
    w[j] = 1 where variable j is true, -1 where it is false;                     w[d] = 1
    w · x = (true literals) - (false literals) + 2,  -1 if none is true, at least 1 otherwise

Any other levels (ours; proofs in docs/hardness.md). With a level 0 the paper's points are separated by w = (0, ..., 0, 1),
whatever the formula. But a grid has an end, and columns pressed against it have only one value left. Such "units" supply
the largest level `high`, the next `low` and the one `below` as constants, and then

    box points       w[j] - below > 0:                                    w[j] is low or high
    clause points    sum of (w[j] - low) over variables + sum of (high - w[j]) over negated ones > 0

In all constructions the first columns stand for the variables, and a variable is true where its weight is the largest level.
"""

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from gft.errors import UsageError
from gft.files import written_atomically
from gft.lab.hardness.cnf import Formula

SIGNS = (-1, 1)
FORMAT = "gft separability 1"
MOST_ENTRIES = 2**28  # of a dense x; at one byte an entry 256 MiB
MOST_LEVELS = 2**16  # in a file
DEFLATE = 1032  # to 1 is the most that zip's compression can do; a file that promises more lies
# Points, and entries other than 0, for each byte of a packed file: one bit is less than any of them takes, unless it says
# one clause over and over. Each becomes objects of Python, of 40 bytes and more.
MOST_A_BYTE = 8
AT_ONCE = 2**22  # entries that are looked at together
ARRAYS = {"x": 2, "y": 1, "levels": 1, "variables": 0, "format": 0}  # of a file, with their dimensions


def levels_up_to(largest: int | None) -> tuple[int, ...]:
    """The grid of a quantized layer, -I..I; the paper's ±1 for None."""
    if largest is None:
        return SIGNS
    if largest < 1:
        raise UsageError(f"largest={largest}: the grid -I..I needs I of 1 or more")
    return tuple(range(-largest, largest + 1))


def weight_set(levels: Sequence[int]) -> str:
    """How a set of levels is called in messages and tables."""
    if tuple(levels) == SIGNS:
        return "±1"
    has_gaps = levels[-1] - levels[0] >= len(levels)
    return "one of " + ", ".join(map(str, levels)) if has_gaps else f"{levels[0]}..{levels[-1]}"


@dataclass(frozen=True, eq=False)
class Separability:
    """Is there a weight vector w, each weight one of `levels`, with y[i] · (x[i] · w) > 0 for every point i?

    variables: how many of the first columns stand for the variables of a formula; 0 for data that comes from none.
    """

    x: np.ndarray  # (points, columns) integers
    y: np.ndarray  # (points,) 1 or -1
    levels: tuple[int, ...] = SIGNS
    variables: int = 0

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or not np.issubdtype(self.x.dtype, np.integer):
            raise UsageError(f"x is a {self.x.ndim}-dimensional array of {self.x.dtype}; give a matrix of integers, a row a "
                             "point (multiply fractions by their common denominator)")
        if self.y.shape != (len(self.x),) or not np.isin(self.y, SIGNS).all():
            raise UsageError(f"y has shape {self.y.shape}; give one label, 1 or -1, for each of the {len(self.x)} points")
        if len(self.levels) < 2 or list(self.levels) != sorted(set(self.levels)):
            raise UsageError(f"levels={self.levels}: list two or more allowed weights, each once, in rising order")
        if not 0 <= self.variables <= self.columns:
            raise UsageError(f"variables={self.variables}: x has {self.columns} columns, so 0 to {self.columns} of them can "
                             "stand for variables")

    @property
    def points(self) -> int:
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        return self.x.shape[1]

    def signed(self) -> np.ndarray:
        """y · x, so that w separates if signed() @ w > 0. Wide enough that no product of it overflows."""
        return self.x.astype(np.int64) * self.y.astype(np.int64)[:, None]

    def separated_by(self, weights: np.ndarray) -> np.ndarray:
        """(..., columns) weights -> (...) booleans. One multiplication and addition an entry of x: O(points · columns)."""
        weights = np.asarray(weights)
        if weights.shape[-1:] != (self.columns,):
            raise UsageError(f"a weight vector of this data has {self.columns} entries, not {weights.shape[-1:]}")
        allowed = np.isin(weights, self.levels).all(-1)
        return np.asarray(allowed & (weights.astype(np.int64) @ self.signed().T > 0).all(-1))


# ---------------------------------------------------------------------------------------------------- units


class Units(NamedTuple):
    """Columns whose weights can have one value each, and how to say the largest levels as sums of them."""

    points: np.ndarray  # (points, columns) that leave no other value
    values: list[int]
    high: np.ndarray  # (columns,) coefficients: high @ values is the largest level
    low: np.ndarray  # the second largest
    below: np.ndarray | None  # the third largest; None if there are but two


def points_before_clauses(units: Units | None, variables: int) -> int:
    """Unit points, and a box point a variable where there are levels to shut out."""
    return 0 if units is None else len(units.points) + (0 if units.below is None else variables)


def chained_units(levels: Sequence[int]) -> Units:
    """A column a level: v1 < v2 < ... is a chain as long as the grid, so each link has its level. Fits any levels."""
    count = len(levels)
    one = np.eye(count, dtype=np.int8)  # a file may have thousands of levels
    high, low, *below = (one[-place].astype(np.int64) for place in range(1, min(count, 3) + 1))
    return Units(one[1:] - one[:-1], list(levels), high, low, below[0] if below else None)


def doubling_units(largest: int) -> Units:
    """A column a binary digit of I, for -I..I: u1 > 0, then u(k+1) > 2·u(k) - (1 - digit)·u1. Only u1 = 1 stays within I,
    and then the columns are the binary prefixes of I, as 1, 3, 6, 13 for 13."""
    values = [largest >> shift for shift in reversed(range(largest.bit_length()))]
    one = np.eye(len(values), dtype=np.int64)
    points = one.copy()
    for k in range(1, len(values)):
        digit = values[k] - 2 * values[k - 1]
        points[k] += (1 - digit) * one[0] - 2 * one[k - 1]
    return Units(points, values, one[-1], one[-1] - one[0], one[-1] - 2 * one[0])


# ---------------------------------------------------------------------------------------------------- there


def reduce_formula(formula: Formula, largest: int | None = None) -> Separability:
    """The data set that weights in -largest..largest (±1 if None) separate if and only if `formula` can be satisfied.

    Clauses may have any width; for ±1 and three different variables the points are the paper's own.
    """
    levels = levels_up_to(largest)
    return reduce_with(formula, levels, None if largest is None else doubling_units(largest))


def reduce_to_levels(formula: Formula, levels: Sequence[int]) -> Separability:
    """The same for any two or more levels, such as an asymmetric grid, {0, 1} or powers of two."""
    levels = tuple(sorted(set(levels)))
    if len(levels) < 2:
        raise UsageError(f"levels={levels}: with fewer than two levels there is nothing to choose; give two or more")
    return reduce_with(formula, levels, chained_units(levels))


def reduce_with(formula: Formula, levels: tuple[int, ...], units: Units | None) -> Separability:
    """One construction for all: unit points, box points, clause points. Without units, the paper's, which has clause
    points only."""
    formula = formula.cleaned()
    variables = formula.variables
    before = points_before_clauses(units, variables)
    shape = (before + len(formula.clauses), variables + (1 if units is None else len(units.values)))
    if shape[0] * shape[1] > MOST_ENTRIES:
        raise UsageError(f"this formula becomes {shape[0]} points in {shape[1]} dimensions, more than the {MOST_ENTRIES} "
                         "entries a dense data set may have here; take a smaller formula")
    x = np.zeros(shape, dtype=np.int64)
    if units is not None:
        x[: len(units.points), variables:] = units.points
        if units.below is not None:
            x[len(units.points):before, :variables] = np.eye(variables)
            x[len(units.points):before, variables:] = -units.below
    for row, clause in zip(x[before:], formula.clauses, strict=True):
        for literal in clause:
            row[abs(literal) - 1] = 1 if literal > 0 else -1
        negated = sum(literal < 0 for literal in clause)
        row[variables:] = (signs_offset(len(clause)) if units is None
                           else negated * units.high - (len(clause) - negated) * units.low)
    smallest = np.min_scalar_type(-int(np.abs(x).max(initial=1)) - 1)  # a signed type that holds ± the largest entry
    return Separability(x.astype(smallest), np.ones(len(x), dtype=np.int8), levels, variables)


def signs_offset(width: int) -> int:
    """The last feature of a clause point for ±1 weights: the paper's 2 at three literals.

    With k literals the sum is -k if none is true and at least 2 - k otherwise, so any number above k - 2 and up to k tells
    them apart. It has to be positive too, for (0, ..., 0, 1) to separate the data in the reals. The paper's 2 at k = 1
    would let an unsatisfied clause pass (-1 + 2 > 0). A clause without literals becomes the point 0: nothing separates it.
    """
    return max(width - 1, 1) if width else 0


def weights_of(assignment: np.ndarray, problem: Separability) -> np.ndarray:
    """The weights an assignment stands for; they separate the data if the assignment satisfies the formula."""
    assignment = np.asarray(assignment, dtype=bool)
    if assignment.shape != (problem.variables,):
        raise UsageError(f"an assignment for this data has {problem.variables} values, not {assignment.shape}")
    units = units_of(problem)
    high, low = problem.levels[-1], problem.levels[-2]
    return np.concatenate([np.where(assignment, high, low), [1] if units is None else units.values])


# ---------------------------------------------------------------------------------------------------- and back


def assignment_of(weights: np.ndarray, problem: Separability) -> np.ndarray:
    """The assignment weights stand for; it satisfies the formula if the weights separate the data."""
    return np.asarray(weights)[..., : problem.variables] == problem.levels[-1]


def formula_of(problem: Separability) -> Formula:
    """The formula a data set was made from (as `Formula.cleaned` leaves it, literals in the order of their variables); any
    other data is refused. A few rows at a time, since x may be as large as memory allows."""
    units = units_of(problem)
    before = points_before_clauses(units, problem.variables)
    if problem.points < before or not (problem.y == 1).all() or not (units is None or _begins_with(problem, units)):
        raise UsageError(NOT_REDUCED)
    clauses: list[tuple[int, ...]] = []
    rows_at_once = max(1, AT_ONCE // problem.columns)
    for start in range(before, problem.points, rows_at_once):
        clauses += _clauses_of(problem.x[start : start + rows_at_once], problem.variables, units)
    return Formula.of(clauses, problem.variables)


def _begins_with(problem: Separability, units: Units) -> bool:
    """Are the first rows the unit points, and the box points where there are any?"""
    variables, count = problem.variables, len(units.points)
    first = problem.x[:count]
    if first[:, :variables].any() or not np.array_equal(first[:, variables:], units.points):
        return False
    if units.below is None:
        return True
    boxes = problem.x[count : count + variables]
    is_eye = (np.diagonal(boxes) == 1).all() and np.count_nonzero(boxes[:, :variables]) == variables
    return bool(is_eye and (boxes[:, variables:] == -units.below).all())


def _clauses_of(rows: np.ndarray, variables: int, units: Units | None) -> list[tuple[int, ...]]:
    """The clauses that some clause points were made of."""
    points, columns = np.nonzero(rows[:, :variables])
    signs = rows[points, columns].astype(np.int64)
    widths, negated = (np.bincount(some, minlength=len(rows))[:, None] for some in (points, points[signs < 0]))
    if units is None:
        rest = np.where(widths > 0, np.maximum(widths - 1, 1), 0)  # signs_offset, of many
    else:
        rest = negated * units.high - (widths - negated) * units.low
    if not ((np.abs(signs) == 1).all() and np.array_equal(rows[:, variables:], rest)):
        raise UsageError(NOT_REDUCED)
    literals, ends = ((columns + 1) * signs).tolist(), np.cumsum(widths).tolist()
    return [tuple(literals[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


NOT_REDUCED = "this data set is not the reduction of a formula; make one with: gft hardness reduce FILE.cnf -o DATA.npz"


def units_of(problem: Separability) -> Units | None:
    """Which construction made a data set: each has its own number of columns after the variables."""
    extra, largest = problem.columns - problem.variables, problem.levels[-1]
    if problem.levels == SIGNS and extra == 1:
        return None
    # By length first: a file can name a largest level whose grid would fill the memory.
    is_grid = largest >= 1 and len(problem.levels) == 2 * largest + 1 and problem.levels == levels_up_to(largest)
    if is_grid and extra == largest.bit_length():
        return doubling_units(largest)
    if extra == len(problem.levels) <= problem.points + 1:  # as many points as links of the chain, at least
        return chained_units(problem.levels)
    raise UsageError(NOT_REDUCED)


# ---------------------------------------------------------------------------------------------------- files


def save_problem(problem: Separability, path: Path | str) -> None:
    """x, y, levels and variables as a compressed .npz that numpy.load reads anywhere."""
    with written_atomically(path) as unfinished, open(unfinished, "wb") as file:  # given a name, numpy would add an ending
        np.savez_compressed(file, x=problem.x, y=problem.y, levels=np.array(problem.levels),
                            variables=np.array(problem.variables), format=np.array(FORMAT))


def load_problem(path: Path | str) -> Separability:
    """Read what `save_problem` wrote. Nothing is unpacked before all headers fit each other and the size of the file."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no file {path}; make it with: gft hardness reduce FILE.cnf -o {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            size = path.stat().st_size
            headers = {name: _header(archive, name, size) for name in ARRAYS}
            _check_fit(headers, size)
            arrays = {name: _array(archive, name, header) for name, header in headers.items()}
        if str(arrays["format"]) != FORMAT:
            raise ValueError("of another format")
        if np.count_nonzero(arrays["x"]) > MOST_A_BYTE * size:
            raise ValueError("of more literals than the file has bits")
        return Separability(arrays["x"], arrays["y"], tuple(arrays["levels"].tolist()), int(arrays["variables"]))
    except (KeyError, EOFError, OSError, ValueError, TypeError, IndexError, OverflowError, RecursionError, SyntaxError,
            RuntimeError, zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError) as error:
        raise UsageError(f"{path} is not a separability data set; make one with: gft hardness reduce FILE.cnf -o DATA.npz"
                         ) from error


class Header(NamedTuple):
    """What an .npz says of an array before it is unpacked."""

    shape: tuple[int, ...]
    by_column: bool
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _header(archive: zipfile.ZipFile, name: str, size: int) -> Header:
    """The directory and the header of an array may each promise more than there is: neither is believed before it is held
    to the other, and both to the size of the file."""
    entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or (
            entry.file_size > DEFLATE * size or entry.compress_size > size):
        raise ValueError("packed as no file of ours is")
    with archive.open(entry) as file:
        header = _read_header(file)
        if len(header.shape) != ARRAYS[name] or header.bytes != entry.file_size - file.tell():
            raise ValueError("of no such shape")
    return header


def _read_header(file: IO[bytes]) -> Header:
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("of another version")
    header = Header(*np.lib.format.read_array_header_1_0(file, max_header_size=1000))
    if header.dtype.hasobject:
        raise ValueError("of objects")
    return header


def _check_fit(headers: Mapping[str, Header], size: int) -> None:
    """Raise unless arrays of these shapes can be a data set in a file of this size."""
    (points, columns), (levels,) = headers["x"].shape, headers["levels"].shape
    if not all(np.issubdtype(headers[name].dtype, np.integer) for name in ("x", "y", "levels", "variables")):
        raise ValueError("not of integers")
    if (headers["y"].shape != (points,) or columns == 0 or points * columns > MOST_ENTRIES or levels > MOST_LEVELS or
            points > MOST_A_BYTE * size or headers["format"].bytes > 4 * 100):
        raise ValueError("of sizes that do not fit")


def _array(archive: zipfile.ZipFile, name: str, header: Header) -> np.ndarray:
    """Unpacked piece by piece: at once, zipfile would hold it twice."""
    content = np.empty(header.bytes, np.uint8)
    with archive.open(f"{name}.npy") as file:
        _read_header(file)
        start = 0
        while piece := file.read(AT_ONCE):  # to its end, where its checksum is compared
            content[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
            start += len(piece)
    if start != header.bytes:
        raise ValueError("of another length")
    return content.view(header.dtype).reshape(header.shape, order="F" if header.by_column else "C")
