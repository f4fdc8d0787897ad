"""gft hardness: the NP-hardness theorem at work. solve | reduce | restore | agree | study.

`solve` speaks as SAT solvers do: comments on lines "c", the verdict on a line "s", the assignment on lines "v", and exit
code 10 for satisfiable, 20 for unsatisfiable, 0 for unknown. Bad input is one sentence on stderr and exit code 2.
"""

import platform
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import Progress

from gft.hardness import agreement
from gft.hardness import study as studies
from gft.hardness.cnf import read_dimacs, write_dimacs
from gft.hardness.files import write_whole
from gft.hardness.reduction import (
    Separability,
    assignment_of,
    formula_of,
    levels_up_to,
    load_problem,
    reduce_formula,
    save_problem,
    weight_set,
)
from gft.hardness.solvers import Answer, solve_both, solve_formula, solve_separability
from gft.lab.runs import commit

app = typer.Typer(no_args_is_help=True, help="The NP-hardness theorem at work: formulas as separability problems, and back.")

WAYS = ("both", "sat", "separability")
DEFAULTS = studies.Settings()
Cnf = Annotated[Path, typer.Argument(metavar="FILE.cnf", help="A formula in DIMACS format.")]
Largest = Annotated[int | None, typer.Option(min=1, metavar="I", help="Weights in -I..I; the paper's ±1 if not given.")]


@app.command()
def solve(file: Cnf,
          via: Annotated[str, typer.Option(help="both (and hold each to the other), sat (CaDiCaL on the formula), "
                                                "separability (CP-SAT on the data set it is reduced to).")] = "both",
          largest: Largest = None,
          time_limit: Annotated[float, typer.Option(min=0.001, help="Seconds, for CP-SAT.")] = 60.0) -> None:
    """Decide a formula, directly and by way of its data set. Exit code 10: satisfiable, 20: not, 0: unknown."""
    if via not in WAYS:
        raise ValueError(f"--via {via}: choose one of {', '.join(WAYS)}")
    formula = read_dimacs(file)
    print(f"c {file}: {formula.variables} variables, {len(formula.clauses)} clauses")
    if via == "sat":
        verdict = solve_formula(formula)
        print(formula_side(verdict))
    elif via == "separability":
        problem = reduce_formula(formula, largest)
        answer = solve_separability(problem, time_limit)
        print(data_side(problem, answer))
        found = None if answer.found is None else assignment_of(answer.found, problem)
        verdict = Answer(found, answer.complete, answer.seconds)
    else:
        both = solve_both(formula, largest, time_limit)
        verdict = both.directly
        print(formula_side(verdict), data_side(both.problem, both.by_way_of_data), sep="\n")
        print("c both agree" if both.by_way_of_data.complete else "c CP-SAT ran out of time; the verdict is CaDiCaL's alone")
    if verdict.found is None:
        print("s UNSATISFIABLE" if verdict.complete else "s UNKNOWN")
        raise typer.Exit(20 if verdict.complete else 0)
    assert formula.holds(verdict.found)
    print("s SATISFIABLE", *value_lines(verdict.found), sep="\n")
    raise typer.Exit(10)


def formula_side(answer: Answer) -> str:
    return f"c formula: {judged(answer, 'satisfiable')} (CaDiCaL, {answer.seconds:.3f} s)"


def data_side(problem: Separability, answer: Answer) -> str:
    return f"c data set: {shape(problem)}: {judged(answer, 'separable')} (CP-SAT, {answer.seconds:.3f} s)"


def judged(answer: Answer, word: str) -> str:
    return {True: word, False: f"not {word}", None: "unknown"}[answer.possible]


def shape(problem: Separability) -> str:
    return f"{problem.points} points in {problem.columns} dimensions, weights {weight_set(problem.levels)}"


def value_lines(assignment: np.ndarray, width: int = 78) -> Iterator[str]:
    """v 1 -2 3 ... 0, broken into lines as the SAT competitions ask."""
    line = "v"
    for word in [*(str(j if true else -j) for j, true in enumerate(assignment, 1)), "0"]:
        if len(line) + 1 + len(word) > width:
            yield line
            line = "v"
        line += f" {word}"
    yield line


@app.command()
def reduce(file: Cnf, out: Annotated[Path, typer.Option("-o", "--out", metavar="DATA.npz", help="Where the data set goes.")],
           largest: Largest = None) -> None:
    """Write the data set that integer weights separate if and only if the formula can be satisfied."""
    formula = read_dimacs(file)
    problem = reduce_formula(formula, largest)
    save_problem(problem, out)
    removed = len(formula.clauses) - len(formula.cleaned().clauses)
    print(f"{shape(problem)}; clauses left out because they always hold: {removed}. Written: {out}")


@app.command()
def restore(file: Annotated[Path, typer.Argument(metavar="DATA.npz", help="A data set that gft hardness reduce wrote.")],
            out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.cnf", help="Where the formula goes.")]) -> None:
    """Write the formula a data set was made from."""
    formula = formula_of(load_problem(file))
    write_dimacs(formula, out, comments=["restored from a separability data set by gft hardness restore"])
    print(f"{formula.variables} variables, {len(formula.clauses)} clauses. Written: {out}")


@app.command()
def agree(instances: Annotated[int, typer.Option(min=1, help="Random formulas for each size and weight set.")] = 250,
          sizes: Annotated[str, typer.Option(help="Numbers of variables.")] = "8,10,12",
          largests: Annotated[str, typer.Option(help="Weight sets: 0 is the paper's ±1, I is -I..I.")] = "0,1,3,7",
          seed: Annotated[int, typer.Option(min=0)] = 0,
          out: Annotated[Path | None, typer.Option(help="Folder for agreement.json and agreement.md.")] = None) -> None:
    """Check the theorem on random formulas around 4.26 clauses a variable: satisfiable if and only if separable."""
    weight_sets = [number or None for number in whole_numbers("--largests", largests, least=0)]
    numbers = whole_numbers("--sizes", sizes, least=3)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # rather now than after minutes of work
    counts = []
    for count in agreement.check_agreement(instances, numbers, weight_sets, seed):
        counts.append(count)
        print(f"weights {weight_set(levels_up_to(count.largest))}, {count.variables} variables: {count.instances} formulas, "
              f"of which {count.satisfiable} satisfiable and separable; all agree ({count.seconds:.1f} s)", flush=True)
    if out is not None:
        asked = command("agree", instances=instances, sizes=sizes, largests=largests, seed=seed, out=out)
        about = {"command": asked, **surroundings()}
        studies.write_json(out / "agreement.json", {**about, "counts": [asdict(count) for count in counts]})
        write_whole(out / "agreement.md", agreement.markdown(counts, about).encode())
        print(f"Written: {out}/agreement.json, agreement.md")


@app.command()
def study(sizes: Annotated[str, typer.Option(help="Numbers of variables.")] = ",".join(map(str, DEFAULTS.sizes)),
          families: Annotated[str, typer.Option(help="random:RATIO, planted:RATIO.")] = ",".join(DEFAULTS.families),
          solvers: Annotated[str, typer.Option(help="Who is given the problems.")] = ",".join(DEFAULTS.solvers),
          instances: Annotated[int, typer.Option(min=1, help="Problems for each size and family.")] = DEFAULTS.instances,
          seconds: Annotated[float, typer.Option(min=0.001, help="CPU time a solver has for a problem.")] = DEFAULTS.seconds,
          seed: Annotated[int, typer.Option(min=0, help="Of the problems.")] = DEFAULTS.seed,
          largest: Largest = None,
          out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("runs/hardness")) -> None:
    """Give solvable problems of growing size to exact solvers and heuristics; a stopped study goes on where it was."""
    settings = studies.Settings(tuple(whole_numbers("--sizes", sizes, least=3)), words(families), words(solvers), instances,
                                seconds, seed, largest)
    asked = command("study", sizes=sizes, families=families, solvers=solvers, instances=instances, seconds=seconds,
                    seed=seed, largest=largest, out=out)
    records = studies.run_study(settings, out, {"command": asked, **surroundings()})
    with Progress() as progress:
        bar = progress.add_task("", total=settings.count())
        for record in records:
            progress.update(bar, advance=1, description=f"{record['family']} {record['size']} {record['solver']}")
    studies.write_report(out)
    print(f"Written: {out}/study.md, study.json, runs.jsonl, study.png, study.svg")


# ---------------------------------------------------------------------------------------------------- shared


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def whole_numbers(option: str, text: str, least: int, most: int = 10_000) -> list[int]:
    numbers = words(text)
    if not numbers or not all(re.fullmatch("[0-9]{1,5}", word) and least <= int(word) <= most for word in numbers):
        raise ValueError(f"{option} {text!r}: give whole numbers from {least} to {most}, separated by commas")
    return [int(word) for word in numbers]


def command(name: str, **options: object) -> str:
    given = {key: shlex.quote(str(value)) for key, value in options.items() if value is not None}
    return " ".join(["gft hardness", name, *(f"--{key} {value}" for key, value in given.items())])


def surroundings() -> dict[str, str]:
    """Commit, hardware and versions: what a number needs beside it."""
    told = {"commit": commit(), "hardware": f"CPU ({platform.machine()}), 1 thread"}
    for package in ("torch", "numpy", "ortools", "python-sat"):
        try:
            told[package] = version(package)
        except PackageNotFoundError:
            told[package] = "not installed"
    return told
