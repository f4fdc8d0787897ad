"""gft finetune: a trained float network to 4, 3 and 2 bits, by every start and method."""

from pathlib import Path
from typing import Annotated

import typer

from gft.lab import finetune as lab
from gft.lab.display import say
from gft.lab.provenance import command_line
from gft.lab.runs import resolve_device


def finetune(data: Annotated[str, typer.Option(help="Images: imagenette-SIZE, mnist-images or digits-images.")] =
             "imagenette-32",
             bits: Annotated[list[int], typer.Option(help="Repeatable.")] = [2, 3, 4],  # noqa: B006
             width: Annotated[int, typer.Option(min=1, help="Channels of the first stage.")] = 64,
             float_steps: Annotated[int, typer.Option(min=1, help="Of the float network.")] = 1400,
             steps: Annotated[int, typer.Option(min=1, help="Of fine-tuning.")] = 234,
             seed: int = 0, device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
             out: Annotated[Path, typer.Option(help="CSV file to add rows to; trials that it has are left out.")] =
             Path("runs/finetune.csv")) -> None:
    """Fine-tune a trained float ResNet to few bits: starts, scales and rates of GFT beside straight-through training."""
    plan = lab.Plan(data=data, width=width, float_steps=float_steps, steps=steps, seed=seed)
    asked = command_line("gft finetune", data=data, bits=bits, width=width, **{"float-steps": float_steps}, steps=steps,
                         seed=seed, device=device, out=out)
    where = resolve_device(device)
    trials = list(dict.fromkeys(lab.group_that_fits(trial, width) for trial in lab.trials_of(tuple(bits))))
    done = lab.known(out, plan)
    trials = [trial for trial in trials if trial not in done]
    if not trials:
        say(f"All trials are in {out}")
        return
    for outcome in lab.study(plan, trials, where, say):
        lab.append([outcome], plan, out, where, asked)
