"""Every example runs as a reader would run it, in a process and a folder of its own, for a few steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gft

ROOT = Path(gft.__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 80
# What an example imports beyond the library: it is skipped where that is not installed.
OPTIONAL = ("transformers", "lightning", "peft", "accelerate", "gguf", "onnx", "onnxruntime", "torchvision", "sklearn",
            "llama_cpp", "compressed_tensors")


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


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(example, tmp_path):
    needs(example)
    assert run([example, "--steps", 3], tmp_path).strip()
    assert len(example.read_text().splitlines()) <= MOST_LINES


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
