"""Deciding a formula, answered as SAT solvers answer: comments on lines "c", the verdict on a line "s", the assignment on
lines "v"."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gft.errors import UsageError
from gft.lab.hardness.cnf import Formula
from gft.lab.hardness.reduction import Separability, assignment_of, reduce_formula, weight_set
from gft.lab.hardness.solvers import Answer, solve_both, solve_formula, solve_separability

WAYS = ("both", "sat", "separability")


@dataclass(frozen=True)
class Verdict:
    """What was decided, and on the way to it what there was to remark."""

    answer: Answer  # found is an assignment
    remarks: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """That of SAT solvers: 10 satisfiable, 20 not, 0 unknown."""
        return 10 if self.answer.found is not None else 20 if self.answer.complete else 0

    def lines(self) -> Iterator[str]:
        yield from (f"c {remark}" for remark in self.remarks)
        yield "s " + {10: "SATISFIABLE", 20: "UNSATISFIABLE", 0: "UNKNOWN"}[self.exit_code]
        if self.answer.found is not None:
            yield from value_lines(self.answer.found)


def decide(formula: Formula, via: str = "both", largest: int | None = None, time_limit: float | None = None) -> Verdict:
    """Is there an assignment that satisfies `formula`?

    via: "sat" asks CaDiCaL, "separability" asks CP-SAT about the data set the formula is reduced to (weights in
        -largest..largest, ±1 if None), "both" asks both and holds each to the other.
    time_limit: seconds, for CP-SAT.
    """
    check_way(via)
    if via == "sat":
        answer = solve_formula(formula)
        return Verdict(answer, (formula_side(answer),))
    if via == "separability":
        problem = reduce_formula(formula, largest)
        answer = solve_separability(problem, time_limit)
        found = None if answer.found is None else assignment_of(answer.found, problem)
        assert found is None or formula.holds(found)
        return Verdict(Answer(found, answer.complete, answer.seconds), (data_side(problem, answer),))
    both = solve_both(formula, largest, time_limit)
    agreed = "both agree" if both.by_way_of_data.complete else "CP-SAT ran out of time; the verdict is CaDiCaL's alone"
    return Verdict(both.directly, (formula_side(both.directly), data_side(both.problem, both.by_way_of_data), agreed))


def check_way(via: str) -> None:
    if via not in WAYS:
        raise UsageError(f"--via {via}: choose one of {', '.join(WAYS)}")


def formula_side(answer: Answer) -> str:
    return f"formula: {judged(answer, 'satisfiable')} (CaDiCaL, {answer.seconds:.3f} s)"


def data_side(problem: Separability, answer: Answer) -> str:
    return f"data set: {shape(problem)}: {judged(answer, 'separable')} (CP-SAT, {answer.seconds:.3f} s)"


def judged(answer: Answer, word: str) -> str:
    return {True: word, False: f"not {word}", None: "unknown"}[answer.possible]


def shape(problem: Separability) -> str:
    return f"{problem.points} points in {problem.columns} dimensions, weights {weight_set(problem.levels)}"


def value_lines(assignment: np.ndarray,  # (variables,) bool
                width: int = 78) -> Iterator[str]:
    """v 1 -2 3 ... 0, broken into lines as the SAT competitions ask."""
    line = "v"
    for word in [*(str(j if true else -j) for j, true in enumerate(assignment, 1)), "0"]:
        if len(line) + 1 + len(word) > width:
            yield line
            line = "v"
        line += f" {word}"
    yield line
