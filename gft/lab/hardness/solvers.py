"""Exact answers: CaDiCaL decides formulas, CP-SAT decides separability, and both sides have to agree.

The solvers are optional packages and are imported when first asked for. Every answer they give that can be checked is
checked: an assignment against the formula, weights against the data. "No" cannot be checked so cheaply (that is what
NP-complete means); there the two sides check each other.
"""

import importlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from gft.errors import UsageError, install_hint
from gft.lab.hardness.cnf import Formula
from gft.lab.hardness.reduction import Separability, assignment_of, reduce_formula, weights_of


@dataclass(frozen=True)
class Answer:
    """found: weights that separate the data; an assignment, where a formula was asked about; None if none was found.
    complete: whether the solver finished. found=None and complete=True is a proof that there is none.
    seconds: of this process's CPU, so that what else runs on the machine does not count.
    """

    found: np.ndarray | None
    complete: bool
    seconds: float

    @property
    def possible(self) -> bool | None:
        """True, False, or None where the time ran out first."""
        return True if self.found is not None else False if self.complete else None


class MissingSolver(ImportError, UsageError):
    """An optional package is not installed. A UsageError too: its reader can mend it."""


def import_solver(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise MissingSolver(f"this needs {package}, which is not installed; install it with: "
                            f"{install_hint('solvers')}") from missing


def solve_formula(formula: Formula) -> Answer:
    """Decide a formula by CaDiCaL. It has no time limit; 3-CNF of 250 variables takes it seconds at worst."""
    solvers = import_solver("pysat.solvers", "python-sat")
    start = time.process_time()
    if () in formula.clauses:  # nothing satisfies it, and python-sat leaves empty clauses out
        return Answer(None, True, time.process_time() - start)
    with solvers.Solver(name="cadical195", bootstrap_with=formula.clauses) as solver:
        if not solver.solve():
            return Answer(None, True, time.process_time() - start)
        true = [literal - 1 for literal in solver.get_model() if literal > 0]  # says nothing of variables in no clause
    assignment = np.zeros(formula.variables, dtype=bool)
    assignment[true] = True
    assert formula.holds(assignment), "CaDiCaL's assignment does not satisfy the formula"
    return Answer(assignment, True, time.process_time() - start)


def solve_separability(problem: Separability, time_limit: float | None = None, seed: int = 0) -> Answer:
    """Decide separability by CP-SAT: an integer variable a weight, y · (x · w) >= 1 a point. One thread.

    time_limit: seconds after which it gives up (found=None, complete=False). At None it goes on until it knows.
    """
    cp_model = import_solver("ortools.sat.python.cp_model", "ortools")
    start = time.process_time()
    model = cp_model.CpModel()
    domain = cp_model.Domain.from_values(problem.levels)
    weights = [model.new_int_var_from_domain(domain, f"w{j}") for j in range(problem.columns)]
    for row in problem.signed():
        used = np.flatnonzero(row)
        if not len(used):  # 0 > 0
            return Answer(None, True, time.process_time() - start)
        model.add(cp_model.LinearExpr.weighted_sum([weights[j] for j in used], row[used].tolist()) >= 1)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    if time_limit is not None:
        solver.parameters.max_time_in_seconds = time_limit
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return Answer(None, True, time.process_time() - start)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        assert status == cp_model.UNKNOWN, f"CP-SAT calls its own model {solver.status_name(status)}"
        return Answer(None, False, time.process_time() - start)
    found = np.array([solver.value(weight) for weight in weights], dtype=np.int64)
    assert problem.separated_by(found), "CP-SAT's weights do not separate the data"
    return Answer(found, True, time.process_time() - start)


# ---------------------------------------------------------------------------------------------------- both sides


@dataclass(frozen=True)
class BothSides:
    """A formula decided directly and by way of its data set."""

    formula: Formula
    problem: Separability
    directly: Answer  # found is an assignment
    by_way_of_data: Answer  # found are weights

    @property
    def assignment(self) -> np.ndarray | None:
        return self.directly.found


class Disagreement(RuntimeError):
    """One side says yes and the other no: the theorem, a solver or this program is wrong."""


def solve_both(formula: Formula, largest: int | None = None, time_limit: float | None = None) -> BothSides:
    """Decide a formula both ways and hold each to the other.

    Each side's solution is carried over and verified on the other: the weights' assignment in the formula, the
    assignment's weights on the data. Raises Disagreement where one side finds what the other has ruled out.
    """
    problem = reduce_formula(formula, largest)
    directly, by_data = solve_formula(formula), solve_separability(problem, time_limit)
    if by_data.possible is not None and by_data.possible != directly.possible:
        raise Disagreement(f"CaDiCaL says satisfiable: {directly.possible}, CP-SAT says separable: {by_data.possible}")
    if directly.found is not None and not problem.separated_by(weights_of(directly.found, problem)):
        raise Disagreement("the weights of a satisfying assignment do not separate the data")
    if by_data.found is not None and not formula.holds(assignment_of(by_data.found, problem)):
        raise Disagreement("the assignment of separating weights does not satisfy the formula")
    return BothSides(formula, problem, directly, by_data)
