"""Reproducing tables of the paper: every row with several seeds, resumably, several runs at a time if asked.

Each run has its folder OUT/RECIPE/seed-S, and once finished a line in OUT/runs.jsonl with its settings, result and
validation curve. A run that has its line is not run again, one that has a checkpoint goes on from it; so a stopped table
continues, one more seed costs one more seed, and lines made on another machine can be added to the file. A run that cannot
go on (its loss became NaN, say) does not keep the others from their results.
"""

import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gft.errors import UsageError
from gft.files import FolderLock, write_text
from gft.lab import convolutions, ladder, older, report, stopping, train
from gft.lab.convolutions import sheet as of_convolutions
from gft.lab.display import watch, watching
from gft.lab.generate import sample_of
from gft.lab.ladder import sheet
from gft.lab.recipe import IN_OLDER, Recipe, dotted
from gft.lab.recipes import RECIPES, VARIANTS, variant_of
from gft.lab.records import checked_result, read_json_lines, read_object, read_result, write_json, write_lines
from gft.lab.runs import TrainingError, resolve_device
from gft.lab.stopping import Stopped, stoppable

TITLES = {
    "mnist-dnn": "DNN on MNIST (paper, Table 1)",
    "shakespeare-gpt": "nanoGPT on Tiny Shakespeare (paper, Table 2)",
    "mnist-vit": "ViT on MNIST (paper, Table 3)",
    "imagenette-vit": "ViT on Imagenette (paper, Table 3)",
    "depth": "Ternary DNN on MNIST by depth (paper, Table 6)",
    "baselines": "Ways to train the hidden layers of a DNN on MNIST, 5×1024",
    ladder.TABLE: "Llamas of 10M to 1B weights on English Wikipedia",
    convolutions.TABLE: "ResNet-18 on Imagenette and a convolutional net on MNIST, beside tuned floats",
}
CHOSEN = {ladder.TABLE: ladder, convolutions.TABLE: convolutions}  # with settings that `gft tune` chooses
COMPARISONS = ("baselines", *CHOSEN)  # they have the variants beside each other
SEEDS = 5  # runs a row, unless a table says otherwise
SUBTITLES = {"default": "", "paper": ", the paper's own rule", "packed": ", without memory: packed levels and no state"}
# The paper's figure of generated text shows these three; their checkpoints are kept.
SAMPLED = ("shakespeare-gpt-fp", "shakespeare-gpt-hybrid1-4bit", "shakespeare-gpt-hybrid1-2bit")

START = "spawn"  # of workers: CUDA does not survive a fork
MASKS = hasattr(signal, "pthread_sigmask")  # not on Windows
SECONDS_TO_SAVE = 30.0  # that runs are given when a table is stopped
Run = tuple[Recipe, int, Path]
Event = tuple[str, train.Progress | TrainingError]  # of which run, and why it stopped if it did
Line = dict[str, Any]


def recipes_of(table: str, variant: str = "default", rows: Sequence[str] = ()) -> list[Recipe]:
    """The recipes of a table in one variant; `rows` keeps only names that contain one of its words, or are it where it
    is a whole name. Comparisons come with the variants beside each other."""
    if table not in TITLES:
        raise UsageError(f"no table {table!r}; choose one of {', '.join(TITLES)}")
    if variant not in VARIANTS:
        raise UsageError(f"no variant {variant!r}; choose one of {', '.join(VARIANTS)}")
    together = table in COMPARISONS and variant == "default"
    return [recipe for recipe in RECIPES.values() if recipe.table == table
            and (together or variant_of(recipe.name) == variant)
            and (not rows or any(row == recipe.name if row in RECIPES else row in recipe.name for row in rows))]


def folders_of(tables: Sequence[str], variant: str, out: Path) -> dict[str, Path]:
    """Where each table goes in the folder `out`; ["all"] are all of them but those that are nothing without `gft tune`
    before them, of which the ladder takes a day, too."""
    every = [name for name in TITLES if name not in CHOSEN]
    return {name: out / (name if variant == "default" else f"{name}-{variant}")
            for name in (every if list(tables) == ["all"] else tables)}


def as_run(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe as its table's command runs it: some take settings chosen on val from the table's folder."""
    return CHOSEN[recipe.table].as_reported(recipe, folder) if recipe.table in CHOSEN else recipe


def seeds_of(recipe: Recipe, seeds: int | None) -> int:
    """How many runs a row has."""
    return seeds or (CHOSEN[recipe.table].seeds_of(recipe) if recipe.table in CHOSEN else SEEDS)


def reproduce(folders: Mapping[str, Path],  # of each table
              *, seeds: int | None = None, variant: str = "default", rows: Sequence[str] = (), settings: Sequence[str] = (),
              device: str = "auto", jobs: int = 1) -> dict[str, list[Line]]:
    """Run what is missing of some tables, all in one queue, and write each (`write_table`) beside its runs when it is whole.
    Tables without any of the `rows` are left alone."""
    wanted = {table: [as_run(recipe, folders[table]).changed(settings) for recipe in recipes_of(table, variant, rows)]
              for table in folders}
    wanted = {table: recipes for table, recipes in wanted.items() if recipes}
    if not wanted:
        raise UsageError(f"--rows {' '.join(rows)} names no row of {', '.join(folders)}; gft recipes lists them")
    resolve_device(device)
    options = " ".join([*([f"--seeds {seeds}"] if seeds else []), *([f"--{variant}"] if variant != "default" else []),
                        *(f"--rows {row}" for row in rows), *(f"--set {setting}" for setting in settings),
                        *([f"--jobs {jobs}"] if jobs > 1 else [])])
    with ExitStack() as held:
        for table in wanted:
            lock = FolderLock(folders[table], "wait for it to end, or give another --out")
            held.callback(lock.release)
        return _reproduce(wanted, folders, Asked(seeds, variant, options, device, jobs))


class Asked(NamedTuple):
    """How tables are to be run."""

    seeds: int | None  # None: as many as the table asks for
    variant: str
    options: str  # as they are typed
    device: str
    jobs: int


def _reproduce(wanted: Mapping[str, Sequence[Recipe]], folders: Mapping[str, Path], asked: Asked) -> dict[str, list[Line]]:
    seeds = asked.seeds
    finished = {table: read_lines(folders[table]) for table in wanted}
    missing = {table: missing_of(recipes, folders[table], finished[table], seeds) for table, recipes in wanted.items()}
    for table in wanted:
        command = f"gft reproduce {table} {asked.options}".strip()
        if {name for name, _ in finished[table]} - {recipe.name for recipe in wanted[table]}:
            command = _after_earlier(folders[table] / "about.json", command)
        write_json(folders[table] / "about.json", {"title": TITLES[table] + SUBTITLES[asked.variant], "command": command})
    written = {table: write_table(folders[table]) for table, left in missing.items() if not left}
    unfinished, stopped = {table: len(left) for table, left in missing.items()}, []
    total = sum(seeds_of(recipe, seeds) for recipes in wanted.values() for recipe in recipes)
    for result in _outcomes([run for left in missing.values() for run in left], total, asked.device, asked.jobs):
        if isinstance(result, TrainingError):
            stopped.append(result)
            continue
        unfinished[result["table"]] -= 1
        if not unfinished[result["table"]]:
            written[result["table"]] = write_table(folders[result["table"]])
    if stopped:
        for table in wanted.keys() - written.keys():
            if read_lines(folders[table]):
                write_table(folders[table])
        raise TrainingError(f"{len(stopped)} of {total} runs stopped and the others are done; the first is {stopped[0]}")
    return {table: written[table] for table in wanted}


def _after_earlier(about: Path, command: str) -> str:
    """What makes a table that keeps rows which this command does not name: those that made them, then this one. How many run
    side by side makes no other command."""
    if not about.exists():
        return command
    earlier = read_object(about, {"command": "text"})["command"]
    is_there = _whatever_jobs(command) in map(_whatever_jobs, earlier.split(" && "))
    return earlier if is_there else f"{earlier} && {command}"


def _whatever_jobs(command: str) -> str:
    return re.sub(r" --jobs \d+", "", command)


def missing_of(recipes: Sequence[Recipe], folder: Path, lines: Mapping[tuple[str, int], Line],
               seeds: int | None) -> list[Run]:
    """The runs of a table that have no line yet, the first seed of all rows first."""
    most = {recipe.name: seeds_of(recipe, seeds) for recipe in recipes}
    return [(recipe, seed, folder / recipe.name / f"seed-{seed}") for seed in range(max(most.values(), default=0))
            for recipe in recipes if seed < most[recipe.name] and not has_line(lines, recipe, seed)]


def run_missing(recipes: Sequence[Recipe], folder: Path, device: str = "auto", jobs: int = 1) -> list[Line | TrainingError]:
    """Run recipes once each, with seed 0, unless the folder has their lines: what came of those that were run."""
    resolve_device(device)
    missing = missing_of(recipes, folder, read_lines(folder), 1)
    return list(_outcomes(missing, len(recipes), device, jobs))


def read_lines(out: Path) -> dict[tuple[str, int], Line]:
    """(recipe, seed) -> its line: those of runs.jsonl, and of every run folder that has its result."""
    lines = {}
    if (out / "runs.jsonl").exists():
        for number, line in enumerate(read_json_lines(out / "runs.jsonl"), 1):
            line = checked_result(line, f"{out / 'runs.jsonl'}, line {number}")
            lines[line["recipe"], line["seed"]] = line
    for file in sorted(out.glob("*/seed-*/result.json")):
        result = read_result(file)
        lines[result["recipe"], result["seed"]] = {**result, "curve": report.validation_curve(file.parent)}
    return lines


def has_line(lines: Mapping[tuple[str, int], Line], recipe: Recipe, seed: int) -> bool:
    """Is this run finished, with these very settings? Those of integers do not count where there are none."""
    config = lines.get((recipe.name, seed), {}).get("config")
    if config is None:  # not there, or of a time when runs did not keep their settings
        return False
    had, wanted = {**IN_OLDER, **dotted(older.in_parts(config))}, dotted(recipe.config())
    counts = [key for key in wanted if recipe.integers.layers != "none" or not key.startswith("integers.")]
    return all(had[key] == wanted[key] for key in counts)


def write_table(out: Path) -> list[Line]:
    """table.md, table.json, runs.jsonl and curves.{png,svg} from every finished run in the folder of a table."""
    if not (out / "about.json").exists():
        raise UsageError(f"{out} is not the folder of a table (it has no about.json); give one that gft reproduce made")
    about = read_object(out / "about.json", {"title": "text", "command": "text"})
    order = {name: place for place, name in enumerate(RECIPES)}
    lines = sorted(read_lines(out).values(), key=lambda line: (order.get(line["recipe"], len(order)), line["seed"]))
    if not lines:
        raise UsageError(f"no run in {out} is finished yet; go on with: {about['command']}")
    rows = report.table_rows(lines, about["command"])
    if rows[0]["table"] == ladder.TABLE:
        rows = sheet.ladder_rows(rows, lines)
    elif rows[0]["table"] == convolutions.TABLE:
        rows = of_convolutions.convolution_rows(rows, lines, out)
    write_json(out / "table.json", {"title": about["title"], "rows": rows})
    write_text(out / "table.md", report.markdown(about["title"], rows))
    write_lines(out / "runs.jsonl", lines)
    curves = {row["name"]: [line["curve"] for line in lines if line["recipe"] == row["recipe"] and line.get("curve")]
              for row in rows}
    drawn = {name: seeds for name, seeds in curves.items() if seeds}
    if rows[0]["table"] == ladder.TABLE:
        sheet.draw(rows, lines, out)
    elif rows[0]["table"] == convolutions.TABLE:
        of_convolutions.draw(rows, lines, out)
    elif drawn:
        report.plot_curves(drawn, about["title"], rows[0]["metric"], [out / "curves.png", out / "curves.svg"])
    return rows


def samples(out: Path, *, device: str = "auto", settings: Sequence[str] = ()) -> Path:
    """The paper's figure of generated text: train the three models it shows, if need be, and let each write.

    `out` is the folder of the table shakespeare-gpt: runs it kept a checkpoint of are used as they are.
    """
    texts = []
    for name in SAMPLED:
        recipe = RECIPES[name].changed(settings)
        folder = out / name / "seed-0"
        value = watch(name, train.training(recipe, folder, device=device, resume=True))["value"]
        texts.append(f"## {recipe.row} (validation loss {value:.3f})\n\n```\n{sample_of(folder, device)}\n```\n")
    file = out / "samples.md"
    write_text(file, "# Text by three nanoGPT models (paper, Figure 3)\n\n`gft reproduce samples`: 500 characters "
               "after an empty line, temperature 0.8, the 20 likeliest characters, seed 0.\n\n" + "\n".join(texts))
    return file


# ---------------------------------------------------------------------------------------------------- running the runs


def _outcomes(missing: Sequence[Run], total: int, device: str, jobs: int) -> Iterator[Line | TrainingError]:
    """Each run's result as soon as it has one, or why it stopped, with progress shown on the way."""
    done = total - len(missing)
    try:
        with watching() as shown:
            shown.add("all runs", total, done=done)
            for name, event in (_in_turn(missing, device) if jobs == 1 else _side_by_side(missing, device, jobs)):
                if isinstance(event, TrainingError):
                    shown.done(name)
                    yield TrainingError(f"{name}: {event}")
                    continue
                shown.show(name, event)
                if event.result is not None:
                    done += 1
                    shown.done(name)
                    shown.advance("all runs")
                    yield event.result
    except Stopped as stop:
        said = f"{done} of {total} runs are done and the others saved; the same command goes on"
        raise Stopped(stop.number, said) from None


def _name_of(run: Run) -> str:
    return f"{run[0].name} seed {run[1]}"


def _events(run: Run, device: str) -> Iterator[Event]:
    recipe, seed, folder = run
    keep = recipe.name in SAMPLED and seed == 0
    try:
        for progress in train.training(recipe, folder, seed=seed, device=device, resume=True, keep_checkpoint=keep):
            yield _name_of(run), progress
    except TrainingError as error:
        yield _name_of(run), error


def _in_turn(missing: Sequence[Run], device: str) -> Iterator[Event]:
    for run in missing:
        yield from _events(run, device)


def _side_by_side(missing: Sequence[Run], device: str, jobs: int) -> Iterator[Event]:
    """Several processes at once: small networks leave a GPU waiting for the host between kernels. A process for each run:
    what torch.compile made for one then serves the others, and one that is killed takes no other with it."""
    for recipe in {run[0].data: run[0] for run in missing}.values():
        train.data_of(recipe)  # tokens and images are prepared once, not by each process
    context = multiprocessing.get_context(START)
    threads = max(1, multiprocessing.cpu_count() // jobs)
    waiting, working = list(missing), {}
    if START == "spawn" and MASKS:
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # first of all: when it starts, it lets the signals through that are held here
    try:
        while waiting or working:
            while waiting and len(working) < jobs:
                ours, theirs = context.Pipe(duplex=False)
                run = waiting.pop(0)
                worker = context.Process(target=_work, args=(run, device, theirs, threads), name=_name_of(run))
                with _starting():
                    worker.start()
                    working[ours] = worker
                    theirs.close()  # so that the worker's end is the only one, and closes with it
            for ready in multiprocessing.connection.wait(list(working)):
                assert isinstance(ready, multiprocessing.connection.Connection)
                worker = working[ready]
                try:
                    event = ready.recv()
                except EOFError:  # it has closed its end: all is said, or it was killed
                    del working[ready]
                    ready.close()
                    worker.join()
                    if worker.exitcode:
                        yield worker.name, TrainingError(f"its process {_ended(worker.exitcode)}; the same command goes on "
                                                         "from its last checkpoint")
                    continue
                if isinstance(event, UsageError) and not isinstance(event, TrainingError):
                    raise event
                yield worker.name, event
    finally:
        _end(working.values())


@contextmanager
def _starting() -> Iterator[None]:
    """For the time that a worker is started. A signal that comes meanwhile waits, or a worker that nobody knows of would be
    left at work. A Ctrl-C is for the table, which then stops its workers: they begin with it blocked, then ignore it."""
    with stopping.held():
        masks = MASKS and threading.current_thread() is threading.main_thread()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if masks else set()
        try:
            yield
        finally:
            if masks:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(code: int) -> str:
    """What an exit code says of a process's end."""
    if code - 128 in stopping.CAUGHT:
        return f"was stopped by {signal.Signals(code - 128).name}"
    if code >= 0:
        return f"ended with exit code {code}, for the reason printed above"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (for want of memory, perhaps)" if name == "SIGKILL" else "")


def _end(workers: Iterable[Any]) -> None:
    """Have workers save and stop, and kill those that take too long."""
    workers = list(workers)
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + SECONDS_TO_SAVE
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def _work(run: Run, device: str, events: Any, threads: int) -> None:
    """A worker: trains one run, and sends what comes of it. A signal, or the end of the table's own process, makes it save
    and stop: whoever starts the table again should not find it at work."""
    import torch

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what has come since `_starting` is dropped by this
    if MASKS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with stoppable():
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        try:
            for _, event in _events(run, device):
                if isinstance(event, TrainingError) or event.loss is not None or event.result is not None:
                    events.send(event)
        except UsageError as error:
            events.send(error)
        except (Stopped, BrokenPipeError) as stop:
            sys.exit(stop.exit_code if isinstance(stop, Stopped) else 1)


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
