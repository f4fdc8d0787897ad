"""gft tune: settings for the rows of a table, chosen on the validation split."""

from pathlib import Path
from typing import Annotated

import typer

from gft.lab.display import say
from gft.lab.tuning import LADDER, TUNINGS, tuning_of

SIZES = "; ".join(f"{name}: {' | '.join(one.sizes)}" for name, one in TUNINGS.items())
ROWS = "; ".join(f"{name}: {' and '.join(one.tuned)}" for name, one in TUNINGS.items())
AT = "; ".join(f"{name}: {'all' if tuple(one.at) == tuple(one.sizes) else ' and '.join(one.at)}"
               for name, one in TUNINGS.items())


def tune(table: Annotated[str, typer.Argument(metavar="TABLE", help=" | ".join(TUNINGS))] = LADDER.table,
         rows: Annotated[list[str], typer.Option(help=f"As adamw or gft-2bit; repeatable. If not given, {ROWS}.")] =
         [],  # noqa: B006
         sizes: Annotated[list[str], typer.Option(help=f"{SIZES}; repeatable. If not given, {AT}.")] = [],  # noqa: B006
         tries: Annotated[list[str], typer.Option("--try", metavar="KEY=VALUE,VALUE", help="An axis of the grid, as "
                          "lr=1e-3,2e-3 (the row's own lr), dense.weight_decay=0.1,0.3 or, of wiki-ladder, blocks=1,0.25 "
                          "(the blocks' share of lr); repeatable. If none is given, four or five rates, for floats with "
                          "two or three weight decays, of wiki-ladder with two shares, too.")] = [],  # noqa: B006
         out: Annotated[Path, typer.Option(help="As of gft reproduce.")] = Path("runs/reproduce"),
         jobs: Annotated[int, typer.Option(min=1, help="Runs in parallel, each in a process.")] = 1,
         device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
         settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Of all runs, as tokens=20e6 or "
                                                     "epochs=5.")] = []) -> None:  # noqa: B006
    """Choose rates and weight decays for a table's rows on val.

    Every setting of the grid is trained once. What is chosen goes to OUT/TABLE/tuned.json, from where gft reproduce TABLE
    takes it.
    """
    report = tuning_of(table).tune(out, rows, sizes, tries, settings, device, jobs)
    for row, by_size in report["chosen"].items():
        for size, best in by_size.items():
            settings_of = ", ".join(f"{key}={shown(value)}" for key, value in best["settings"].items())
            beyond = best["at_the_end_of_the_grid"]
            more = f"; {' and '.join(beyond)} at the end of what was tried: try more" if beyond else ""
            say(f"{size} {row}: {settings_of} (val {best['val']:.4f}, best of {best['tried']}{more})")
    for error in report["diverged"]:
        say(f"Stopped: {error}")
    say(f"Written: {out / table / 'tuned.json'}")


def shown(value: float | bool | str) -> str:
    """A setting as --set takes it."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
