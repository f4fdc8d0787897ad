"""Where heuristics stop: satisfiable formulas of growing size, as separability problems, given to every solver.

Every problem here has a solution; success is to find one within the time. `run_study` yields a record a problem and solver
and keeps each in OUT/runs.jsonl at once, so a stopped study goes on where it was and a larger one adds to a smaller one.
`write_report` makes study.json, study.md and the plots from what is there.
"""

import json
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gft.errors import UsageError, shortened
from gft.files import FolderLock, sentence_for, write_text
from gft.lab import markdown as tables
from gft.lab.hardness.cnf import HARDEST_RATIO, Formula, random_assignment, random_formula
from gft.lab.hardness.heuristics import HEURISTICS
from gft.lab.hardness.plot import plot_study
from gft.lab.hardness.reduction import MOST_LEVELS, Separability, levels_up_to, reduce_formula, weight_set
from gft.lab.hardness.solvers import Answer, solve_formula, solve_separability
from gft.lab.provenance import commit, described, versions
from gft.lab.records import checked, read_json_lines, read_object, write_json, write_lines

SOLVERS: dict[str, Callable[[Separability, float, int], Answer]] = {"cp-sat": solve_separability, **HEURISTICS}
KINDS = ("random", "planted")
MOST_DRAWS = 1000
Record = dict[str, Any]
Key = tuple[str, int, int, str]  # family, size, instance, solver


@dataclass(frozen=True)
class Family:
    """Satisfiable 3-CNF formulas of one ratio of clauses to variables.

    random: uniform formulas, of which those that CaDiCaL finds unsatisfiable are left out.
    planted: uniform among the clauses a hidden assignment satisfies.
    """

    kind: str
    ratio: float

    @classmethod
    def of(cls, text: str) -> "Family":
        """"planted:4.26" -> the family."""
        kind, _, number = text.partition(":")
        try:
            ratio = float(number)
        except ValueError:
            ratio = 0.0
        if kind not in KINDS or not 0 < ratio < 100:
            raise UsageError(f"{text!r} is no family of formulas; write random:RATIO or planted:RATIO, like "
                             f"random:{HARDEST_RATIO}")
        return cls(kind, ratio)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.ratio:g}"

    def formula(self, size: int, instance: int, seed: int) -> Formula:
        """A satisfiable formula; the same for the same arguments, whatever else the study holds."""
        seeds = [seed, KINDS.index(self.kind), round(1000 * self.ratio), size, instance]
        clauses = round(self.ratio * size)
        if self.kind == "planted":
            return random_formula(size, clauses, [*seeds, 0], planted=random_assignment(size, [*seeds, 1]))
        for draw in range(MOST_DRAWS):
            formula = random_formula(size, clauses, [*seeds, draw])
            if solve_formula(formula).found is not None:
                return formula
        raise UsageError(f"none of {MOST_DRAWS} random formulas with {size} variables and {self.ratio:g} clauses a variable "
                         "can be satisfied; take a smaller ratio or planted formulas")


@dataclass(frozen=True)
class Settings:
    """What a study asks.

    seconds: of CPU each solver gets for a problem. CP-SAT counts them on the wall clock.
    largest: weights are in -largest..largest; ±1 at None.
    """

    sizes: tuple[int, ...] = (10, 20, 40, 60, 80, 120, 200)
    families: tuple[str, ...] = ("random:3", f"planted:{HARDEST_RATIO}", f"random:{HARDEST_RATIO}")
    solvers: tuple[str, ...] = tuple(SOLVERS)
    instances: int = 10
    seconds: float = 1.5
    seed: int = 0
    largest: int | None = None

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 3:
            raise UsageError(f"sizes={self.sizes}: give numbers of variables, each 3 or more")
        if self.instances < 1 or self.seconds <= 0:
            raise UsageError(f"instances={self.instances}, seconds={self.seconds}: both have to be above 0")
        if not (self.families and self.solvers):
            raise UsageError("a study needs at least one family of formulas and one solver")
        levels_up_to(self.largest)  # raises where there is no such grid
        for family in self.families:
            Family.of(family)
        for solver in self.solvers:
            if solver not in SOLVERS:
                raise UsageError(f"no solver {solver!r}; choose from {', '.join(SOLVERS)}")

    def fixed(self) -> dict[str, Any]:
        """What has to be equal in all runs of one folder."""
        return {"seconds": self.seconds, "seed": self.seed, "largest": self.largest}

    def problems(self) -> Iterator[tuple[Family, int, int]]:
        for family in map(Family.of, self.families):
            for size in self.sizes:
                for instance in range(self.instances):
                    yield family, size, instance

    def count(self) -> int:
        return len(self.families) * len(self.sizes) * self.instances * len(self.solvers)


def surroundings() -> dict[str, str]:
    """Commit, hardware and versions: what a study's numbers depend on."""
    return {"commit": commit(), "hardware": f"CPU ({platform.machine()}), 1 thread",
            **versions("torch", "numpy", "ortools", "python-sat")}


# ---------------------------------------------------------------------------------------------------- running


def run_study(settings: Settings, out: Path, about: Mapping[str, str]) -> Iterator[Record]:
    """A record a problem and solver; what the folder has already is not run again. `about` (command, commit, hardware) is
    kept beside the records. Raises before it touches the folder if the settings or the folder will not do."""
    warm_up(settings)
    return run_missing(settings, out, open_folder(settings, out, about))


def run_missing(settings: Settings, out: Path, done: Mapping[Key, Record]) -> Iterator[Record]:
    threads = torch.get_num_threads()
    lock = FolderLock(out, "wait for it to end, or give another --out")
    torch.set_num_threads(1)
    try:
        with sentence_for(out / "runs.jsonl"), (out / "runs.jsonl").open("a") as kept:
            for family, size, instance in settings.problems():
                keys: list[Key] = [(family.name, size, instance, name) for name in settings.solvers]
                yield from (done[key] for key in keys if key in done)
                missing = [key for key in keys if key not in done]
                if not missing:
                    continue
                problem = reduce_formula(family.formula(size, instance, settings.seed), settings.largest)
                for *_, name in missing:
                    answer = SOLVERS[name](problem, settings.seconds, instance)
                    record = {"family": family.name, "size": size, "instance": instance, "solver": name,
                              "solved": answer.found is not None, "seconds": round(answer.seconds, 4)}
                    assert answer.possible is not False, f"{name} denies the solution of {record}"
                    kept.write(json.dumps(record) + "\n")
                    kept.flush()
                    yield record
    finally:
        torch.set_num_threads(threads)
        lock.release()


def warm_up(settings: Settings) -> None:
    """The first step of a solver imports things; that is not to be counted against the first problem. A formula that cannot
    be satisfied makes every one of them take steps."""
    problem = reduce_formula(Formula.of([(1,), (-1,)]), settings.largest)
    for name in settings.solvers:
        SOLVERS[name](problem, 0.1, 0)


# ---------------------------------------------------------------------------------------------------- the folder


def open_folder(settings: Settings, out: Path, about: Mapping[str, str]) -> dict[Key, Record]:
    """Make the folder of a study, or check that what is in it was made alike. Returns what is done already."""
    kept: dict[str, Any] = {"fixed": settings.fixed(), "runs": []}
    if (out / "study.json").exists():
        kept = read_study(out)
        if kept["fixed"] != settings.fixed():
            raise UsageError(f"{out} holds a study with other settings ({kept['fixed']}); give another --out, or the same "
                             "seconds, seed and largest to go on")
    elif out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists and holds no study; give a new folder")
    records = read_records(out)
    if dict(about) not in kept["runs"]:
        kept["runs"].append(dict(about))
    write_json(out / "study.json", kept)
    # Also cuts off half a line that a stopped study may have left.
    write_lines(out / "runs.jsonl", records)
    return {(record["family"], record["size"], record["instance"], record["solver"]): record for record in records}


def read_study(out: Path) -> dict[str, Any]:
    kept = read_object(out / "study.json", {"fixed": "object", "runs": "list"})
    kinds = {"seconds": "number", "seed": "integer", "largest": "integer or none"}
    largest = checked(kept["fixed"], f"{out / 'study.json'}, fixed", kinds)["largest"]
    if largest is not None and not 0 < largest <= MOST_LEVELS:  # all of them are listed
        raise UsageError(f"{out / 'study.json'}: largest is {shortened(largest)}, where 1 to {MOST_LEVELS} is sensible; "
                         "mend or delete it")
    for about in kept["runs"]:
        checked(about, f"{out / 'study.json'}, runs", {})
    return kept


def read_records(out: Path) -> list[Record]:
    file = out / "runs.jsonl"
    kinds = {"family": "text", "size": "integer", "instance": "integer", "solver": "text", "solved": "truth",
             "seconds": "number"}
    lines = read_json_lines(file, cut_last=True) if file.exists() else ()
    return [checked(record, f"{file}, line {number}", kinds) for number, record in enumerate(lines, 1)]


# ---------------------------------------------------------------------------------------------------- report


def summary(records: Sequence[Record], seconds: float) -> list[dict[str, Any]]:
    """One row a family, size and solver. A problem not solved counts with all the time it was given."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["family"], record["size"], record["solver"]), []).append(record)
    return [{"family": family, "size": size, "solver": solver, "n": len(group),
             "solved": sum(bool(record["solved"]) for record in group),
             "median_seconds": statistics.median(record["seconds"] if record["solved"] else max(seconds, record["seconds"])
                                                 for record in group)}
            for (family, size, solver), group in sorted(groups.items())]


def write_report(out: Path) -> list[dict[str, Any]]:
    """study.json, study.md, study.png and study.svg from the records in the folder."""
    kept, records = read_study(out), read_records(out)
    if not records:
        raise UsageError(f"no problem of the study in {out} is finished yet; run gft hardness study with --out {out}")
    rows = summary(records, kept["fixed"]["seconds"])
    write_json(out / "study.json", {**kept, "rows": rows})
    write_text(out / "study.md", markdown(rows, kept))
    plot_study(rows, kept["fixed"]["seconds"], [out / "study.png", out / "study.svg"])
    return rows


def markdown(rows: Sequence[Mapping[str, Any]], study: Mapping[str, Any]) -> str:
    """study.md: a table a family of formulas, a row a size, a column a solver."""
    fixed = study["fixed"]
    solvers = [name for name in SOLVERS if any(row["solver"] == name for row in rows)]
    cells = {(row["family"], row["size"], row["solver"]): f"{row['solved']}/{row['n']} · {row['median_seconds']:.3f} s"
             for row in rows}
    lines = ["# Where heuristics stop", "",
             f"Problems solved and median CPU time; weights {weight_set(levels_up_to(fixed['largest']))}. Every problem has "
             f"a solution. A solver had {fixed['seconds']:g} s for each; one not solved counts with all of it. Seed "
             f"{fixed['seed']}.", ""]
    for family in dict.fromkeys(row["family"] for row in rows):
        table = tables.table(["variables", *solvers], [
            [str(size), *(cells.get((family, size, solver), "–") for solver in solvers)]
            for size in sorted({row["size"] for row in rows if row["family"] == family})])
        lines += [f"## {family} clauses a variable", "", table, ""]
    for about in study["runs"]:
        lines += [described(about), ""]
    return "\n".join(lines)
