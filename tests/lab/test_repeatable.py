"""The same bits each time: with --deterministic on a GPU, and on a CPU with C kernels or none."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import gft
from gft.checkpoint import read_checkpoint
from gft.lab import recipes, train
from gft.lab.repeatable import WORKSPACE, repeatable

SMALL = recipes.find("digits-hybrid-4bit").changed(["width=16", "steps=4", "batch=32"])


def switches() -> tuple:
    return (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.benchmark, os.environ.get(WORKSPACE))


def test_a_run_has_torchs_switches_on_and_leaves_them_as_they_were(tmp_path, monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = switches()
    run = train.training(SMALL.changed(["deterministic=true"]), tmp_path / "run", device="cpu")
    next(run)
    assert switches() == (True, False, False, ":4096:8")
    run.close()  # in its midst
    assert switches() == before
    for _ in train.training(SMALL, tmp_path / "other", device="cpu"):
        assert switches() == before


def test_torch_compile_is_told(monkeypatch):
    from torch._inductor import config

    with repeatable(True, compiled=True):
        assert config.deterministic
    assert not config.deterministic


def test_a_workspace_that_is_not_repeatable_is_refused(tmp_path, monkeypatch, refuses):
    monkeypatch.setenv(WORKSPACE, ":0:0")
    before = switches()
    with refuses(gft.UsageError, "CUBLAS_WORKSPACE_CONFIG=:0:0 lets products differ"):
        next(train.training(SMALL.changed(["deterministic=true"]), tmp_path / "run", device="cpu"))
    assert switches() == before


def test_a_run_goes_on_as_it_was_begun(tmp_path, refuses):
    """One that began before there was the setting, too."""
    next(train.training(SMALL.changed(["deterministic=true"]), tmp_path / "run", device="cpu"))
    with refuses(gft.UsageError, "was started with model.deterministic=True, not False"):
        next(train.training(SMALL, tmp_path / "run", device="cpu", resume=True))
    next(train.training(SMALL, tmp_path / "old", device="cpu"))
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config["model"]["deterministic"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    assert list(train.training(SMALL, tmp_path / "old", device="cpu", resume=True))[-1].result is not None


def tensors_of(nest: object, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by their path."""
    if isinstance(nest, torch.Tensor):
        return {name: nest}
    pairs = nest.items() if isinstance(nest, dict) else enumerate(nest) if isinstance(nest, (list, tuple)) else ()
    return {key: value for at, part in pairs for key, value in tensors_of(part, f"{name}.{at}").items()}


def difference(one: Path, other: Path) -> list[str]:
    """What differs in the checkpoints of two runs."""
    first, second = (tensors_of(read_checkpoint(run / "checkpoint" / "state.safetensors")) for run in (one, other))
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("name", ["digits-hybrid-4bit", "mnist-dnn-hybrid-3bit-packed"])
def test_a_run_with_c_kernels_or_none_ends_in_the_same_bits(name, tmp_path, monkeypatch):
    recipe = recipes.find(name).changed(["data=digits", "width=32", "steps=40", "batch=64", "eval_every=40"])
    list(train.training(recipe, tmp_path / "c", device="cpu"))
    monkeypatch.setattr(import_module("gft.ops.operation"), "twins", lambda kind: {})
    list(train.training(recipe, tmp_path / "torch", device="cpu"))
    assert difference(tmp_path / "c", tmp_path / "torch") == []


PROGRAM = """
import sys
from pathlib import Path
from gft.lab import recipes, train
recipe = recipes.find(sys.argv[1]).changed(sys.argv[3:])
for _ in train.training(recipe, Path(sys.argv[2]), seed=3, device="cuda"):
    pass
"""


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["hybrid2-2bit", "hybrid1-4bit", "fp"])
def test_two_runs_of_nanogpt_on_a_gpu_give_the_same_bits(row, tmp_path):
    """As the recipe has it: bfloat16, dropout, compiled and captured. Each process starts with an empty cache, and so
    chooses all of torch.compile's kernels anew."""
    settings = ["data=verses", "deterministic=true", "steps=30", "eval_every=15", "batch=64", "context=128", "width=192",
                "depth=3", "heads=3"]
    recipe = recipes.find(f"shakespeare-gpt-{row}")
    assert recipe.model.compiled
    assert recipe.model.precision == "bf16"
    assert recipe.model.dropout > 0
    path = os.pathsep.join([str(Path(gft.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    runs = []
    for number in range(2):  # side by side: they are compiled for most of the time
        caches = {name: str(tmp_path / f"{name}-{number}") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        runs.append(subprocess.Popen(
            [sys.executable, "-c", PROGRAM, recipe.name, str(tmp_path / f"run-{number}"), *settings],
            env={**os.environ, "PYTHONPATH": path, **caches}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True))
    for run in runs:
        _, errors = run.communicate(timeout=400)
        assert run.returncode == 0, errors[-3000:]
    assert difference(tmp_path / "run-0", tmp_path / "run-1") == []
    results = [json.loads((tmp_path / f"run-{number}" / "result.json").read_text()) for number in range(2)]
    assert results[0]["value"] == results[1]["value"]
    assert results[0]["flips"] == results[1]["flips"]
