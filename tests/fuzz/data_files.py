"""Mutated data files, given to their readers: each gives a value, or our own error in one sentence, and nothing else.

    python tests/fuzz/data_files.py --inputs 1000000 --seed 0        # minutes; prints how many inputs each reader had
    python tests/fuzz/data_files.py --inputs 1000 --only npz         # one reader
    python tests/fuzz/data_files.py --memory                         # what reading takes, as a multiple of the file

An input is a valid file with some of it flipped, cut, repeated, spliced or put in its place out of a list of nasty numbers
and words. What is not a UsageError is printed with the input that made it, and the script exits with 1. An input that takes
more than SECONDS, or more memory than LIMIT above what the process has, counts as one, too.
"""

import argparse
import csv
import gzip
import io
import json
import lzma
import os
import random
import resource
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # the gft that this file lies beside

from gft.errors import UsageError
from gft.lab import finetune, ladder, recipes, report, runs, tables
from gft.lab.data import documents, mnist, pictures, text
from gft.lab.data.dataset import SPLITS
from gft.lab.hardness import cnf, reduction, study
from gft.lab.recipe import Recipe
from gft.lab.records import read_json_lines, read_result

SECONDS, LIMIT = 10, 2**30
NASTY = [struct.pack(code, number) for code in (">I", "<I", "<Q", ">Q", "<H") for number in
         (0, 1, 0x7FFF, 0xFFFF) if number >> 8 * struct.calcsize(code) == 0]
NASTY += [struct.pack(code, number) for code in (">I", "<I", "<Q") for number in (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)]
WORDS = [b"0", b"-1", b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"99999999999999999999", b"[" * 60,
         b"\xff\xfe", b"\0", b"\x1b[31m", b"\xe2\x80\xae",
         b"p cnf 9 9\n", b"-0 ", b"%\n", b"\r", b"\x0c", b"(1000000000,)", b"'<i8'", b"'|O'"]


@dataclass(frozen=True)
class Reader:
    """One kind of file: its name, valid ones, and what reads one."""

    file: str
    seeds: list[bytes]
    read: Callable[[Path], object]
    weight: int = 1  # how often it has a turn


# ---------------------------------------------------------------------------------------------------- valid files


def packed_zip(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def packed_tgz(files: dict[str, bytes], long_name: bool = False) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT if long_name else tarfile.GNU_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(("x" * 120 + "/" if long_name else "") + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def problem_file(largest: int | None) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        formula = cnf.Formula.of([(1, -2, 3), (2, -3), (-1,)])
        reduction.save_problem(reduction.reduce_formula(formula, largest), Path(folder) / "a.npz")
        return (Path(folder) / "a.npz").read_bytes()


BETWEEN = b"=====\n"


def unpacked_arrays(largest: int | None) -> bytes:
    """The arrays of such a file one after the other, for a mutation that gets past the checksums of the zip."""
    with zipfile.ZipFile(io.BytesIO(problem_file(largest))) as archive:
        return BETWEEN.join(archive.read(f"{name}.npy") for name in reduction.ARRAYS)


def a_result() -> dict[str, object]:
    config = recipes.find("digits-fp").config()
    return {"recipe": "digits-fp", "table": "digits", "row": "FP", "paper": None, "metric": "accuracy", "value": 97.5,
            "split": "val", "steps": 2, "fp32_params": 10, "quantized_params": 0, "bits": 32, "bits_total": 320,
            "bytes_per_weight": 4.0, "training_bytes_per_weight": 12.0, "updates_estimated": 20, "updates_actual": 20,
            "energy_estimate_j": 1e-6, "seed": 0, "wall_s": 0.5, "device": "cpu", "torch": "2", "commit": "a",
            "config": config}


# ---------------------------------------------------------------------------------------------------- readers


def read_config(path: Path) -> object:
    return Recipe.of(runs.read_config(path.parent))


def read_table(path: Path) -> object:
    """As `gft report` does, up to the drawing."""
    lines = list(tables.read_lines(path.parent).values())
    for line in lines:
        tables.has_line({(line["recipe"], line["seed"]): line}, recipes.find("digits-fp"), line["seed"])
    rows = report.table_rows(lines, "command")
    return report.markdown("title", rows) if rows else None


def read_problem(path: Path) -> object:
    return reduction.formula_of(reduction.load_problem(path))


def read_arrays(path: Path) -> object:
    arrays = path.read_bytes().split(BETWEEN)
    with zipfile.ZipFile(path.with_suffix(".npz"), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in zip(reduction.ARRAYS, arrays, strict=False):
            archive.writestr(f"{name}.npy", content)
    return read_problem(path.with_suffix(".npz"))


def read_formula(path: Path) -> object:
    return cnf.read_dimacs(path).cleaned()


def read_pictures(path: Path) -> object:
    names = pictures.picture_names(path)
    wanted = {name: np.zeros(0) for some in names.values() for name in some}
    return sum(len(content) for _, content in pictures._read(path, wanted))


def read_corpus(path: Path) -> object:
    files = documents.files_of(path)
    return sum(len(document) for split in SPLITS for document in files.of(split))


def read_chosen(path: Path) -> object:
    return ladder.as_reported(recipes.find("wiki-ladder-10m-gft-3bit"), path.parent)


def read_study(path: Path) -> object:
    """As `gft hardness report` does, up to the drawing; two files with BETWEEN between them."""
    kept, _, records = path.read_bytes().partition(BETWEEN)
    (path.parent / "study.json").write_bytes(kept)
    (path.parent / "runs.jsonl").write_bytes(records)
    about, lines = study.read_study(path.parent), study.read_records(path.parent)
    return study.markdown(study.summary(lines, about["fixed"]["seconds"]), about)


def read_trials(path: Path) -> object:
    return finetune.known(path, finetune.Plan())


def read_tgz(path: Path) -> object:
    """The mutated tar is packed here, so that most inputs reach beyond gzip's checksum."""
    target = path.with_suffix(".tgz")
    target.write_bytes(gzip.compress(path.read_bytes(), 1))
    return read_pictures(target)


PICTURES = {"train/n01/a.png": b"\x89PNG" + bytes(40), "val/n01/b.JPEG": b"\xff\xd8" + bytes(30)}
IDX = b"\0\0\x08\x03" + struct.pack(">3i", 3, 2, 2) + bytes(range(12))
RESULT = json.dumps(a_result()).encode()
TEXT = b"A few words of text, again and again.\n\n\n" * 30
CHOSEN = {"chosen_on": "val", "chosen": {row: {size: {"settings": {"dense.lr": 0.002, "dense.weight_decay": 0.1}, "val": 3.5,
                                                      "tried": 8, "steps": 100} for size in ("10m", "30m")}
                                         for row in ("adamw", "gft-3bit")}}
STUDY = {"fixed": {"seconds": 10.0, "seed": 0, "largest": 3}, "runs": [{"commit": "a", "torch": "2", "cpu": "x", "date": "d",
                                                                        "command": "gft hardness study"}]}
RECORD = {"family": "4.26", "size": 20, "instance": 0, "solver": "cdcl", "solved": True, "seconds": 0.5}
TRIAL = {**asdict(finetune.Trial(3, "fit", "row")), "float": 80.0, "plan": json.dumps(asdict(finetune.Plan()))}
TRIALS = io.StringIO()
csv.DictWriter(TRIALS, list(TRIAL)).writerows([{name: name for name in TRIAL}, TRIAL, {**TRIAL, "scales": 64}])
READERS = {
    "idx": Reader("labels", [IDX, b"\0\0\x08\x01" + struct.pack(">i", 5) + bytes(5)],
                  lambda path: mnist._read_idx(path, ""), 6),
    "dimacs": Reader("a.cnf", [b"c x\np cnf 3 2\n1 -3 0\n2 3 -1 0\n", b"p cnf 2 1\n1\n-2 0\n%\n0\n"], read_formula, 6),
    "text": Reader("a.txt", ["Shall I compare thee to a summer's day? ÄÖ\n".encode() * 2],
                   lambda path: text.load_text(path, 4), 3),
    "config": Reader("config.json", [json.dumps({**recipes.find(name).config(), "seed": 0}).encode()
                                     for name in ("digits-fp", "verses-gpt-hybrid2-2bit")], read_config, 4),
    "metrics": Reader("metrics.jsonl", [b'{"step": 1, "val": 0.5}\n{"step": 20, "loss": 1.5, "lr": 0.1}\n'],
                      lambda path: report.validation_curve(path.parent), 6),
    "result": Reader("result.json", [RESULT], read_result, 4),
    "table": Reader("runs.jsonl", [RESULT + b"\n" + RESULT.replace(b'"seed": 0', b'"seed": 1')], read_table, 2),
    "json lines": Reader("runs.jsonl", [b'{"a": 1}\n[1, 2]\n'], lambda path: list(read_json_lines(path, cut_last=True)), 3),
    "chosen": Reader("tuned.json", [json.dumps(CHOSEN).encode()], read_chosen, 3),
    "study": Reader("study", [json.dumps(STUDY).encode() + BETWEEN + json.dumps(RECORD).encode() + b"\n"], read_study, 3),
    "trials": Reader("a.csv", [TRIALS.getvalue().encode()], read_trials, 3),
    "xz": Reader("a.txt.xz", [lzma.compress(TEXT), lzma.compress(TEXT, check=lzma.CHECK_NONE)], read_corpus, 1),
    "gz": Reader("a.txt.gz", [gzip.compress(TEXT)], read_corpus, 1),
    "corpus": Reader("a.zip", [packed_zip({"a.md": TEXT}), packed_zip({f"a/{split}.txt": TEXT for split in SPLITS})],
                     read_corpus, 2),
    "npz": Reader("a.npz", [problem_file(None), problem_file(1), problem_file(3)], read_problem, 1),
    "npz arrays": Reader("arrays", [unpacked_arrays(None), unpacked_arrays(1), unpacked_arrays(3)], read_arrays, 1),
    "zip": Reader("a.zip", [packed_zip(PICTURES)], read_pictures, 2),
    "tgz": Reader("a.tar", [packed_tgz(PICTURES), packed_tgz(PICTURES, long_name=True)], read_tgz, 1),
    "tgz raw": Reader("a.tgz", [gzip.compress(packed_tgz(PICTURES))], read_pictures, 1),
}


# ---------------------------------------------------------------------------------------------------- mutation


def mutated(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """A few changes to a file, of any kind."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        place, span = draw.randrange(len(changed) + 1), draw.choice((1, 1, 2, 4, 8, 30))
        kind = draw.randrange(8)
        if kind == 0 and changed:
            changed[min(place, len(changed) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[place : place + span] = draw.randbytes(span)
        elif kind == 2:
            del changed[place : place + span]
        elif kind == 3:
            del changed[place:]
        elif kind == 4:
            changed[place : place + draw.choice((0, span))] = draw.choice(WORDS)
        elif kind == 5:
            nasty = draw.choice(NASTY)
            changed[place : place + len(nasty)] = nasty
        elif kind == 6:
            start = draw.randrange(len(other) + 1)
            changed[place : place + span] = other[start : start + span]
        else:
            changed[place:place] = changed[place : place + span] * draw.choice((1, 2, 50))
    return bytes(changed)


def wrong_with(error: BaseException) -> str | None:
    """What is not as promised in how a reader has ended."""
    if not isinstance(error, UsageError):
        return f"{type(error).__name__}: {error}"
    if "\n" in str(error) or len(str(error)) > 600:
        return f"not one sentence: {error}"
    return None


class TooSlow(BaseException):
    pass


def too_slow(*_: object) -> None:
    raise TooSlow


def fuzz(inputs: int, seed: int, only: list[str], folder: Path) -> tuple[Counter[str], Counter[str], list[str]]:
    """(inputs, refusals) by reader, and what went wrong."""
    draw = random.Random(seed)
    chosen = {name: reader for name, reader in READERS.items() if not only or name in only}
    names, weights = list(chosen), [reader.weight for reader in chosen.values()]
    tried: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong: list[str] = []
    places = {name: folder / name for name in names}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, too_slow)
    for number in range(inputs):
        name = draw.choices(names, weights)[0]
        reader = chosen[name]
        content = mutated(draw.choice(reader.seeds), draw.choice(reader.seeds), draw) if number % 500 else draw.randbytes(
            draw.randrange(60))
        path = places[name] / reader.file
        path.write_bytes(content)
        tried[name] += 1
        signal.alarm(SECONDS)
        try:
            reader.read(path)
        except (Exception, TooSlow) as error:
            refused[name] += 1
            if (why := wrong_with(error)) is not None:
                wrong.append(f"{name}, input {number} of seed {seed}: {why}\n  {content[:300]!r}\n"
                             f"{''.join(traceback.format_tb(error.__traceback__)[-2:])}")
        finally:
            signal.alarm(0)
    return tried, refused, wrong


# ---------------------------------------------------------------------------------------------------- memory


def large_files(size: int) -> dict[str, tuple[bytes, str]]:
    """For some readers files of about so many bytes that take the most memory we know of, and whose reader it is."""
    dense = cnf.Formula.of([tuple(range(1, 100))] * (size // 100), 99)
    out = io.BytesIO()
    np.savez(out, x=reduction.reduce_formula(dense).x, y=np.ones(size // 100, np.int8), levels=np.array([-1, 1]),
             variables=np.array(99), format=np.array(reduction.FORMAT))
    empty = b'{"":{}},'
    return {
        "JSON, empty objects": (b"[" + empty * (size // len(empty)) + b"{}]", "result"),
        "JSON lines": (b"{}\n" * (size // 3), "json lines"),
        "DIMACS, one long line": (b"p cnf 9 1\n" + b"1 " * (size // 2) + b"0\n", "dimacs"),
        "DIMACS, short clauses": (f"p cnf 9 {size // 4}\n".encode() + b"1 0\n" * (size // 4), "dimacs"),
        "text": (b"ab" * (size // 2), "text"),
        "text of many characters": ("".join(chr(0x4E00 + n % 20_000) for n in range(size // 3)).encode(), "text"),
        "idx": (b"\0\0\x08\x01" + struct.pack(">i", size) + bytes(size), "idx"),
        "npz, not compressed": (out.getvalue(), "npz"),
    }


def memory(folder: Path, size: int = 2**22) -> None:
    """Print the peak of each reader's memory over the size of its file. An .npz and a .zip may be compressed, by at most
    1032 to 1, and take so many times more."""
    for name, (content, reader) in large_files(size).items():
        place = folder / READERS[reader].file
        place.write_bytes(content)
        if not (child := os.fork()):
            before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            with suppress(UsageError):
                READERS[reader].read(place)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
            times = max(0, peak) / len(content)
            print(f"{name:26} {len(content) / 1e6:6.1f} MB, {times:5.1f} times as much memory", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], choices=list(READERS))
    parser.add_argument("--memory", action="store_true")
    asked = parser.parse_args()
    if asked.memory:
        with tempfile.TemporaryDirectory() as folder:
            memory(Path(folder))
        return
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + LIMIT, resource.RLIM_INFINITY))  # beyond it: MemoryError
    started = time.monotonic()
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    warnings.simplefilter("ignore")  # numpy's, of headers that Python 2 might have written
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        tried, refused, wrong = fuzz(asked.inputs, asked.seed, asked.only, Path(folder))
    for name in tried:
        print(f"{name:12} {tried[name]:>9,} inputs, {refused[name]:>9,} refused")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{sum(tried.values()):,} inputs in {time.monotonic() - started:.0f} s, seed {asked.seed}; peak memory {peak:.0f} "
          f"MB; {len(wrong)} not as promised")
    print(*wrong[:20], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
