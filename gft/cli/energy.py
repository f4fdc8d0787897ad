"""gft energy: the paper's accounting held against our models, and joules by the machine's own counters. table | measure."""

from pathlib import Path
from typing import Annotated

import typer

from gft.files import make_folder
from gft.lab import energy
from gft.lab.display import console, say, show_sheets
from gft.lab.energy import sheets
from gft.lab.energy.table import SLIPS, estimates
from gft.lab.energy.trials import Plan
from gft.lab.energy.trials import measure as measure_side_by_side
from gft.lab.provenance import command_line
from gft.lab.recipes import find
from gft.lab.runs import resolve_device

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Energy: estimated as the paper does, and measured.")

Node = Annotated[str, typer.Option(help=f"Chip technology of the estimate: {' or '.join(energy.NODES)}.")]


@app.command()
def table(node: Node = "7nm",
          precision: Annotated[str, typer.Option(help="Of the matrix products: fp32, bf16, fp16 or int8.")] = "fp32",
          runs: Annotated[list[Path], typer.Option(help="A table's folder, for the weight updates its runs counted; "
                                                        "repeatable.")] = [],  # noqa: B006
          out: Annotated[Path | None, typer.Option(help="Folder for energy.md and energy.json.")] = None) -> None:
    """The columns FP32 params, Updates, Bits and Energy of the paper's tables beside ours, and the whole step's energy."""
    if out is not None:
        make_folder(out)
    made = estimates(node, precision, runs)
    show_sheets(*made.columns)
    console.print(sheets.MARKS_EXPLAINED, "")
    show_sheets(*made.whole)
    console.print(made.assumed, "")
    show_sheets(*made.flips)
    say("\n".join(["The paper's slips:", *(f"- {slip}" for slip in SLIPS)]))
    if out is not None:
        made.write(out, command_line("gft energy table", node=node, precision=precision, runs=runs, out=out))
        say(f"Written: {out}/energy.md, energy.json")


@app.command()
def measure(recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="One or more, to compare in one run.")],
            steps: Annotated[int, typer.Option(min=1, help="In a window. A window should last some seconds.")] = 200,
            repeats: Annotated[int, typer.Option(min=1, help="Windows a recipe; with --full, runs, a seed each.")] = 5,
            warmup: Annotated[int, typer.Option(min=1, help="Steps before the first window.")] = 20,
            full: Annotated[bool, typer.Option("--full", help="Train to the end, and say how well it went.")] = False,
            idle: Annotated[float, typer.Option(min=0, help="Seconds to measure the idle power; 0: leave it.")] = 5.0,
            seed: int = 0, node: Node = "7nm", device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
            settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="As in gft train.")] = [],  # noqa: B006
            out: Annotated[Path, typer.Option(help="Folder for measured.md and .json.")] = Path("runs/energy")) -> None:
    """Measure the joules of training steps by the machine's own counters, beside the estimates."""
    chosen = [find(name).changed(settings) for name in dict.fromkeys(recipes)]
    asked = command_line("gft energy measure", *recipes, steps=None if full else steps, repeats=repeats, warmup=warmup,
                         full=full, idle=idle, seed=seed, node=node, device=device, set=settings, out=out)
    plan = Plan(steps, repeats, warmup, full, idle, seed, node)
    show_sheets(measure_side_by_side(chosen, plan, resolve_device(device), out, asked))
    say(f"Written: {out}/measured.md, measured.json")
