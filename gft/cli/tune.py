"""gft tune: settings for the rows of wiki-ladder, chosen on the validation split."""

from pathlib import Path
from typing import Annotated

import typer

from gft.lab.display import say
from gft.lab.ladder import SIZES, TABLE, tuning


def tune(rows: Annotated[list[str], typer.Option(help="Of wiki-ladder, as adamw or gft-2bit; repeatable.")] =
         list(tuning.TUNED),  # noqa: B006
         sizes: Annotated[list[str], typer.Option(help=" | ".join(SIZES) + "; repeatable.")] = list(tuning.AT),  # noqa: B006
         tries: Annotated[list[str], typer.Option("--try", metavar="KEY=VALUE,VALUE", help="An axis of the grid, as "
                          "lr=1e-3,2e-3 (the row's own lr) or blocks=1,0.25 (the blocks' share of it); repeatable. "
                          "If none is given, four or five rates, for floats with two shares and two weight decays.")] = [],  # noqa: B006
         out: Annotated[Path, typer.Option(help="As of gft reproduce.")] = Path("runs/reproduce"),
         jobs: Annotated[int, typer.Option(min=1, help="Runs in parallel, each in a process.")] = 1,
         device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
         settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Of all runs, as tokens=20e6.")] =
         []) -> None:  # noqa: B006
    """Choose rates and weight decays for wiki-ladder on val.

    Every setting of the grid is trained once. What is chosen goes to OUT/wiki-ladder/tuned.json, from where gft reproduce
    wiki-ladder takes it.
    """
    report = tuning.tune(out, rows, sizes, tries, settings, device, jobs)
    for row, by_size in report["chosen"].items():
        for size, best in by_size.items():
            settings_of = ", ".join(f"{key}={value:g}" for key, value in best["settings"].items())
            beyond = best["at_the_end_of_the_grid"]
            more = f"; {' and '.join(beyond)} at the end of what was tried: try more" if beyond else ""
            say(f"{size} {row}: {settings_of} (val {best['val']:.4f}, best of {best['tried']}{more})")
    for error in report["diverged"]:
        say(f"Stopped: {error}")
    say(f"Written: {out / TABLE / 'tuned.json'}")
