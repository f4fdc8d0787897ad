"""Files that are not what they should be: every reader gives a value or one sentence, within the memory it may take.

tests/fuzz/data_files.py does the same a million times over, with the same valid files to begin from.
"""

import contextlib
import io
import json
import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz import data_files
from hypothesis import given
from hypothesis import strategies as st

import gft
from gft import cli, files
from gft.errors import UsageError
from gft.lab import data, display, ladder, recipes, records, report, train
from gft.lab.data import documents, folder, text
from gft.lab.hardness import cnf, reduction, study
from gft.lab.plain import printable

edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=12) | st.sampled_from(data_files.WORDS)),
                 min_size=1, max_size=4)


def edited(content: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    """Some bytes, each at its place, replaced by others."""
    for place, span, new in changes:
        start = int(place * len(content))
        content = content[:start] + new + content[start + span :]
    return content


@pytest.mark.parametrize("name", data_files.READERS)
@pytest.mark.filterwarnings("ignore:Reading `.npy`")
def test_a_changed_file_is_read_or_refused_in_a_sentence(name, tmp_path):
    reader = data_files.READERS[name]

    @given(st.sampled_from(reader.seeds), edits)
    def check(valid, changes):
        (tmp_path / reader.file).write_bytes(edited(valid, changes))
        wrong = None
        try:
            reader.read(tmp_path / reader.file)
        except UsageError as error:
            wrong = data_files.wrong_with(error)
        assert wrong is None

    check()
    for valid in reader.seeds:
        (tmp_path / reader.file).write_bytes(valid)
        reader.read(tmp_path / reader.file)  # lest the test pass because all is refused


# ---------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"[" * 100_000, b"[1]", b"7", b"", b'{"seed": 1e999}'],
                         ids=["not UTF-8", "nested deeply", "a list", "a number", "empty", "infinite"])
def test_json_that_is_no_result_is_refused(content, tmp_path, refuses):
    (tmp_path / "result.json").write_bytes(content)
    with refuses(UsageError, "result.json"):
        records.read_result(tmp_path / "result.json")


@pytest.mark.parametrize(("change", "says"), [
    ({"model": {"width": 10**12}}, "give at most 65536"), ({"model": {"depth": "5"}}, "model.depth should be of type int"),
    ({"data": []}, "data is no object"), ({"integers": {"bits": True}}, "integers.bits should be of type int"),
    ({"colour": 1}, "'colour' that this gft does not know"), ({"name": None}, "name should be of type str"),
    ({"schedule": {"steps": float("nan")}}, "schedule.steps should be of type int")])
def test_a_config_is_held_to_the_types_of_its_settings(change, says, tmp_path, refuses):
    config = recipes.find("digits-fp").config()
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps({**config, "seed": 0}))
    with refuses(UsageError, says):
        train.recipe_of(tmp_path)


def test_a_config_of_a_larger_network_than_its_checkpoint_takes_no_memory(tmp_path, run, refuses):
    run(recipes.find("digits-fp").changed(["width=16", "steps=1"]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"] |= {"width": 2**16, "depth": 9}  # 120 GB
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refuses(UsageError, r"describes 30,\d+,\d+,\d+ weights"):
        train.evaluate_run(tmp_path, "val", "cpu")


def test_a_study_of_too_many_levels_takes_no_memory(tmp_path, refuses):
    for largest, says in ((10**12, "largest is 1000000000000, where 1 to"), ("3", "largest should be integer or none")):
        fixed = {"seconds": 1, "seed": 0, "largest": largest}
        (tmp_path / "study.json").write_text(json.dumps({"fixed": fixed, "runs": []}))
        with refuses(UsageError, says):
            study.read_study(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"chosen": []}', b'{"chosen": {"adamw": 1}}', b"\xff",
                                     b'{"chosen": {"adamw": {"10m": {"steps": 1, "settings": {"dense.lr": "x"}}}}}',
                                     b'{"chosen": {"adamw": {"10m": {"steps": 1, "settings": {"dense.lr": 1e999}}}}}',
                                     b'{"chosen": {"adamw": {"of no size": {"steps": 1, "settings": {}}}}}'])
def test_chosen_settings_that_are_none_are_refused(content, tmp_path, refuses):
    (tmp_path / "tuned.json").write_bytes(content)
    with refuses(UsageError, "tuned.json"):
        ladder.as_reported(recipes.find("wiki-ladder-10m-adamw"), tmp_path)


@pytest.mark.parametrize("change", [{"step": "1"}, {"step": 10**30}, {"seconds": None}, {"train_s": "x"}, {"joules": [1]},
                                    {"train_s": float("nan")}], ids=str)
def test_a_checkpoint_that_counts_nothing_sensible_is_refused(change, tmp_path, refuses):
    state = {"step": 1, "seconds": 0.5, "train_s": 0.5, "joules": None, **change}
    with refuses(train.TrainingError, "was not written by this run"):
        train.reached(state, 1, tmp_path)


def test_metrics_that_are_no_metrics_are_refused(tmp_path, refuses):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val": 2}\n{"step": "1", "val": 2}\n')
    with refuses(UsageError, "line 2: step should be integer and is '1'"):
        report.validation_curve(tmp_path)


@pytest.mark.parametrize("name", ["text:~nobody at all/x", "corpus:~nobody at all/x", "imagenette-" + "9" * 5000,
                                  "text:" + "a" * 5000, "corpus:" + "a/" * 5000, "text:a\n" + "b\n" * 300, "text:a\0b",
                                  "corpus:\ud800", "text:/dev/zero"], ids=lambda name: repr(name[:20]))
def test_a_data_set_that_cannot_be_is_refused_wherever_it_is_named(name, tmp_path):
    config = {**recipes.find("verses-gpt-fp").config(), "seed": 0}
    config["data"]["name"] = name
    (tmp_path / "config.json").write_text(json.dumps(config))
    wrong = []
    for use in (lambda: train.recipe_of(tmp_path), lambda: data.found(name), lambda: data.load(name)):
        try:
            use()
        except UsageError as error:
            wrong.append(data_files.wrong_with(error))
    assert wrong
    assert set(wrong) == {None}


@pytest.mark.parametrize("read", [lambda path: records.read_json(path), lambda path: records.read_result(path),
                                  lambda path: list(records.read_json_lines(path)), lambda path: text.load_text(path),
                                  lambda path: folder.content_of(path), lambda path: cnf.read_dimacs(path),
                                  lambda path: reduction.load_problem(path), lambda path: documents.files_of(path),
                                  lambda path: gft.load_checkpoint(path, torch.nn.Linear(1, 1))])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UsageError, match=r"a\.txt"):
        read(tmp_path / "a.txt")


def test_links_in_a_run_folder_have_no_other_file_changed(tmp_path, refuses):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    for name in (".lock", "config.json", "metrics.jsonl"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    with refuses(UsageError, r"\.lock cannot be written"):
        files.FolderLock(tmp_path / "run", "wait")
    records.write_json(tmp_path / "run" / "config.json", {})
    files.write_text(tmp_path / "run" / "metrics.jsonl", "")
    assert (tmp_path / "mine").read_text() == "precious"


# ---------------------------------------------------------------------------------------------------- memory


def npz(**arrays) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, format=np.array(reduction.FORMAT), **arrays)
    return out.getvalue()


def with_header(arrays: bytes, name: str, old: bytes, new: bytes) -> bytes:
    """The same .npz with part of an array's header replaced."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(arrays)) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.namelist():
            content = source.read(entry)
            assert entry != f"{name}.npy" or old in content
            target.writestr(entry, content.replace(old, new) if entry == f"{name}.npy" else content)
    return out.getvalue()


SMALL = {"x": np.ones((3, 4), np.int8), "y": np.ones(3, np.int8), "levels": np.array([-1, 1]), "variables": np.array(3)}
ZEROS = np.zeros((2**23, 4), np.int8)  # 32 MB, packed to 33 kB
BOMBS = {
    "clauses of nothing": npz(**{**SMALL, "x": ZEROS, "y": np.ones(2**23, np.int8)}),
    "more numbers than its shape says": with_header(npz(**{**SMALL, "x": ZEROS}), "x", b"(8388608, 4)", b"(3, 4)      "),
    "labels for other points": npz(**{**SMALL, "x": ZEROS}),
    "millions of levels": npz(**{**SMALL, "levels": np.zeros(2**25, np.int8)}),
    "one clause again and again": npz(**{**SMALL, "x": np.ones((2**7, 2**13), np.int8), "y": np.ones(2**7, np.int8),
                                         "variables": np.array(2**13 - 1)}),
    "a largest level of a milliard": npz(**{**SMALL, "levels": np.array([-(10**9), 10**9])}),
    "a shape of a milliard": with_header(npz(**SMALL), "x", b"(3, 4)", b"(31622, 31622)"),
    "levels without points": npz(**{**SMALL, "x": np.ones((1, 30_003), np.int8), "y": np.ones(1, np.int8),
                                    "levels": np.arange(30_000)}),
}
LARGE = data_files.large_files(2**13)


@pytest.mark.parametrize("name", BOMBS)
def test_a_data_set_that_would_fill_the_memory_is_refused(name, tmp_path, refuses):
    (tmp_path / "a.npz").write_bytes(BOMBS[name])
    tracemalloc.start()
    try:
        with refuses(UsageError, "is not a separability data set|not the reduction of a formula"):
            reduction.formula_of(reduction.load_problem(tmp_path / "a.npz"))
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", LARGE)
def test_reading_takes_at_most_64_times_the_memory_of_the_file(name, tmp_path):
    content, reader = LARGE[name]
    place = tmp_path / data_files.READERS[reader].file
    place.write_bytes(content)
    tracemalloc.start()
    try:
        with contextlib.suppress(UsageError):
            data_files.READERS[reader].read(place)
        assert tracemalloc.get_traced_memory()[1] < 64 * len(content)
    finally:
        tracemalloc.stop()


def test_a_formula_of_more_variables_than_it_has_characters_is_refused(refuses):
    with refuses(cnf.DimacsError, "line 1: the header announces 999999999999 variables"):
        cnf.parse_dimacs("p cnf 999999999999 0\n")
    assert cnf.parse_dimacs("p cnf 1048576 0\n").variables == 2**20


def test_a_clause_of_many_literals_takes_no_longer_than_it_should():
    wide = cnf.parse_dimacs("p cnf 50000 1\n" + " ".join(map(str, range(1, 50_001))) + " 0\n")
    assert len(wide.cleaned().clauses) == 1  # each literal looked for among all the others would take minutes


# ---------------------------------------------------------------------------------------------------- the terminal


@given(st.text())
def test_what_is_printed_steers_no_terminal(text):
    shown = printable(text, lines=False)
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)
    shown.encode("utf-8")  # a lone surrogate would raise
    assert printable(shown) == shown


def test_names_with_escape_sequences_are_written_out(capsys, monkeypatch, tmp_path):
    display.say("a\x1b[31mred\u202e\x07")
    table = report.Table("case", title="\x1b]0;title\x07")
    table.add_row("\x1b[2Jcleared [/red]")
    display.show(table)
    monkeypatch.setattr("sys.argv", ["gft", "eval", "no\x1b[31mwhere\nelse"])
    with pytest.raises(SystemExit):
        cli.main()
    out, error = capsys.readouterr()
    assert "\x1b" not in out + error
    assert "\\x1b[31mred\\u202e\\x07" in out
    assert "\\x1b[2Jcleared [/red]" in out
    assert error.count("\n") == 1


def test_generated_text_with_escape_sequences_is_written_out(tmp_path, run, capsys, monkeypatch, small):
    text = tmp_path / "text.txt"
    text.write_text("\x1b[31mred\x1b[0m " * 300)
    run(small("verses-gpt-fp", f"data=text:{text}"), tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["gft", "generate", str(tmp_path / "run"), "--prompt", "\x1b", "--length", "30",
                                     "--device", "cpu"])
    with pytest.raises(SystemExit):
        cli.main()
    out = capsys.readouterr().out
    assert out.startswith("\\x1b")
    assert "\x1b" not in out


def test_a_name_that_is_no_utf8_is_printed(tmp_path, capsys):
    path = Path(os.fsdecode(bytes(tmp_path) + b"/\xff\xfe"))
    display.say(f"Written: {path}")
    assert "\\udcff\\udcfe" in capsys.readouterr().out
