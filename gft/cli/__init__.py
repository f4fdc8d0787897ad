"""The command line: gft demo | recipes | train | eval | generate | reproduce | report | bench | data | energy |
hardness.

Errors a user can mend are one sentence on stderr and exit code 2; anything else is ours and keeps its traceback.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.table import Table

    from gft.cli import energy, hardness
    from gft.lab import bench as benchmarks
    from gft.lab import data as datasets
    from gft.lab import demo as demonstration
    from gft.lab import generate as writing
    from gft.lab import report, tables, train
    from gft.lab.display import Bars, console
    from gft.lab.recipes import RECIPES, find
except ModuleNotFoundError as missing:  # the library alone is installed
    sys.exit(f"the gft command needs {missing.name}; install it with: pip install 'gft-torch[lab]'")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Train networks whose weights are 2-4-bit integers, and stay so while they train.")
data_app = typer.Typer(no_args_is_help=True, help="Find or fetch the data sets.")
app.add_typer(data_app, name="data")
app.add_typer(energy.app, name="energy")
app.add_typer(hardness.app, name="hardness")

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the recipe; repeatable.")]


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Where the run folder is made.")] = Path("runs"),
         seed: int = 0) -> None:
    """Train three networks on embedded data, side by side. No download, about a minute."""
    demonstration.demo(out, seed)


@app.command()
def recipes(as_json: Annotated[bool, typer.Option("--json", help="All fields, for programs.")] = False) -> None:
    """List every experiment that can be trained."""
    if as_json:
        print(json.dumps([dataclasses.asdict(recipe) for recipe in RECIPES.values()], indent=1))
        return
    table = Table()
    for name in ("recipe", "paper", "quantize", "rule", "votes", "steps"):
        table.add_column(name, no_wrap=True)
    for recipe in RECIPES.values():
        if recipe.quantize == "none":
            how = "–", "–"
        else:
            how = (recipe.rule, recipe.vote) if recipe.method == "gft" else (recipe.method, "–")
        table.add_row(recipe.name, "–" if recipe.paper is None else f"{recipe.paper:g}", recipe.quantize, *how,
                      str(recipe.steps))
    console.print(table)


@app.command("train")
def train_command(recipe: str, steps: int | None = None, seed: int = 0, device: Device = "auto",
                  out: Annotated[Path | None, typer.Option(help="Run folder; runs/RECIPE-seed-S if not given.")] = None,
                  resume: Annotated[bool, typer.Option(help="Go on with the run in the folder.")] = False,
                  checkpoint_every: Annotated[int | None, typer.Option(min=1, help="Steps; else once a minute.")] = None,
                  tensorboard: bool = True, settings: Settings = []) -> None:  # noqa: B006  (typer copies it)
    """Train one recipe."""
    chosen = find(recipe).changed(settings + ([] if steps is None else [f"steps={steps}"]))
    out = out or Path("runs") / f"{recipe}-seed-{seed}"
    result = None
    with Bars() as bars:
        for told in train.training(chosen, out, seed=seed, device=device, resume=resume, tensorboard=tensorboard,
                                   checkpoint_every=checkpoint_every):
            bars.show(recipe, told)
            result = told.result
    assert result is not None
    against = "" if result["paper"] is None else f" (paper: {result['paper']:g})"
    console.print(f"{result['metric']} {result['value']:.4g}{against} on the {result['split']} split after "
                  f"{result['steps']} steps, {result['wall_s']:.1f} s. Everything is in {out}")


@app.command("eval")
def evaluate(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
             split: Annotated[str, typer.Option(help="train, val or test.")] = "val", device: Device = "auto") -> None:
    """Evaluate a trained run from its checkpoint."""
    value, recipe = train.evaluate_run(folder, split, device)
    console.print(f"{recipe.name}: {recipe.metric} {value:.4g} on the {split} split")


@app.command()
def generate(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder of a gpt recipe.")],
             prompt: Annotated[str, typer.Option(help="What the text goes on from.")] = "\n", length: int = 500,
             temperature: Annotated[float, typer.Option(help="0: always the likeliest; 1: the model's own spread.")] = 0.8,
             top_k: Annotated[int, typer.Option(help="Draw from so many of the likeliest.")] = 20, seed: int = 0,
             device: Device = "auto") -> None:
    """Let a trained GPT write, and print as it goes."""
    characters = writing.generate(folder, prompt, length=length, temperature=temperature, top_k=top_k, seed=seed,
                                  device=device)
    print(prompt, end="", flush=True)
    for character in characters:
        print(character, end="", flush=True)
    print()


@app.command()
def reproduce(names: Annotated[list[str], typer.Argument(metavar="TABLE",
                                                         help=" | ".join([*tables.TITLES, "samples", "all"]))],
              seeds: Annotated[int, typer.Option(min=1)] = 5,
              rows: Annotated[list[str], typer.Option(help="Only recipes whose name contains this; repeatable.")] = [],  # noqa: B006
              paper: Annotated[bool, typer.Option("--paper", help="Train by the paper's own rule, gft.PAPER.")] = False,
              packed: Annotated[bool, typer.Option("--packed", help="Without memory: packed levels and no state.")] = False,
              out: Annotated[Path, typer.Option(help="Where the tables' folders are made.")] = Path("runs/reproduce"),
              jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each a process.")] = 1,
              device: Device = "auto", settings: Settings = []) -> None:  # noqa: B006
    """Run tables of the paper with several seeds, all in one queue; a stopped table goes on where it was."""
    if paper and packed:
        raise ValueError("--paper and --packed are two variants of a table; ask for one at a time")
    if names == ["samples"]:
        console.print(f"Written: {tables.samples(out / 'shakespeare-gpt', device=device, settings=settings)}")
        return
    variant = "paper" if paper else "packed" if packed else "default"
    folders = {name: out / (name if variant == "default" else f"{name}-{variant}")
               for name in (tables.TITLES if names == ["all"] else names)}
    written = tables.reproduce(folders, seeds=seeds, variant=variant, rows=rows, settings=settings, device=device, jobs=jobs)
    for name, lines in written.items():
        show_table(folders[name], lines)


@app.command("report")
def report_command(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A table's folder.")]) -> None:
    """Write a table anew from the runs that are finished, without running any."""
    show_table(folder, tables.write_table(folder))


def show_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    console.print(report.terminal_table(folder.name, rows))
    console.print(f"Written: {folder}/table.md, table.json, runs.jsonl, curves.png, curves.svg")


@app.command()
def bench(only: Annotated[list[str], typer.Option(help=" | ".join(benchmarks.BENCHMARKS) + "; repeatable. All but "
                                                  f"{' and '.join(benchmarks.LONG)} if not given.")] = [],  # noqa: B006
          small: Annotated[bool, typer.Option("--small", help="Tiny sizes: does it run at all.")] = False,
          out: Annotated[Path, typer.Option(help="Rows are appended here, plots written beside.")] = Path("runs/bench.csv"),
          device: Device = "auto") -> None:
    """Measure our kernels, training steps and memory beside their peers."""
    on = train.resolve_device(device)
    unknown = [name for name in only if name not in benchmarks.BENCHMARKS]
    if unknown:
        raise ValueError(f"--only {unknown[0]}: choose one of {', '.join(benchmarks.BENCHMARKS)}")
    for name in only or [name for name in benchmarks.BENCHMARKS if name not in benchmarks.LONG]:
        console.print(f"{name} …")
        plots = {"files": [out.with_name(f"{name}.{kind}") for kind in ("png", "svg")]} if name == "growth" else {}
        rows = []
        for row in benchmarks.BENCHMARKS[name](on, small=small, **plots):
            benchmarks.append([row], out, on)  # at once: a benchmark that is stopped has not been in vain
            rows.append(dataclasses.asdict(row))
        console.print(report.bench_table(name, rows))
        for file in plots.get("files", ()):
            console.print(f"Written: {file}")
    console.print(f"Appended to {out}")


@data_app.command("list")
def data_list() -> None:
    """Say where data is looked for and what is there."""
    console.print(f"Data folder: {datasets.data_folder()} (set GFT_DATA to change it)", soft_wrap=True)
    for name in datasets.names:
        place = datasets.found(name)
        console.print(f"  {name:14s} {f'in {place}' if place else f'missing; run: gft data fetch {name}'}", soft_wrap=True)


@data_app.command("fetch")
def data_fetch(name: Annotated[str, typer.Argument(help=" | ".join(datasets.names))] = "mnist") -> None:
    """Find a data set, or download it with its checksums."""
    console.print(f"{name} is in {datasets.fetch(name)}", soft_wrap=True)


def main() -> None:
    import torch

    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it; no effect on the CPU or on integer votes
    try:
        app(standalone_mode=True)
    except (ValueError, TypeError, FileNotFoundError, PermissionError) as error:
        # Our own checks speak in sentences. A traceback helps only where the message is not ours.
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

