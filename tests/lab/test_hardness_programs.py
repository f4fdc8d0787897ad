"""What is done with the theorem: heuristics, the study of where they stop, and the command line."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gft.cli.hardness import app
from gft.errors import UsageError
from gft.lab.hardness import cnf, study
from gft.lab.hardness.cnf import Formula, random_formula, read_dimacs
from gft.lab.hardness.heuristics import HEURISTICS, find_by_gft, rounded
from gft.lab.hardness.reduction import Separability, load_problem, reduce_formula, save_problem
from gft.lab.hardness.study import Family, Settings, run_study, write_report

needs_solvers = pytest.mark.skipif(find_spec("pysat") is None or find_spec("ortools") is None,
                                   reason="needs pip install 'gft-torch[solvers]'")
ABOUT = {"command": "gft hardness study", "commit": "0123456789"}
CONTRADICTION = Formula.of([(1,), (-1,)])


def planted(variables, ratio, seed):
    hidden = cnf.random_assignment(variables, seed)
    return random_formula(variables, round(ratio * variables), [seed, 1], planted=hidden)


# ---------------------------------------------------------------------------------------------------- heuristics


@pytest.mark.parametrize(("heuristic", "largest", "variables", "ratio"), [
    ("gft", None, 40, 4.26), ("gft", 1, 20, 4.26), ("gft", 3, 10, 3.0),
    ("perceptron", None, 12, 3.0), ("perceptron", 1, 5, 1.0),
    ("local-search", None, 60, 4.26), ("local-search", 1, 20, 3.0), ("local-search", 3, 6, 2.0),
    ("guessing", None, 10, 3.0), ("guessing", 1, 4, 1.0),
])
def test_heuristics_solve_easy_problems(heuristic, largest, variables, ratio):
    formula = planted(variables, ratio, seed=4)
    problem = reduce_formula(formula, largest)
    answer = HEURISTICS[heuristic](problem, 20.0, 3)
    assert answer.found is not None
    assert problem.separated_by(answer.found)
    assert answer.possible is True


@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("formula", [CONTRADICTION, Formula.of([(1, 2), ()])], ids=["contradiction", "empty clause"])
def test_heuristics_never_say_no(heuristic, formula):
    answer = HEURISTICS[heuristic](reduce_formula(formula), 0.02, 0)
    assert (answer.found, answer.complete, answer.possible) == (None, False, None)


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_heuristics_separate_no_points_at_all(heuristic):
    assert HEURISTICS[heuristic](reduce_formula(Formula(3, ())), 0.02, 0).found is not None


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_heuristics_separate_data_that_comes_from_no_formula(heuristic):
    """Two classes, entries of many sizes."""
    generator = np.random.default_rng(8)
    x = generator.integers(-9, 10, (6, 12))
    y = np.where(x @ generator.choice([-1, 1], 12) > 0, 1, -1)
    problem = Separability(x, y)
    answer = HEURISTICS[heuristic](problem, 10.0, 1)
    assert answer.found is not None
    assert (y * (x @ answer.found) > 0).all()


def test_gft_searches_by_its_seed_and_leaves_torch_alone(rng_untouched):
    problem = reduce_formula(planted(30, 4.26, seed=9))
    with rng_untouched():
        found = [find_by_gft(problem, 20.0, seed).found for seed in (5, 5, 6)]
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_gft_starts_anew_until_the_time_is_up():
    assert find_by_gft(reduce_formula(planted(20, 4.26, seed=1)), 20.0, 0, steps_a_start=3).found is not None


def test_gft_refuses_a_grid_it_does_not_have(refuses):
    with refuses(UsageError, r"GFT has no grid -2\.\.2"):
        find_by_gft(reduce_formula(CONTRADICTION, 2), 1.0)


def test_rounded_keeps_to_the_levels():
    weights = np.array([[0.0, -3.0, 0.2, 6.0], [0.0, 0.0, 0.0, 0.0]])
    assert rounded(weights, (-1, 1)).tolist() == [[1, -1, 1, 1], [1, 1, 1, 1]]
    assert rounded(weights, (-2, -1, 0, 1, 2)).tolist() == [[0, -1, 0, 2], [0, 0, 0, 0]]


# ---------------------------------------------------------------------------------------------------- study

SMALL = Settings(sizes=(8, 12), families=("random:3", "planted:4.26"), instances=2, seconds=0.5, seed=3)


@needs_solvers
@pytest.mark.parametrize("family", ["random:4.26", "planted:4.26", "planted:9"])
def test_families_are_satisfiable_and_keep_their_seed(family):
    one = Family.of(family)
    assert one.name == family
    formulas = [one.formula(15, instance, seed=2) for instance in range(3)]
    assert len(set(formulas)) == 3
    assert formulas == [one.formula(15, instance, seed=2) for instance in range(3)]
    assert all(formula.holds(cnf.every_assignment(15)).any() for formula in formulas)


@needs_solvers
def test_study_goes_on_where_it_was_and_grows(tmp_path):
    out = tmp_path / "study"
    threads = torch.get_num_threads()
    runs = run_study(SMALL, out, ABOUT)
    stopped = [next(runs) for _ in range(7)]
    runs.close()
    with (out / "runs.jsonl").open("a") as file:
        file.write('{"family": "rand')  # what a power cut leaves
    complete = list(run_study(SMALL, out, ABOUT))
    assert complete[:7] == stopped
    assert len(complete) == SMALL.count() == 40
    larger = Settings(**{**vars(SMALL), "sizes": (8, 12, 16), "solvers": ("cp-sat", "gft")})
    assert len(list(run_study(larger, out, {**ABOUT, "command": "more"}))) == larger.count()
    lines = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    assert len(lines) == 40 + 8
    assert lines[:40] == complete
    assert [run["command"] for run in json.loads((out / "study.json").read_text())["runs"]] == [ABOUT["command"], "more"]
    assert torch.get_num_threads() == threads


@needs_solvers
def test_study_reports_what_was_recorded(tmp_path):
    list(run_study(SMALL, tmp_path, ABOUT))
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    for record in records:
        if record["size"] == 12 and record["solver"] == "gft":
            record.update(solved=record["instance"] == 0, seconds=0.1)
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = write_report(tmp_path)
    assert {"family": "planted:4.26", "size": 12, "solver": "gft", "n": 2, "solved": 1, "median_seconds": 0.3} in rows
    assert json.loads((tmp_path / "study.json").read_text())["rows"] == rows
    text = (tmp_path / "study.md").read_text()
    assert "| 1/2 · 0.300 s |" in text
    assert "`gft hardness study` · commit 0123456789" in text
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "study.svg").read_bytes()
    write_report(tmp_path)
    assert (tmp_path / "study.svg").read_bytes() == before


@needs_solvers
def test_study_refuses_before_it_writes(refuses, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with refuses(UsageError, "exists and holds no study"):
        run_study(SMALL, foreign, ABOUT)
    own = tmp_path / "own"
    run_study(SMALL, own, ABOUT).close()
    with refuses(UsageError, "holds a study with other settings"):
        run_study(Settings(**{**vars(SMALL), "seconds": 0.6}), own, ABOUT)
    with refuses(UsageError, "GFT has no grid"):
        run_study(Settings(**{**vars(SMALL), "largest": 2}), tmp_path / "new", ABOUT)
    with refuses(UsageError, "is finished yet"):
        write_report(own)
    (own / "study.json").write_text("[]")
    with refuses(UsageError, "study.json holds a list where an object"):
        run_study(SMALL, own, ABOUT)
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["foreign", "notes.txt", "own", "runs.jsonl", "study.json"]
    (own / "runs.jsonl").write_text('{"fam\n{}\n')
    with refuses(UsageError, "runs.jsonl, line 1: not JSON"):
        study.read_records(own)


@needs_solvers
def test_a_family_without_satisfiable_formulas_says_so(refuses, monkeypatch):
    monkeypatch.setattr(study, "MOST_DRAWS", 5)
    with refuses(UsageError, "none of 5 random formulas"):
        Family.of("random:50").formula(10, 0, 0)


# ---------------------------------------------------------------------------------------------------- command line


def hardness(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def satisfiable(tmp_path):
    file = tmp_path / "satisfiable.cnf"
    cnf.write_dimacs(planted(60, 4.2, seed=6), file, comments=["sixty variables"])
    return file


@pytest.fixture
def unsatisfiable(tmp_path):
    file = tmp_path / "unsatisfiable.cnf"
    cnf.write_dimacs(random_formula(20, 200, seed=1), file)
    return file


@needs_solvers
@pytest.mark.parametrize("options", [[], ["--via", "sat"], ["--via", "separability"], ["--largest", "3"]],
                         ids=lambda options: " ".join(options) or "both")
def test_solve_speaks_as_sat_solvers_do(options, satisfiable, unsatisfiable):
    done = hardness("solve", satisfiable, *options)
    lines = done.stdout.splitlines()
    assert done.exit_code == 10
    assert "s SATISFIABLE" in lines
    assert ("c both agree" in lines) == ("--via" not in options)
    assert {line[:2] for line in lines} == {"c ", "s ", "v "}
    values = [int(word) for line in lines if line.startswith("v") for word in line.split()[1:]]
    assert [abs(value) for value in values] == [*range(1, 61), 0]
    assert read_dimacs(satisfiable).holds(np.array(values[:-1]) > 0)
    done = hardness("solve", unsatisfiable, *options)
    assert done.exit_code == 20
    assert done.stdout.splitlines()[-1] == "s UNSATISFIABLE"


@needs_solvers
def test_solve_says_unknown_when_time_runs_out(tmp_path):
    file = tmp_path / "large.cnf"
    cnf.write_dimacs(random_formula(300, 1278, seed=1), file)
    done = hardness("solve", file, "--via", "separability", "--time-limit", 0.01)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "s UNKNOWN")


@needs_solvers
def test_reduce_restore_solve(satisfiable, tmp_path):
    data, back = tmp_path / "data.npz", tmp_path / "back.cnf"
    for options, points, columns in (([], 252, 61), (["--largest", 7], 252 + 3 + 60, 63)):
        done = hardness("reduce", satisfiable, "-o", data, *options)
        assert done.exit_code == 0, done.output
        assert f"{points} points in {columns} dimensions" in done.stdout
        assert load_problem(data).x.shape == (points, columns)
        assert hardness("restore", data, "-o", back).exit_code == 0
        assert list(map(set, read_dimacs(back).clauses)) == list(map(set, read_dimacs(satisfiable).clauses))


def test_bad_input_overwrites_nothing(satisfiable, tmp_path):
    data, bad = tmp_path / "data.npz", tmp_path / "bad.cnf"
    save_problem(reduce_formula(CONTRADICTION), data)
    before = data.read_bytes()
    bad.write_text("p cnf 2 1\n1 3 0\n")
    done = hardness("reduce", bad, "-o", data)
    assert isinstance(done.exception, cnf.DimacsError)  # gft.cli.main turns it into a sentence and exit code 2
    assert "line 2" in str(done.exception)
    assert isinstance(hardness("restore", bad, "-o", satisfiable).exception, UsageError)
    assert read_dimacs(satisfiable).variables == 60
    assert data.read_bytes() == before


@pytest.mark.parametrize(("arguments", "says"), [
    (["solve", "missing.cnf"], "there is no file missing.cnf"),
    (["solve", "missing.cnf", "--via", "magic"], "--via magic: choose one of both, sat, separability"),
    (["agree", "--sizes", "ten"], "--sizes 'ten': give whole numbers from 3"),
    (["agree", "--largests", "-1"], "--largests '-1'"),
    (["study", "--sizes", "2,8"], "--sizes '2,8'"),
    (["study", "--solvers", "oracle"], "no solver 'oracle'; choose from cp-sat, gft"),
    (["study", "--families", "random:x"], "'random:x' is no family of formulas"),
    (["study", "--families", ""], "at least one family"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_mistakes_get_one_sentence(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = hardness(*arguments)
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not any(tmp_path.iterdir())


@needs_solvers
def test_agree_and_study_write_their_folders(tmp_path):
    done = hardness("agree", "--instances", 3, "--sizes", "5,15", "--largests", "0,2", "--out", tmp_path / "agree")
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "agree" / "agreement.json").read_text())
    assert [(count["largest"], count["variables"], count["instances"]) for count in kept["counts"]] == [
        (None, 5, 3), (None, 15, 3), (2, 5, 3), (2, 15, 3)]
    assert "Disagreements: 0" in (tmp_path / "agree" / "agreement.md").read_text()
    for _ in range(2):
        done = hardness("study", "--sizes", "6", "--instances", 2, "--seconds", 0.3, "--out", tmp_path / "study")
        assert done.exit_code == 0, done.output
    assert len((tmp_path / "study" / "runs.jsonl").read_text().splitlines()) == 3 * 2 * 5
    assert "--sizes 6 --families random:3," in (tmp_path / "study" / "study.md").read_text()
