"""gft hardness: the NP-hardness theorem at work. solve | reduce | restore | agree | study.

`solve` ends as SAT solvers do: exit code 10 for satisfiable, 20 for unsatisfiable, 0 for unknown. Bad input is one sentence
on stderr and exit code 2.
"""

import re
from pathlib import Path
from typing import Annotated

import typer

from gft.errors import UsageError
from gft.files import make_folder
from gft.lab.display import say, watching
from gft.lab.hardness import agreement
from gft.lab.hardness import study as studies
from gft.lab.hardness.cnf import read_dimacs, write_dimacs
from gft.lab.hardness.reduction import formula_of, load_problem, reduce_formula, save_problem
from gft.lab.hardness.verdict import check_way, decide, shape
from gft.lab.plain import printable
from gft.lab.provenance import command_line

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  help="The NP-hardness theorem at work: formulas as data sets.")

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
    check_way(via)
    formula = read_dimacs(file)
    print(printable(f"c {file}: {formula.variables} variables, {len(formula.clauses)} clauses", lines=False))
    verdict = decide(formula, via, largest, time_limit)
    print(*verdict.lines(), sep="\n")
    raise typer.Exit(verdict.exit_code)


@app.command()
def reduce(file: Cnf, out: Annotated[Path, typer.Option("-o", "--out", metavar="DATA.npz", help="Where the data set goes.")],
           largest: Largest = None) -> None:
    """Write the data set that integer weights separate if and only if the formula can be satisfied."""
    formula = read_dimacs(file)
    problem = reduce_formula(formula, largest)
    save_problem(problem, out)
    removed = len(formula.clauses) - len(formula.cleaned().clauses)
    say(f"{shape(problem)}; clauses left out because they always hold: {removed}. Written: {out}")


@app.command()
def restore(file: Annotated[Path, typer.Argument(metavar="DATA.npz", help="A data set that gft hardness reduce wrote.")],
            out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.cnf", help="Where the formula goes.")]) -> None:
    """Write the formula a data set was made from."""
    formula = formula_of(load_problem(file))
    write_dimacs(formula, out, comments=["restored from a separability data set by gft hardness restore"])
    say(f"{formula.variables} variables, {len(formula.clauses)} clauses. Written: {out}")


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
        make_folder(out)  # rather now than after minutes of work
    counts = []
    for count in agreement.check_agreement(instances, numbers, weight_sets, seed):
        counts.append(count)
        print(count.sentence(), flush=True)
    if out is not None:
        asked = command_line("gft hardness agree", instances=instances, sizes=sizes, largests=largests, seed=seed, out=out)
        agreement.write_report(out, counts, {"command": asked, **studies.surroundings()})
        say(f"Written: {out}/agreement.json, agreement.md")


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
    asked = command_line("gft hardness study", sizes=sizes, families=families, solvers=solvers, instances=instances,
                         seconds=seconds, seed=seed, largest=largest, out=out)
    records = studies.run_study(settings, out, {"command": asked, **studies.surroundings()})
    with watching() as shown:
        shown.add("problems", settings.count())
        for _ in records:
            shown.advance("problems")
    studies.write_report(out)
    say(f"Written: {out}/study.md, study.json, runs.jsonl, study.png, study.svg")


def words(text: str) -> tuple[str, ...]:
    """"a, b" -> the words between the commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def whole_numbers(option: str, text: str, least: int, most: int = 10_000) -> list[int]:
    numbers = words(text)
    if not numbers or not all(re.fullmatch("[0-9]{1,5}", word) and least <= int(word) <= most for word in numbers):
        raise UsageError(f"{option} {text!r}: give whole numbers from {least} to {most}, separated by commas")
    return [int(word) for word in numbers]
