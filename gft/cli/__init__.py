"""The command line: gft demo | recipes | train | eval | generate | reproduce | tune | report | bench | data | export |
finetune | energy | hardness.

An error that a user can mend (UsageError) is one sentence on stderr and exit code 2; any other is a bug and keeps its
traceback. A signal that stops a training is one line too, and exit code 128 + its number.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import gft
from gft.errors import UsageError, install_hint

try:
    import typer

    from gft.cli import energy, hardness
    from gft.cli import export as exporting
    from gft.cli.finetune import finetune
    from gft.cli.tune import tune
    from gft.lab import bench as benchmarks
    from gft.lab import data as datasets
    from gft.lab import demo as demonstration
    from gft.lab import generate as writing
    from gft.lab import pages, report, tables, train
    from gft.lab.bench.run import run as run_benchmarks
    from gft.lab.display import say, show, watch
    from gft.lab.plain import printable
    from gft.lab.recipe import settings_help
    from gft.lab.recipes import find, listed
    from gft.lab.runs import resolve_device
    from gft.lab.stopping import Stopped, stoppable
except ModuleNotFoundError as missing:  # the library alone is installed
    sys.exit(f"the gft command needs {missing.name}; install it with: {install_hint('lab')}")

# Plain help: boxes leave long options and their help too little room.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
                  help="Train neural networks whose weights are 2- to 4-bit integers, from the first step to the last.",
                  epilog="Begin with gft demo, then gft recipes. gft COMMAND --help says more.")
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Find or download the data sets.")
app.add_typer(data_app, name="data")
app.add_typer(energy.app, name="energy")
app.add_typer(hardness.app, name="hardness")

Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")]
Seed = Annotated[int, typer.Option(min=0, help="Of all random numbers.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe, like "
                                             "integers.lr=0.2 or width=64; repeatable. gft train --help lists them.")]
SETTINGS = f"""\b
Settings for --set, by part: PART.NAME=VALUE, or NAME=VALUE if only one has it
{settings_help()}
"""


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"gft {gft.__version__}")
        raise typer.Exit


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True,
                                                  help="Show the version and exit.")] = False) -> None:
    """What can be asked without a command."""


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Where the run folder is made.")] = Path("runs"),
         seed: Seed = 0) -> None:
    """Train three small networks: no download, about a minute."""
    with stoppable():
        demonstration.demo(out, seed)


@app.command()
def recipes(words: Annotated[list[str], typer.Argument(metavar="[WORD]...", help="Only names that contain these.")] = [],  # noqa: B006
            as_json: Annotated[bool, typer.Option("--json", help="All settings, for programs.")] = False) -> None:
    """List the recipes: what can be trained, no download first."""
    chosen = listed(words)
    if as_json:
        print(json.dumps([recipe.config() for recipe in chosen], indent=1))
    else:
        print(*report.recipe_lines(chosen), sep="\n")


@app.command("train", epilog=SETTINGS)
def train_command(recipe: Annotated[str, typer.Argument(help="One of gft recipes.")],
                  steps: Annotated[int | None, typer.Option(help="Training steps, if not the recipe's.")] = None,
                  seed: Seed = 0, device: Device = "auto",
                  out: Annotated[Path | None, typer.Option(help="Run folder; runs/RECIPE-seed-S if not given.")] = None,
                  resume: Annotated[bool, typer.Option(help="Continue the run in the folder from its checkpoint.")] = False,
                  checkpoint_every: Annotated[int | None, typer.Option(min=1, help="Steps; by default a minute.")] = None,
                  tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard files.")] = True,
                  deterministic: Annotated[bool, typer.Option("--deterministic", help="The same bits each time, on a GPU "
                                                              "too; slower there.")] = False,
                  settings: Settings = []) -> None:  # noqa: B006  (typer copies it)
    """Train a recipe: a network, its data and its settings."""
    chosen = find(recipe).changed(settings + ([] if steps is None else [f"schedule.steps={steps}"])
                                  + (["model.deterministic=true"] if deterministic else []))
    out = out or Path("runs") / f"{recipe}-seed-{seed}"
    run = train.training(chosen, out, seed=seed, device=device, resume=resume, tensorboard=tensorboard,
                         checkpoint_every=checkpoint_every)
    with stoppable():
        result = watch(recipe, run)
    say(f"{report.sentence(result)} Everything is in {out}")


@app.command("eval")
def evaluate(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
             split: Annotated[str, typer.Option(help="train, val or test.")] = "val", device: Device = "auto") -> None:
    """Evaluate the checkpoint of a trained run."""
    value, recipe = train.evaluate_run(folder, split, device)
    say(f"{recipe.name}: {recipe.metric} {value:.4g} on the {split} split")


@app.command()
def generate(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder of a gpt recipe.")],
             prompt: Annotated[str, typer.Option(help="The text to continue.")] = "\n",
             length: Annotated[int, typer.Option(help="Characters to generate.")] = 500,
             temperature: Annotated[float, typer.Option(help="0: greedy; 1: the model's own distribution.")] = 0.8,
             top_k: Annotated[int, typer.Option(help="Sample from the k likeliest characters.")] = 20, seed: Seed = 0,
             device: Device = "auto") -> None:
    """Generate text with a trained GPT."""
    characters = writing.generate(folder, prompt, length=length, temperature=temperature, top_k=top_k, seed=seed,
                                  device=device)
    print(printable(prompt), end="", flush=True)
    for character in characters:  # a text may have had anything in it, and so what is written after it
        print(printable(character), end="", flush=True)
    print()


@app.command("export")
def export_command(source: Annotated[str, typer.Argument(metavar="DIR_OR_MODEL",
                                                         help="A run folder, one that save_pretrained wrote, or the name "
                                                              "of a model on the Hugging Face hub.")],
                   to: Annotated[str, typer.Option(help=" | ".join(exporting.TARGETS))],
                   out: Annotated[Path, typer.Option(help="The file that is written; for hf and compressed-tensors, the "
                                                          "folder.")],
                   settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE",
                                                               help="A setting of the target, like ternary=TQ1_0; "
                                                                    "repeatable.")] = []) -> None:  # noqa: B006
    """Write a trained model for another runtime: llama.cpp, onnxruntime, transformers, torch.export."""
    say(f"Written: {exporting.export(source, to, out, settings)}")


@app.command()
def reproduce(names: Annotated[list[str], typer.Argument(metavar="TABLE",
                                                         help=" | ".join([*tables.TITLES, "samples", "all"]))],
              seeds: Annotated[int | None, typer.Option(min=1, help="Runs a row; 5 if not given, of wiki-ladder 3 up to 30M "
                                                        "and 1 beyond, of convolutions 2.")] = None,
              rows: Annotated[list[str], typer.Option(help="Only recipes whose name is or contains this; "
                                                        "repeatable.")] = [],  # noqa: B006
              paper: Annotated[bool, typer.Option("--paper", help="By the paper's own algorithm (gft.PAPER).")] = False,
              packed: Annotated[bool, typer.Option("--packed", help="With packed weights and no optimizer state.")] = False,
              out: Annotated[Path, typer.Option(help="Where the tables' folders are made.")] = Path("runs/reproduce"),
              jobs: Annotated[int, typer.Option(min=1, help="Runs in parallel, each in a process.")] = 1,
              device: Device = "auto", settings: Settings = []) -> None:  # noqa: B006
    """Reproduce tables of the paper, with several seeds.

    A table that was stopped continues where it was. wiki-ladder compares methods by size on real text, convolutions integers
    and tuned floats on images: gft tune chooses their settings first, and all leaves them out.
    """
    if paper and packed:
        raise UsageError("--paper and --packed are two variants of a table; ask for one at a time")
    if names == ["samples"]:
        with stoppable():
            file = tables.samples(out / "shakespeare-gpt", device=device, settings=settings)
        say(f"Written: {file}")
        return
    variant = "paper" if paper else "packed" if packed else "default"
    folders = tables.folders_of(names, variant, out)
    with stoppable():
        written = tables.reproduce(folders, seeds=seeds, variant=variant, rows=rows, settings=settings, device=device,
                                   jobs=jobs)
    for name, lines in written.items():
        show_table(folders[name], lines)


@app.command("report")
def report_command(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A table's folder.")]) -> None:
    """Write a table again from its finished runs."""
    show_table(folder, tables.write_table(folder))


def show_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    show(report.terminal_table(folder.name, rows))
    drawn = [file.name for file in sorted(folder.glob("*.png"))]
    say(f"Written: {folder}/{', '.join(['table.md', 'table.json', 'runs.jsonl', *drawn])}")


@app.command("pages")
def pages_command(check: Annotated[bool, typer.Option("--check", help="Only look; exit 1 if one is out of date.")] = False,
                  ) -> None:
    """Write the documentation's tables from results/."""
    seen = list(pages.update(check=check))
    for file, changed in seen:
        say(f"{file}: {'up to date' if not changed else 'out of date' if check else 'written'}")
    if check and any(changed for _, changed in seen):
        raise typer.Exit(1)


@app.command()
def bench(only: Annotated[list[str], typer.Option(help=" | ".join(benchmarks.BENCHMARKS) + "; repeatable. All but "
                                                  f"{' and '.join(benchmarks.LONG)} if not given.")] = [],  # noqa: B006
          case: Annotated[list[str], typer.Option(help="Of step only the rows whose names have this in them, as "
                                                  "'llama 12x768, 2 bit, eager'; repeatable.")] = [],  # noqa: B006
          small: Annotated[bool, typer.Option("--small", help="Tiny networks: only to see that it runs.")] = False,
          out: Annotated[Path, typer.Option(help="Rows are appended here, plots written beside.")] = Path("runs/bench.csv"),
          device: Device = "auto") -> None:
    """Benchmark kernels, steps and memory against AdamW."""
    for name, rows, plots in run_benchmarks(only, out, resolve_device(device), small, case):
        show(report.bench_table(name, rows, bars=not small))
        for file in plots:
            say(f"Written: {file}")
    say(f"Appended to {out}")


app.command()(finetune)
app.command()(tune)


@data_app.command("list")
def data_list() -> None:
    """Show where data is looked for and what is there."""
    say(f"Data folder: {datasets.data_folder()} (set GFT_DATA to change it)")
    for name in datasets.names:
        place = datasets.found(name)
        say(f"  {name:14s} {f'in {place}' if place else f'missing; run: gft data fetch {name}'}")


@data_app.command("fetch")
def data_fetch(name: Annotated[str, typer.Argument(help=" | ".join(datasets.names))] = "mnist") -> None:
    """Find a data set, or download it and check its checksum."""
    say(f"{name} is in {datasets.fetch(name)}")


def main() -> None:
    import torch

    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it; no effect on the CPU or on integer votes
    try:
        app(prog_name="gft", standalone_mode=True)
    except UsageError as error:
        print(f"error: {printable(str(error), lines=False)}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stop:
        print(printable(str(stop), lines=False), file=sys.stderr)
        sys.exit(stop.exit_code)

