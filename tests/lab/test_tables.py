"""Tables of the paper: runs of many seeds in one queue, resumed, reported, and of older results."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from gft.errors import UsageError
from gft.lab import recipes, report, tables, train

SETTINGS = ["width=16", "data=digits", "steps=20", "batch=100"]
RESULTS = Path(__file__).parents[2] / "results"


def test_the_longest_title_of_a_figure_is_within_it(tmp_path, monkeypatch):
    from matplotlib import pyplot

    titles = [tables.TITLES[recipe.table] + tables.SUBTITLES[recipes.variant_of(name)]
              for name, recipe in recipes.RECIPES.items() if recipe.table in tables.TITLES]
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    report.plot_curves({"Quantized 2bit": [[(1, 50.0), (2, 60.0)]]}, max(titles, key=len), "accuracy",
                       [tmp_path / "curves.png"])
    (figure,) = figures
    monkeypatch.undo()
    pyplot.close(figure)
    figure.draw_without_rendering()  # at the dpi of the figure, not of the file
    box = figure.axes[0].title.get_window_extent()
    assert 0 < box.x0 < box.x1 < figure.bbox.x1
    assert box.y1 < figure.bbox.y1


def test_a_table_without_curves_keeps_the_figure_it_has(tmp_path):
    settings = ["width=16", "data=digits", "steps=2"]
    tables.reproduce({"mnist-dnn": tmp_path}, seeds=1, rows=["fp"], settings=settings, device="cpu")
    for run in tmp_path.glob("*/seed-*"):
        shutil.rmtree(run)
    (line,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    (tmp_path / "runs.jsonl").write_text(json.dumps({**line, "curve": []}) + "\n")
    figure = (tmp_path / "curves.png").read_bytes()
    tables.write_table(tmp_path)
    assert (tmp_path / "curves.png").read_bytes() == figure


def test_reproduce_writes_a_table_and_resumes(tmp_path, monkeypatch):
    chosen = {"seeds": 2, "rows": ["fp", "quantized-2bit"], "settings": SETTINGS, "device": "cpu"}
    rows = tables.reproduce({"mnist-dnn": tmp_path}, **chosen)["mnist-dnn"]
    assert [row["name"] for row in rows] == ["Full-Precision", "Quantized 2bit"]
    assert all(row["n"] == 2 and row["gap"] == pytest.approx(row["mean"] - row["paper"]) for row in rows)
    text = (tmp_path / "table.md").read_text()
    assert "gft reproduce mnist-dnn --seeds 2" in text
    assert (tmp_path / "curves.png").stat().st_size > 1000
    written = json.loads((tmp_path / "table.json").read_text())
    assert written["rows"] == rows
    assert {"name", "paper", "mean", "std", "n", "lower_is_better", "commit", "device", "command"} <= rows[0].keys()
    lines = (tmp_path / "runs.jsonl").read_text()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # Runs of another machine, without their folders, and of a time when there was no patch_dropout.
    (elsewhere / "runs.jsonl").write_text(lines.replace('"patch_dropout": 0.0, ', ""))
    with monkeypatch.context() as patch:
        patch.setattr(train, "build_model", None)  # neither may train anything
        for folder in (tmp_path, elsewhere):
            assert tables.reproduce({"mnist-dnn": folder}, **chosen) == {"mnist-dnn": rows}
    assert report.markdown("", [{**rows[0], "commit": "a, b"}, {**rows[1], "commit": "b"}]).count(" · commit a, b · ") == 1
    # Two seeds a row: the spread to expect is that of both rows together; one seed has none.
    deviation = math.sqrt(sum(row["std"] ** 2 for row in rows) / 2)
    assert f"by {deviation:.2f} (standard deviation, 2 degrees of freedom)" in text
    assert "degrees" not in report.markdown("", [{**row, "n": 1, "std": 0.0} for row in rows])
    # Joules that differ a hundredfold are explained, and only there.
    assert "orthogonalized" not in text
    assert "orthogonalized (Quantized 2bit)" in report.markdown("", [rows[0], {**rows[1], "orthogonalize": True}])
    # Other settings are other runs: the old line does not count as theirs.
    row = tables.reproduce({"mnist-dnn": elsewhere}, seeds=1, rows=["fp"], settings=[*SETTINGS, "dense.lr=0.01"],
                           device="cpu")["mnist-dnn"][0]
    assert row["n"] == 2
    newest = json.loads((elsewhere / "runs.jsonl").read_text().splitlines()[0])
    assert newest["config"]["dense"]["lr"] == 0.01
    (tmp_path / "runs.jsonl").write_text("not json")
    with pytest.raises(UsageError, match="line 1"):
        tables.read_lines(tmp_path)


def test_a_table_of_losses_says_that_lower_is_better(tmp_path):
    settings = ["data=verses", "width=16", "depth=2", "heads=2", "steps=6", "batch=4", "warmup=1", "eval_every=3"]
    (row,) = tables.reproduce({"shakespeare-gpt": tmp_path}, seeds=1, rows=["hybrid2-3bit"], variant="packed",
                              settings=settings, device="cpu")["shakespeare-gpt"]
    assert row["lower_is_better"]
    assert row["paper"] == 1.72
    assert row["bytes_per_weight"] == 0.5
    text = (tmp_path / "table.md").read_text()
    assert "lower is better" in text
    assert "--packed" in text


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_stops_leaves_the_others_their_results(tmp_path, jobs, refuses):
    settings = [*SETTINGS, "norm=none", "dense.lr=1e30"]
    folders = {table: tmp_path / table for table in ("mnist-dnn", "mnist-vit", "depth")}
    if jobs == 2:  # and one that is killed, here before it has begun
        settings = SETTINGS
        threading.Thread(target=kill_worker, args=("mnist-dnn-fp seed 0",), daemon=True).start()
    why = "was killed by SIGKILL" if jobs == 2 else "the loss became"
    stopped = f"1 of 2 runs stopped and the others are done; the first is mnist-dnn-fp seed 0: .*{why}"
    with refuses(train.TrainingError, stopped):
        tables.reproduce(folders, seeds=1, rows=["dnn-fp", "depth-3"], settings=settings, device="cpu", jobs=jobs)
    (row,) = json.loads((tmp_path / "depth" / "table.json").read_text())["rows"]
    assert (row["recipe"], row["n"]) == ("mnist-dnn-depth-3", 1)
    assert "gft reproduce depth --seeds 1" in (tmp_path / "depth" / "table.md").read_text()
    assert not (tmp_path / "mnist-dnn" / "table.json").exists()
    assert not (tmp_path / "mnist-vit").exists()  # none of its rows was asked for
    if jobs == 2:  # the same command goes on
        written = tables.reproduce(folders, seeds=1, rows=["dnn-fp", "depth-3"], settings=settings, device="cpu")
        assert [row["n"] for rows in written.values() for row in rows] == [1, 1]


def kill_worker(name: str) -> None:
    while not (found := [worker for worker in multiprocessing.active_children() if worker.name == name]):
        time.sleep(0.01)
    os.kill(found[0].pid, signal.SIGKILL)


def test_a_table_made_in_parts_names_all_commands_that_made_it(tmp_path):
    names = []
    for row, jobs in (("depth-2", 1), ("depth-3", 1), ("depth-2", 2), ("depth", 1)):
        tables.reproduce({"depth": tmp_path}, seeds=1, rows=[row], settings=[*SETTINGS, "steps=1"], device="cpu", jobs=jobs)
        names.append(json.loads((tmp_path / "about.json").read_text())["command"].split(" && "))
    two, three, again, all_of_it = names
    assert three == again == [*two, two[0].replace("depth-2", "depth-3")]
    assert all_of_it == [two[0].replace("depth-2", "depth")]
    assert " && ".join(all_of_it) in (tmp_path / "table.md").read_text()


def test_rows_that_no_table_has_are_refused(tmp_path, refuses):
    with refuses(UsageError, "--rows depth-4 names no row of depth, mnist-vit"):
        tables.reproduce({"depth": tmp_path / "a", "mnist-vit": tmp_path / "b"}, rows=["depth-4"])
    assert not any(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------- older results


@pytest.mark.parametrize("folder", ["shakespeare-gpt-packed", "mnist-dnn-paper"])  # mnist-dnn-paper's runs kept no settings
def test_older_results_are_reported_as_they_were(folder, tmp_path):
    for file in ("about.json", "runs.jsonl"):
        shutil.copy(RESULTS / folder / file, tmp_path)
    rows = tables.write_table(tmp_path)
    before = json.loads((RESULTS / folder / "table.json").read_text())["rows"]
    assert [(row["name"], row["mean"], row["paper"], row["seeds"]) for row in rows] == [
        (row["name"], row["mean"], row["paper"], row["seeds"]) for row in before]
    assert ("orthogonalized" in (tmp_path / "table.md").read_text()) == (folder == "shakespeare-gpt-packed")


def test_older_results_count_as_runs_of_todays_recipes():
    lines = tables.read_lines(RESULTS / "imagenette-vit-packed")
    recipe = recipes.find("imagenette-vit-hybrid2-3bit-packed")
    assert tables.has_line(lines, recipe, 0)
    assert not tables.has_line(lines, recipe.changed(["threshold=2"]), 0)
    assert not tables.has_line(lines, recipe, 99)


def test_short_numbers():
    assert [report.short(n) for n in (53_583_872, 12.0, 1.05e11, 3_220)] == ["53.6M", "12", "105B", "3.22K"]
