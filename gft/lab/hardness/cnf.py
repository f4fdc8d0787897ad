"""Formulas in conjunctive normal form: what they are, how DIMACS files hold them, where random ones come from.

A literal is an integer, as in DIMACS: 3 is "variable 3 is true", -3 is "variable 3 is false". A clause is a tuple of
literals of which at least one must hold, a formula a tuple of clauses that must all hold. An assignment is an array of
booleans, variable 1 first.

    c a comment
    p cnf 3 2          three variables, two clauses
    1 -3 0             variable 1 or not variable 3
    2 3 -1 0
"""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gft.errors import UsageError
from gft.files import write_text

INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)  # int() would also take 1_000, +3 and digits of other scripts
MOST_VARIABLES = 2**20  # that a header may announce, or as many as the text has characters: answers list them all
HARDEST_RATIO = 4.26  # clauses a variable at which random 3-CNF turns from satisfiable to unsatisfiable


@dataclass(frozen=True)
class Formula:
    """Clauses of literals over variables 1..variables."""

    variables: int
    clauses: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.variables < 0:
            raise UsageError(f"variables={self.variables}: a formula has 0 variables or more")
        for number, clause in enumerate(self.clauses, 1):
            for literal in clause:
                if literal == 0 or abs(literal) > self.variables:
                    raise UsageError(f"clause {number} has the literal {literal}; with {self.variables} variables a literal "
                                     f"is one of ±1..±{self.variables}")

    @classmethod
    def of(cls, clauses: Iterable[Sequence[int]], variables: int | None = None) -> "Formula":
        """A formula from any lists of literals; as many variables as occur, if their number is not given."""
        kept = tuple(tuple(int(literal) for literal in clause) for clause in clauses)
        occurring = max((abs(literal) for clause in kept for literal in clause), default=0)
        return cls(occurring if variables is None else variables, kept)

    @property
    def width(self) -> int:
        """Literals of the longest clause; at most 3 in a 3-CNF."""
        return max(map(len, self.clauses), default=0)

    def cleaned(self) -> "Formula":
        """An equivalent formula: no clause holds a variable and its negation, no clause holds a literal twice.

        A clause with both v and -v holds always and is left out, as the paper does. A literal said twice is said once:
        the paper does not ask for it, but its proof counts three different variables a clause (docs/hardness.md).
        """
        merged = (tuple(dict.fromkeys(clause)) for clause in self.clauses)
        return Formula(self.variables, tuple(clause for clause in merged if not is_tautology(clause)))

    def holds(self, assignments: np.ndarray) -> np.ndarray:
        """(..., variables) booleans -> (...) booleans: which of the assignments satisfy every clause."""
        assignments = np.asarray(assignments, dtype=bool)
        if assignments.shape[-1:] != (self.variables,):
            raise UsageError(f"an assignment of this formula has {self.variables} values, not {assignments.shape[-1:]}")
        result = np.ones(assignments.shape[:-1], dtype=bool)
        for clause in self.clauses:
            satisfied = np.zeros_like(result)
            for literal in clause:
                satisfied |= assignments[..., abs(literal) - 1] == (literal > 0)
            result &= satisfied
        return result


def is_tautology(clause: Sequence[int]) -> bool:
    literals = set(clause)  # a clause of a file may have a million
    return any(-literal in literals for literal in clause)


def every_assignment(variables: int) -> np.ndarray:
    """(2^variables, variables) booleans. The slow, obvious way to decide anything about a small formula."""
    if variables > 20:
        raise UsageError(f"variables={variables}: all 2^{variables} assignments are too many to list; use a solver")
    return (np.arange(2**variables)[:, None] >> np.arange(variables) & 1).astype(bool)


# ---------------------------------------------------------------------------------------------------- DIMACS


class DimacsError(UsageError):
    """A DIMACS text that cannot be read. The message names the line and the reason."""


def parse_dimacs(text: str, name: str = "the text") -> Formula:
    """Read DIMACS CNF. A clause may span lines and a line hold several; a line "%" ends the text, as SATLIB's files do."""

    def refuse(line_number: int, reason: str) -> DimacsError:
        return DimacsError(f"{name}, line {line_number}: {reason}")

    header: tuple[int, int] | None = None
    clauses: list[tuple[int, ...]] = []
    clause: list[int] = []
    clause_starts = line_number = 0
    # Not text.splitlines(), which also ends a line at a form feed: the numbers would not be those of an editor.
    for line_number, line in enumerate(io.StringIO(text, newline=None), 1):
        words = line.split()
        if not words or words[0].startswith("c"):
            continue
        if words[0] == "%":
            break
        if words[0] == "p":
            if header is not None:
                raise refuse(line_number, "a second 'p' line; a file holds one formula")
            header = read_header(words, line_number, refuse)
            if header[0] > max(MOST_VARIABLES, len(text)):
                raise refuse(line_number, f"the header announces {header[0]} variables, more than {MOST_VARIABLES} and than "
                                          "the text has characters; number those that occur from 1 on")
            continue
        if header is None:
            raise refuse(line_number, f"found {shown(words[0])} before the header; begin with 'p cnf VARIABLES CLAUSES'")
        variables, promised = header
        for word in words:
            if not INTEGER.fullmatch(word) or word == "-0":
                raise refuse(line_number, f"{shown(word)} is not a literal; write an integer like 3 or -3, and 0 to end a "
                                          "clause")
            literal = int(word)
            if abs(literal) > variables:
                raise refuse(line_number, f"the literal {literal} names variable {abs(literal)}, but the header says there "
                                          f"are {variables}")
            if not clause:
                clause_starts = line_number
            if literal:
                clause.append(literal)
                continue
            if len(clauses) == promised:
                raise refuse(line_number, f"here ends clause {promised + 1}, but the header says there are {promised}")
            clauses.append(tuple(clause))
            clause = []
    if header is None:
        raise refuse(max(line_number, 1), "the text ends without a header 'p cnf VARIABLES CLAUSES'")
    if clause:
        raise refuse(clause_starts, "the clause that begins here is never ended; write a 0 after its last literal")
    if len(clauses) < header[1]:
        raise refuse(line_number, f"the text ends after {len(clauses)} clauses, but the header says there are {header[1]}")
    return Formula(header[0], tuple(clauses))


def read_header(words: Sequence[str], line_number: int, refuse: Callable[[int, str], DimacsError]) -> tuple[int, int]:
    if len(words) != 4 or words[1] != "cnf":
        raise refuse(line_number, f"the header is {shown(' '.join(words))}; it should be 'p cnf VARIABLES CLAUSES'")
    counts = []
    for word, what in zip(words[2:], ("variables", "clauses"), strict=True):
        if not INTEGER.fullmatch(word) or word.startswith("-"):
            raise refuse(line_number, f"the header's number of {what} is {shown(word)}; write an integer of 0 or more")
        counts.append(int(word))
    return counts[0], counts[1]


def shown(word: str) -> str:
    """A word of a file for a message, cut where it is long: not every wrong file has short words."""
    return repr(word if len(word) <= 30 else word[:27] + "...")


def read_dimacs(path: Path | str) -> Formula:
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no file {path}; give the path of a DIMACS .cnf file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line_number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DimacsError(f"{path}, line {line_number}: this is not text; DIMACS files hold plain numbers (unpack the file "
                          "if it is compressed)") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); allow reading it, or give another file") from error
    return parse_dimacs(text, str(path))


def format_dimacs(formula: Formula, comments: Iterable[str] = ()) -> str:
    """DIMACS CNF, a clause a line."""
    lines = [f"c {line}" for comment in comments for line in (comment.splitlines() or [""])]
    lines.append(f"p cnf {formula.variables} {len(formula.clauses)}")
    lines += [" ".join(map(str, (*clause, 0))) for clause in formula.clauses]
    return "\n".join(lines) + "\n"


def write_dimacs(formula: Formula, path: Path | str, comments: Iterable[str] = ()) -> None:
    write_text(path, format_dimacs(formula, comments))


# ---------------------------------------------------------------------------------------------------- random formulas


def random_formula(variables: int, clauses: int, seed: int | Sequence[int], width: int = 3,
                   planted: np.ndarray | None = None) -> Formula:
    """Uniform random k-CNF: each clause takes `width` different variables and a sign for each.

    planted: an assignment that is to satisfy the formula; clauses it violates are drawn again. Such formulas are known
        to be satisfiable at any size, but a little easier than those that happen to be: their signs lean towards it.
    """
    if not 1 <= width <= variables:
        raise UsageError(f"width={width}: a clause takes 1 to {variables} of the {variables} variables")
    generator = np.random.default_rng(seed)
    drawn: list[list[int]] = []
    while len(drawn) < clauses:
        chosen = random_subsets(variables, width, clauses - len(drawn), generator)
        positive = generator.random(chosen.shape) < 0.5
        if planted is not None:
            satisfied = (np.asarray(planted, dtype=bool)[chosen] == positive).any(1)
            chosen, positive = chosen[satisfied], positive[satisfied]
        drawn += np.where(positive, chosen + 1, -chosen - 1).tolist()
    return Formula(variables, tuple(map(tuple, drawn)))


def random_subsets(size: int, width: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """(count, width) different numbers of 0..size-1 a row, all subsets equally likely (Floyd's sampling, on all rows)."""
    chosen = np.empty((count, width), dtype=np.int64)
    for place, newest in enumerate(range(size - width, size)):
        number = generator.integers(0, newest + 1, count)
        taken = (chosen[:, :place] == number[:, None]).any(1)
        chosen[:, place] = np.where(taken, newest, number)
    return chosen


def random_assignment(variables: int, seed: int | Sequence[int]) -> np.ndarray:
    return np.random.default_rng(seed).random(variables) < 0.5
