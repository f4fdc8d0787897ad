"""Every example runs as a reader would run it, in a process and a folder of its own, for a few steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gft

ROOT = Path(gft.__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 80
# What an example imports beyond the library: it is skipped where that is not installed.
OPTIONAL = ("transformers", "lightning", "peft", "accelerate", "gguf", "onnx", "onnxruntime", "torchvision", "sklearn",
            "tokenizers", "compressed_tensors")
UNSEEN = {"TrainingArguments": "accelerate", "gft.export.gguf": "gguf"}  # and what these need
LONGER = ("train_from_scratch", "finetune_vision")  # run by tests of their own
# What else it says, where that shows that it worked.
SAID = {"hf_trainer": "with the same logits: True", "lightning_module": "with weights in [-1, 0, 1]"}


def run(command, folder):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True, timeout=180,
                          env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs(example):
    """Skip an example whose optional packages are not here."""
    text = example.read_text()
    for package in OPTIONAL:
        if f"import {package}" in text or f"from {package}" in text:
            pytest.importorskip(package)
    for word, package in UNSEEN.items():
        if word in text:
            pytest.importorskip(package)
    if "fully_shard" in text and torch.__version__ < "2.12":
        pytest.skip("fully_shard takes no integers before torch 2.12")


def test_examples_are_short():
    assert {example.stem: lines for example in EXAMPLES
            if (lines := len(example.read_text().splitlines())) > MOST_LINES} == {}


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.stem not in LONGER], ids=lambda example: example.stem)
def test_example_runs(example, tmp_path):
    needs(example)
    said = run([example, "--steps", 3], tmp_path).strip()
    assert said
    assert SAID.get(example.stem, "") in said


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.stem.startswith("torchrun")], ids=lambda one: one.stem)
def test_example_runs_on_two_processes(example, tmp_path):
    needs(example)
    said = run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, example, "--steps", 3], tmp_path)
    assert "rank 0 of 2 has the first one's weights: True" in said
    assert "rank 1 of 2 has the first one's weights: True" in said


def test_the_plain_loop_learns(tmp_path):
    said = run([ROOT / "examples" / "train_from_scratch.py", "--steps", 30], tmp_path)
    losses = [float(line.split()[3]) for line in said.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.75 * losses[0]
    assert "[-1, 0, 1]" in said


def test_fine_tuning_wins_back_what_rounding_lost(tmp_path):
    pytest.importorskip("sklearn")
    said = run([ROOT / "examples" / "finetune_vision.py", "--steps", 60], tmp_path)
    trained, rounded, tuned, packed = (float(share) for share in re.findall(r"accuracy ([\d.]+)%", said))
    assert rounded < tuned == packed > trained - 5
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) bytes", said)]
    assert sizes[0] > 3 * sizes[1] > 6 * sizes[2]


def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # kept clean: outputs go out of date
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3",
                            resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "[-1, 0, 1]" in said
