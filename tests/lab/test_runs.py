"""Runs: folders that can be read back, resumed, and are never overwritten; runs that go wrong."""

import json

import pytest

from gft.errors import UsageError
from gft.lab import energy, recipes, runs, train

TINY = ["width=24", "depth=3", "steps=30", "data=digits", "batch=64"]


FIELDS = {"recipe", "metric", "value", "split", "steps", "seed", "fp32_params", "quantized_params", "bits",
          "updates_estimated", "updates_actual", "energy_estimate_j", "wall_s", "device", "torch", "commit"}


def test_run_folder_can_be_read_back(tmp_path, run):
    recipe = recipes.find("mnist-dnn-hybrid-3bit").changed(TINY)
    result = run(recipe, tmp_path / "run", seed=4, tensorboard=True)
    assert result.keys() >= FIELDS
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 30
    assert lines[-1]["val"] == result["value"]
    assert lines[-1]["layers"]["layers.1"]["flip_rate"] >= 0
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    value, _ = train.evaluate_run(tmp_path / "run", "val", "cpu")
    assert value == result["value"]


def test_a_run_counts_the_joules_of_orthogonalizing(tmp_path, small, run):
    plain, orthogonal = (run(small("verses-gpt-hybrid2-2bit", f"orthogonalize={how}"), tmp_path / how)["energy_estimate_j"]
                         for how in ("false", "true"))
    block = [(48, 16), (16, 16), (64, 16), (16, 64)]
    assert orthogonal - plain == pytest.approx(2 * energy.orthogonalize_j(block * 2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("digits-hybrid-4bit", 96.0), ("digits-quantized-2bit", 96.0)])
def test_default_settings_learn_the_digits(name, least, tmp_path, run):
    assert run(recipes.find(name).changed(["steps=240"]), tmp_path / "run")["value"] >= least


def test_same_seed_gives_the_same_run(tmp_path, run):
    recipe = recipes.find("mnist-dnn-quantized-2bit").changed(TINY)
    values = [run(recipe, tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert values[0]["updates_actual"] == values[1]["updates_actual"] != values[2]["updates_actual"]


def test_nan_loss_stops_the_run_and_keeps_the_checkpoint(tmp_path, run):
    recipe = recipes.find("mnist-dnn-fp").changed([*TINY, "dense.lr=1e30", "norm=none", "steps=200"])
    with pytest.raises(train.TrainingError, match=r"the loss became .* try a smaller"):
        run(recipe, tmp_path / "run", checkpoint_every=1)
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_folder_with_a_run_is_never_overwritten(tmp_path, run):
    recipe = recipes.find("mnist-dnn-quantized-2bit").changed(TINY)
    first = run(recipe, tmp_path / "run")
    with pytest.raises(train.TrainingError, match="--resume"):
        run(recipe, tmp_path / "run")
    with pytest.raises(train.TrainingError, match=r"was started with integers\.lr=0\.1, not 0\.05"):
        run(recipe.changed(["integers.lr=0.05"]), tmp_path / "run", resume=True)
    assert run(recipe, tmp_path / "run", resume=True) == first


def test_a_folder_of_the_older_flat_settings_is_refused(tmp_path, run, refuses):
    recipe = recipes.find("digits-quantized-2bit")
    (tmp_path / "config.json").write_text(json.dumps({"name": recipe.name, "quantize": "all", "lr": 0.1, "seed": 0}))
    with refuses(train.TrainingError, "was made by an older gft, whose settings had other names; train anew"):
        run(recipe, tmp_path, resume=True)
    with refuses(train.TrainingError, "was made by an older gft"):
        train.recipe_of(tmp_path)


def test_a_damaged_config_is_named(tmp_path, run, refuses):
    (tmp_path / "config.json").write_text('{"name": ')
    with refuses(UsageError, "config.json cannot be read"):
        run(recipes.find("digits-fp"), tmp_path, resume=True)


def test_devices_are_named_as_torch_names_them(refuses):
    assert runs.resolve_device("cpu").type == "cpu"
    with refuses(UsageError, "--device tpu: choose auto, cpu or cuda"):
        runs.resolve_device("tpu")
