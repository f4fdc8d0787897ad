"""The paper's Theorem 1 as a working program: finding integer weights that separate data is NP-complete.

    formula = read_dimacs("uf20-01.cnf")
    problem = reduce_formula(formula)               # points that ±1 weights separate iff the formula can be satisfied
    answer = solve_separability(problem)            # by CP-SAT; HEURISTICS["gft"](problem, seconds, seed) by GFT
    assignment = assignment_of(answer.found, problem)

The proofs, for ±1, for every grid -I..I and for any other levels, and what heuristics can and cannot do are in
docs/hardness.md. The exact solvers are optional: pip install 'gft-torch[solvers]'.
"""

from gft.lab.hardness.cnf import DimacsError, Formula, parse_dimacs, random_formula, read_dimacs, write_dimacs
from gft.lab.hardness.heuristics import HEURISTICS
from gft.lab.hardness.reduction import (
    Separability,
    assignment_of,
    formula_of,
    load_problem,
    reduce_formula,
    reduce_to_levels,
    save_problem,
    weights_of,
)
from gft.lab.hardness.solvers import Answer, solve_both, solve_formula, solve_separability

__all__ = [
    "HEURISTICS",
    "Answer",
    "DimacsError",
    "Formula",
    "Separability",
    "assignment_of",
    "formula_of",
    "load_problem",
    "parse_dimacs",
    "random_formula",
    "read_dimacs",
    "reduce_formula",
    "reduce_to_levels",
    "save_problem",
    "solve_both",
    "solve_formula",
    "solve_separability",
    "weights_of",
    "write_dimacs",
]
