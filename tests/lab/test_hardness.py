"""The theorem: formulas and their files, the reduction there and back, and exact solvers that have to agree."""

import gzip
import itertools
import re
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gft.errors import UsageError
from gft.lab.hardness import agreement, cnf, solvers
from gft.lab.hardness.cnf import DimacsError, Formula, every_assignment, parse_dimacs, random_formula
from gft.lab.hardness.reduction import (
    Separability,
    assignment_of,
    chained_units,
    doubling_units,
    formula_of,
    levels_up_to,
    load_problem,
    reduce_formula,
    reduce_to_levels,
    save_problem,
    weights_of,
)

needs_solvers = pytest.mark.skipif(find_spec("pysat") is None or find_spec("ortools") is None,
                                   reason="needs pip install 'gft-torch[solvers]'")


@st.composite
def formulas(draw, most_variables=4, most_clauses=10, least_width=0, most_width=4):
    """Any formula: literals repeat, variables meet their negations, clauses repeat and may be empty."""
    variables = draw(st.integers(1, most_variables))
    literals = st.integers(1, variables).flatmap(lambda v: st.sampled_from([v, -v]))
    clauses = draw(st.lists(st.lists(literals, min_size=least_width, max_size=most_width), max_size=most_clauses))
    return Formula.of(clauses, variables)


# ---------------------------------------------------------------------------------------------------- formulas


@given(formulas())
def test_holds_is_what_a_clause_means(formula):
    table = every_assignment(formula.variables)
    by_hand = [all(any(row[abs(literal) - 1] == (literal > 0) for literal in clause) for clause in formula.clauses)
               for row in table]
    assert formula.holds(table).tolist() == by_hand
    assert [bool(formula.holds(row)) for row in table] == by_hand


@given(formulas())
def test_cleaned_is_equivalent_and_clean(formula):
    clean = formula.cleaned()
    table = every_assignment(formula.variables)
    assert np.array_equal(clean.holds(table), formula.holds(table))
    assert all(len({abs(literal) for literal in clause}) == len(clause) for clause in clean.clauses)
    assert clean.cleaned() == clean


def test_random_formula_takes_different_variables_and_keeps_its_seed():
    formula = random_formula(7, 300, seed=5, width=4)
    assert formula == random_formula(7, 300, seed=5, width=4) != random_formula(7, 300, seed=6, width=4)
    assert len(formula.clauses) == 300
    assert {len({abs(literal) for literal in clause}) for clause in formula.clauses} == {4}
    assert {literal for clause in formula.clauses for literal in clause} == {*range(1, 8), *range(-7, 0)}


def test_random_subsets_are_equally_likely():
    drawn = cnf.random_subsets(5, 3, 20_000, np.random.default_rng(1))
    counts = np.unique(np.sort(drawn, axis=1), axis=0, return_counts=True)[1]
    assert len(counts) == 10
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000)


def test_planted_formula_is_satisfied_by_what_was_planted():
    planted = cnf.random_assignment(30, seed=2)
    formula = random_formula(30, 300, seed=3, planted=planted)
    assert len(formula.clauses) == 300
    assert formula.holds(planted)
    assert not formula.holds(~planted)


def test_formula_refuses_what_it_cannot_be(refuses):
    with refuses(UsageError, "clause 2 has the literal -4"):
        Formula.of([(1, 2), (3, -4)], variables=3)
    with refuses(UsageError, "the literal 0"):
        Formula.of([(1, 0)])
    with refuses(UsageError, "width=4"):
        random_formula(3, 5, seed=0, width=4)
    with refuses(UsageError, "has 3 values"):
        Formula.of([(1, 2, 3)]).holds(np.ones(2))
    with refuses(UsageError, "too many to list"):
        every_assignment(21)


# ---------------------------------------------------------------------------------------------------- DIMACS


@given(formulas(), st.lists(st.text(max_size=12), max_size=3))
def test_dimacs_write_then_read(formula, comments):
    assert parse_dimacs(cnf.format_dimacs(formula, comments)) == formula


@given(formulas(), st.data())
def test_dimacs_is_free_in_its_layout(formula, data):
    gaps = st.sampled_from([" ", "\n", "\t ", "\r\n", "\nc 1 2 0 p cnf\n", "\n\n  ", "\nc\x0c9\n"])
    words = [str(number) for clause in formula.clauses for number in (*clause, 0)]
    body = "".join(data.draw(gaps) + word for word in words)
    end = data.draw(st.sampled_from(["", "\n", "\n%\n0\n"]))  # the last as in SATLIB's uf20-01.cnf
    assert parse_dimacs(f"c head\np  cnf {formula.variables}  {len(formula.clauses)}\n{body}{end}") == formula


MALFORMED = {
    "empty": ("", 1, "without a header"),
    "comments only": ("c one\nc two\n", 2, "without a header"),
    "no header": ("c one\n1 2 0\n", 2, "found '1' before the header"),
    "other format": ("p sat 3 2\n", 1, "the header is 'p sat 3 2'"),
    "short header": ("c one\n\np cnf 3\n1 0\n", 3, "it should be 'p cnf VARIABLES CLAUSES'"),
    "words in header": ("p cnf three 2\n", 1, "number of variables is 'three'"),
    "negative count": ("p cnf 3 -2\n", 1, "number of clauses is '-2'"),
    "two headers": ("p cnf 3 1\n1 0\np cnf 3 1\n", 3, "a second 'p' line"),
    "not an integer": ("p cnf 3 2\n1 2 0\n1 x3 0\n", 3, "'x3' is not a literal"),
    "a fraction": ("p cnf 3 1\n1.0 0\n", 2, "'1.0' is not a literal"),
    "python's integers": ("p cnf 3 1\n0_1 0\n", 2, "'0_1' is not a literal"),
    "minus zero": ("p cnf 3 1\n1 -0\n", 2, "'-0' is not a literal"),
    "a huge number": ("p cnf 3 1\n" + "9" * 5000 + " 0\n", 2, "'999999999999999999999999999...' is not a literal"),
    "unknown variable": ("p cnf 3 2\n1 2 0\n-4 1 0\n", 3, "names variable 4, but the header says there are 3"),
    "too many clauses": ("p cnf 3 1\n1 0\n2\n0\n", 4, "here ends clause 2, but the header says there are 1"),
    "too few clauses": ("p cnf 3 3\n1 0\n2 0\n", 3, "ends after 2 clauses, but the header says there are 3"),
    "open clause": ("p cnf 3 2\n1 0\n2\n3\n", 3, "the clause that begins here is never ended"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_dimacs_gets_its_line_and_reason(case, refuses, tmp_path):
    text, line, reason = MALFORMED[case]
    file = tmp_path / "formula.cnf"
    file.write_text(text)
    with refuses(DimacsError, re.escape(f"formula.cnf, line {line}: ") + ".*" + re.escape(reason)):
        cnf.read_dimacs(file)


def test_files_that_are_no_text_are_named(refuses, tmp_path):
    with refuses(UsageError, "there is no file .*missing.cnf"):
        cnf.read_dimacs(tmp_path / "missing.cnf")
    with refuses(UsageError, "give the path of a DIMACS"):
        cnf.read_dimacs(tmp_path)
    packed = tmp_path / "formula.cnf.gz"
    packed.write_bytes(gzip.compress(b"p cnf 1 1\n1 0\n"))
    with refuses(DimacsError, "line 1: this is not text"):
        cnf.read_dimacs(packed)


def test_a_failed_write_leaves_the_folder_as_it_was(refuses, tmp_path):
    (tmp_path / "file").write_text("mine")
    with refuses(UsageError, r"file cannot be written \(File exists\); give a place where you may write"):
        cnf.write_dimacs(Formula.of([(1,)]), tmp_path / "file" / "formula.cnf")
    with refuses(UsageError, "is a folder"):
        cnf.write_dimacs(Formula.of([(1,)]), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


# ---------------------------------------------------------------------------------------------------- the theorem


def every_weights(problem):
    places = np.indices((len(problem.levels),) * problem.columns).reshape(problem.columns, -1).T
    return np.array(problem.levels)[places]


def test_reduction_of_a_clause_is_the_papers():
    problem = reduce_formula(Formula.of([(1, -3, 4), (2, -2, 1), (-1, -2, -4)]))
    assert problem.x.tolist() == [[1, 0, -1, 1, 2], [-1, -1, 0, -1, 2]]  # the tautology is gone
    assert problem.y.tolist() == [1, 1]
    assert (problem.levels, problem.variables) == ((-1, 1), 4)


@given(formulas(most_variables=5))
def test_satisfiable_iff_separable_by_signs(formula):
    problem = reduce_formula(formula)
    assignments = every_assignment(formula.variables)
    models = formula.holds(assignments)
    for assignment, holds in zip(assignments, models, strict=True):
        weights = weights_of(assignment, problem)
        assert problem.separated_by(weights) == holds
        assert np.array_equal(assignment_of(weights, problem), assignment)
    weights = every_weights(problem)
    separators = weights[problem.separated_by(weights)]
    assert (len(separators) > 0) == models.any()
    assert formula.holds(assignment_of(separators, problem)).all()
    assert (separators[:, -1] == 1).sum() == models.sum()  # one separator a model, once the last weight is 1


def reduced(formula, levels):
    """`levels` as in the tests' parameters: None for ±1, I for -I..I, a tuple for any others."""
    return reduce_to_levels(formula, levels) if isinstance(levels, tuple) else reduce_formula(formula, levels)


@pytest.mark.parametrize(("levels", "most_variables"), [
    (1, 5), (2, 3), (3, 3), (5, 2), (7, 2), ((0, 1), 5), ((-1, 1), 5), ((-1, 0, 1), 4), ((-7, -4), 5), ((1, 2, 4), 4),
    ((-2, -1, 0, 1), 2)], ids=str)
def test_satisfiable_iff_separable_by_levels(levels, most_variables):
    @settings(max_examples=20)
    @given(formulas(most_variables=most_variables))
    def check(formula):
        problem = reduced(formula, levels)
        assignments = every_assignment(formula.variables)
        models = assignments[formula.holds(assignments)]
        weights = every_weights(problem)
        separators = weights[problem.separated_by(weights)]
        # Not only as many: the separators are the models, written as weights.
        expected = np.array([weights_of(model, problem) for model in models]).reshape(-1, problem.columns)
        assert np.array_equal(np.unique(separators, axis=0), np.unique(expected, axis=0))
        assert formula.holds(assignment_of(separators, problem)).all()

    check()


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 6, 7, 8])
def test_doubling_units_have_one_value_each(largest):
    """Lemma 1, by trying all."""
    units = doubling_units(largest)
    free = Separability(units.points, np.ones(len(units.points), dtype=int), levels_up_to(largest))
    weights = every_weights(free)
    assert weights[free.separated_by(weights)].tolist() == [units.values]


@pytest.mark.parametrize("units", [*map(doubling_units, (1, 2, 3, 6, 127, 1000)), chained_units((-3, 0, 1, 8))])
def test_units_say_the_three_largest_levels(units):
    top = units.values[-1]
    expected = [8, 1, 0] if top == 8 else [top, top - 1, top - 2]
    assert [int(row @ np.array(units.values)) for row in units[2:]] == expected


@given(formulas(least_width=1), st.sampled_from([None, 1, 2, 6, 127, (0, 1), (-9, 2, 5, 6)]))
def test_the_data_is_separable_in_the_reals(formula, levels):
    """The paper's "even when the data is linearly separable": hardness is in the grid, not in the data."""
    problem = reduced(formula, levels)
    if isinstance(levels, tuple):
        weights = [len(levels) - 0.5] * problem.variables + [*range(1, len(levels) + 1)]
    else:
        units = [2]
        while len(units) < problem.columns - problem.variables:
            units.append(2 * units[-1] + 1)
        weights = [0 if levels is None else units[-1] - 1] * problem.variables + units
        assert levels is None or max(weights) < 3 * levels  # in a grid three times as wide the data is always separable
    assert (problem.signed() @ np.array(weights) > 0).all()


UNSATISFIABLE = Formula.of([(a, 2 * b, 3 * c) for a, b, c in itertools.product((1, -1), repeat=3)])


def test_the_papers_points_are_always_separable_once_zero_is_a_weight():
    """Why -I..I needs points of its own."""
    papers = reduce_formula(UNSATISFIABLE)
    assert not papers.separated_by(every_weights(papers)).any()
    with_zero = Separability(papers.x, papers.y, levels_up_to(1))
    assert with_zero.separated_by(np.array([0, 0, 0, 1]))


def test_the_papers_last_feature_fails_on_a_literal_said_three_times():
    """(z or z or z) and (not z or not z or not z), read as printed, is separable but not satisfiable."""
    formula = Formula.of([(1, 1, 1), (-1, -1, -1)])
    as_printed = Separability(np.array([[1, 2], [-1, 2]]), np.array([1, 1]))
    assert as_printed.separated_by(np.array([1, 1]))
    ours = reduce_formula(formula)
    assert not ours.separated_by(every_weights(ours)).any()


@given(formulas(most_variables=8, most_clauses=15), st.sampled_from([None, 1, 2, 7, (-1, 1), (-1, 0, 1), (0, 1, 5)]))
def test_formula_comes_back_from_its_data(formula, levels):
    back = formula_of(reduced(formula, levels))
    assert [set(clause) for clause in back.clauses] == [set(clause) for clause in formula.cleaned().clauses]
    assert back.variables == formula.variables


def test_formula_of_refuses_other_data(refuses):
    problem = reduce_formula(Formula.of([(1, 2, 3)]), 3)
    changed = problem.x.copy()
    changed[0, 0] += 1
    with refuses(UsageError, "not the reduction of a formula"):
        formula_of(Separability(changed, problem.y, problem.levels, problem.variables))
    with refuses(UsageError, "not the reduction of a formula"):
        formula_of(Separability(-problem.x, -problem.y, problem.levels, problem.variables))


@given(formulas())
def test_a_point_and_its_label_can_change_sign_together(formula):
    problem = reduce_formula(formula)
    signs = np.where(np.arange(problem.points) % 2, -1, 1)
    mixed = Separability(problem.x * signs[:, None], problem.y * signs, problem.levels)
    weights = every_weights(problem)
    assert np.array_equal(mixed.separated_by(weights), problem.separated_by(weights))


def test_separability_refuses_what_it_cannot_be(refuses):
    x, y = np.ones((2, 3), dtype=int), np.array([1, -1])
    problem = Separability(x, y)
    assert not Separability(x[:1], y[:1]).separated_by([1, 1, 0])  # 0 is no sign
    for match, make in [
        ("2-dimensional array of float64", lambda: Separability(x * 0.5, y)),
        ("one label, 1 or -1, for each of the 2", lambda: Separability(x, np.array([1, 0]))),
        ("in rising order", lambda: Separability(x, y, (1, -1))),
        ("variables=4", lambda: Separability(x, y, variables=4)),
        ("has 3 entries", lambda: problem.separated_by(np.ones(2))),
        ("has 0 values", lambda: weights_of(np.ones(2), problem)),
        ("not the reduction of a formula", lambda: weights_of(np.ones(0), problem)),
        ("give two or more", lambda: reduce_to_levels(Formula.of([(1,)]), (3, 3))),
        ("largest=0", lambda: reduce_formula(Formula.of([(1,)]), 0)),
        ("take a smaller formula", lambda: reduce_formula(Formula(10**9, ((1, 2, 3),)))),
    ]:
        with refuses(UsageError, match):
            make()


@given(formulas(), st.sampled_from([None, 1, 5, (0, 3)]))
def test_npz_write_then_read(tmp_path_factory, formula, levels):
    problem = reduced(formula, levels)
    file = tmp_path_factory.mktemp("npz") / "data"  # no ending: numpy would add one
    save_problem(problem, file)
    again = load_problem(file)
    assert np.array_equal(again.x, problem.x)
    assert np.array_equal(again.y, problem.y)
    assert (again.levels, again.variables) == (problem.levels, problem.variables)


def test_files_that_are_no_data_set_are_named(refuses, tmp_path):
    good = tmp_path / "good.npz"
    save_problem(reduce_formula(UNSATISFIABLE), good)
    np.savez(tmp_path / "other.npz", x=np.ones((2, 2)))
    np.save(tmp_path / "array.npy", np.ones(3))
    (tmp_path / "text.npz").write_text("p cnf 1 1\n1 0\n")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.npz").write_bytes(good.read_bytes()[:-40])
    for name in ("other.npz", "array.npy", "text.npz", "empty.npz", "cut.npz"):
        with refuses(UsageError, f"{name} is not a separability data set"):
            load_problem(tmp_path / name)
    with refuses(UsageError, "there is no file"):
        load_problem(tmp_path / "missing.npz")


# ---------------------------------------------------------------------------------------------------- exact solvers


@needs_solvers
@pytest.mark.parametrize("largest", [None, 1, 3, 7], ids=["signs", "1", "3", "7"])
def test_solvers_agree_on_random_formulas(largest):
    """Around 4.26 clauses a variable; `gft hardness agree` ran it on more, results/hardness/agreement.md."""
    (count,) = agreement.check_agreement(150, [9], [largest], seed=11)
    assert count.instances == 150
    assert 75 < count.satisfiable < 150


@needs_solvers
@given(formulas(most_variables=6, most_clauses=30, most_width=3), st.sampled_from([None, 1, 2, 4]))
def test_solvers_agree_on_odd_formulas(formula, largest):
    both = solvers.solve_both(formula, largest)
    assert both.directly.possible == both.by_way_of_data.possible == formula.holds(every_assignment(formula.variables)).any()


@needs_solvers
@pytest.mark.parametrize("largest", [None, 1, 7, 127], ids=["signs", "1", "7", "127"])
def test_solvers_agree_on_larger_formulas(largest):
    verdicts = [solvers.solve_both(random_formula(70, 298, seed=seed), largest).by_way_of_data.possible for seed in range(8)]
    assert {True, False} == set(verdicts)


def pigeonholes(pigeons, holes):
    """Every pigeon has a hole and no hole two pigeons."""
    sits = np.arange(1, pigeons * holes + 1).reshape(pigeons, holes).tolist()
    return [*sits, *([-sits[a][h], -sits[b][h]] for h in range(holes) for a in range(pigeons) for b in range(a))]


def parity_circle(length, total):
    """x1 + x2, x2 + x3, ..., with each sum odd or even by `total`'s share; unsatisfiable if the total is odd (as DUBOIS)."""
    clauses = []
    for j in range(length):
        a, b = j + 1, (j + 1) % length + 1
        odd = total if j == 0 else 0
        clauses += [[a, b], [-a, -b]] if odd else [[a, -b], [-a, b]]
    return clauses


def colouring(edges, colours):
    corners = max(itertools.chain(*edges)) + 1
    paint = np.arange(1, corners * colours + 1).reshape(corners, colours).tolist()
    return [*paint, *([-paint[a][c], -paint[b][c]] for a, b in edges for c in range(colours))]


PETERSEN = [edge for j in range(5) for edge in ((j, (j + 1) % 5), (j, j + 5), (5 + j, 5 + (j + 2) % 5))]


@needs_solvers
@pytest.mark.parametrize("largest", [None, 1, 3], ids=["signs", "1", "3"])
@pytest.mark.parametrize(("clauses", "satisfiable"), [
    (pigeonholes(4, 4), True), (pigeonholes(5, 4), False), (parity_circle(30, 0), True), (parity_circle(30, 1), False),
    (colouring(PETERSEN, 3), True), (colouring(PETERSEN, 2), False),
], ids=["hole4 with room", "hole4", "even circle", "odd circle", "petersen in 3", "petersen in 2"])
def test_solvers_agree_on_standard_problems_through_files(clauses, satisfiable, largest, tmp_path):
    """Clauses of two to four literals, written and read as DIMACS files."""
    file = tmp_path / "standard.cnf"
    cnf.write_dimacs(Formula.of(clauses), file, comments=["a standard problem"])
    both = solvers.solve_both(cnf.read_dimacs(file), largest)
    assert both.directly.possible == both.by_way_of_data.possible == satisfiable


@needs_solvers
def test_a_wrong_reduction_is_noticed(monkeypatch):
    monkeypatch.setattr(solvers, "reduce_formula", lambda formula, largest: reduce_formula(Formula(3, ()), largest))
    with pytest.raises(solvers.Disagreement, match="satisfiable: False"):
        solvers.solve_both(UNSATISFIABLE)


@needs_solvers
def test_time_runs_out_as_unknown():
    answer = solvers.solve_separability(reduce_formula(random_formula(300, 1278, seed=1)), time_limit=0.01)
    assert (answer.found, answer.complete, answer.possible) == (None, False, None)


def test_a_missing_solver_names_its_package(monkeypatch, refuses):
    monkeypatch.setitem(sys.modules, "pysat.solvers", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with refuses(solvers.MissingSolver, r"needs python-sat.*pip install .*\[solvers\]'"):
        solvers.solve_formula(UNSATISFIABLE)
    with refuses(solvers.MissingSolver, "needs ortools"):
        solvers.solve_separability(reduce_formula(UNSATISFIABLE))
