"""The theorem put to the test: thousands of random formulas, each decided in ways that all have to agree.

    CaDiCaL on the formula                                   CP-SAT on the data set it is reduced to
    all 2^m assignments one by one, up to 12 variables       each side's solution, carried over and verified on the other
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gft.files import write_text
from gft.lab.hardness.cnf import HARDEST_RATIO, every_assignment, random_formula
from gft.lab.hardness.reduction import levels_up_to, weight_set
from gft.lab.hardness.solvers import Disagreement, solve_both
from gft.lab.markdown import table
from gft.lab.provenance import described
from gft.lab.records import write_json

MOST_LISTED = 12  # variables up to which all assignments are tried
RATIOS = (HARDEST_RATIO - 0.5, HARDEST_RATIO + 0.5)


@dataclass
class Agreement:
    """What came of the instances of one weight set and size. A disagreement would have raised."""

    largest: int | None  # None: ±1
    variables: int
    instances: int = 0
    satisfiable: int = 0
    seconds: float = 0.0  # CPU

    def sentence(self) -> str:
        return (f"weights {weight_set(levels_up_to(self.largest))}, {self.variables} variables: {self.instances} formulas, "
                f"of which {self.satisfiable} satisfiable and separable; all agree ({self.seconds:.1f} s)")


def check_agreement(instances: int, sizes: Sequence[int], largests: Sequence[int | None],
                    seed: int = 0) -> Iterator[Agreement]:
    """Decide `instances` random 3-CNF formulas for each size and weight set, the ratio of clauses to variables drawn from
    4.26 ± 0.5. Yields the count after every size; raises Disagreement, naming the formula's seed, at the first failure."""
    for largest in largests:
        for variables in sizes:
            count = Agreement(largest, variables)
            start = time.process_time()
            everything = every_assignment(variables) if variables <= MOST_LISTED else None
            for instance in range(instances):
                seeds = [seed, 0 if largest is None else largest, variables, instance]
                ratio = np.random.default_rng([*seeds, 1]).uniform(*RATIOS)
                formula = random_formula(variables, round(ratio * variables), seeds)
                try:
                    both = solve_both(formula, largest)
                    if everything is not None and bool(formula.holds(everything).any()) != both.directly.possible:
                        raise Disagreement("CaDiCaL and the list of all assignments disagree")
                except Disagreement as failure:
                    raise Disagreement(f"random_formula({variables}, {len(formula.clauses)}, seed={seeds}), "
                                       f"largest={largest}: {failure}") from failure
                count.instances += 1
                count.satisfiable += both.directly.found is not None
            count.seconds = time.process_time() - start
            yield count


def write_report(out: Path, counts: Sequence[Agreement], about: dict[str, str]) -> None:
    """agreement.json and agreement.md in the folder `out`."""
    write_json(out / "agreement.json", {**about, "counts": [asdict(count) for count in counts]})
    write_text(out / "agreement.md", markdown(counts, about))


def markdown(counts: Sequence[Agreement], about: dict[str, str]) -> str:
    total = sum(count.instances for count in counts)
    rows = [[weight_set(levels_up_to(count.largest)), str(count.variables), str(count.instances), str(count.satisfiable),
             str(count.instances - count.satisfiable), f"{count.seconds:.1f}"] for count in counts]
    header = ("weights", "variables", "formulas", "satisfiable and separable", "neither", "CPU s")
    lines = ["# Satisfiable if and only if separable, checked", "", table(header, rows), "",
             f"{total} random 3-CNF formulas, {RATIOS[0]:.2f} to {RATIOS[1]:.2f} clauses a variable. Each was decided "
             f"by CaDiCaL, by CP-SAT on its data set and, up to {MOST_LISTED} variables, by trying all assignments; each "
             "solution was carried over to the other side and verified there. Disagreements: 0 (the first would have "
             "stopped the run).", "", described(about), ""]
    return "\n".join(lines)
