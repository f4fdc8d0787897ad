"""The lab: data, recipes, and runs that can be read back."""

import gzip
import hashlib
import http.server
import json
import struct
import threading
from functools import partial

import pytest
import torch

from gft import energy
from gft.lab import data, recipes, report, tables, train
from gft.lab.models import DNN

TINY = ["width=24", "depth=3", "steps=30", "data=digits", "batch=64"]


def run(recipe, folder, **options):
    return list(train.training(recipe, folder, device="cpu", **options))[-1].result


# ---------------------------------------------------------------------------------------------------- data


def idx(values: torch.Tensor) -> bytes:
    header = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}i", *values.shape)
    return header + bytes(values.flatten().byte().tolist())


@pytest.fixture
def mnist_like(tmp_path, monkeypatch):
    """Seven images in torchvision's layout, unpacked."""
    monkeypatch.setenv("GFT_DATA", str(tmp_path))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for source in data.MNIST_FILES:
        shape = (7, 28, 28) if "images" in source.name else (7,)
        (raw / source.name.removesuffix(".gz")).write_bytes(idx(torch.arange(torch.Size(shape).numel()).view(shape) % 10))
    return raw


def test_mnist_is_read_from_torchvisions_folder(mnist_like):
    read = data._read_idx(mnist_like / "train-labels-idx1-ubyte", "")
    assert read.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert data.find_mnist() is not None
    assert data.load_mnist().train[0].shape == (7, 784)


def test_mnist_with_a_wrong_checksum_is_refused(mnist_like):
    plain = mnist_like / "t10k-labels-idx1-ubyte"
    (mnist_like / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(data.DataError, match="its checksum is not MNIST's"):
        data.load_mnist()


def test_mnist_cut_short_is_refused(mnist_like):
    file = mnist_like / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(data.DataError, match="cut short"):
        data.load_mnist()


def test_missing_mnist_offline_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("GFT_DATA", str(tmp_path / "empty"))
    monkeypatch.setattr(data, "MNIST_MIRRORS", ("http://127.0.0.1:9/",))  # nothing listens there
    with pytest.raises(data.DataError, match=r"is there a network\?\); put the four .* into .* or set GFT_DATA"):
        data.fetch_mnist()


def test_missing_mnist_is_downloaded_and_a_bad_mirror_passed_over(tmp_path, monkeypatch):
    folders = {name: tmp_path / "web" / name for name in ("bad", "good")}
    sources = []
    for source in data.MNIST_FILES:
        content = gzip.compress(idx(torch.zeros((3, 2, 2) if "images" in source.name else (3,))))
        for name, folder in folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / source.name).write_bytes(content if name == "good" else content + b"x")
        sources.append(data.Source(source.name, hashlib.md5(content).hexdigest()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=tmp_path / "web"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GFT_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "MNIST_FILES", tuple(sources))
    mirrors = tuple(f"http://127.0.0.1:{server.server_port}/{name}/" for name in folders)
    monkeypatch.setattr(data, "MNIST_MIRRORS", mirrors[:1])
    with pytest.raises(data.DataError, match="hash"):
        data.fetch_mnist()
    monkeypatch.setattr(data, "MNIST_MIRRORS", mirrors)
    assert all(path.parent == tmp_path / "cache" / "mnist" for path in data.fetch_mnist().values())
    server.shutdown()
    assert data.load_mnist().test[0].shape == (3, 4)  # and now it is found without a network


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_mnist_has_the_papers_split():
    if data.find_mnist() is None:
        pytest.skip("MNIST is not in the data folder; set GFT_DATA or run: gft data fetch mnist")
    mnist = data.load("mnist")
    assert [len(split[0]) for split in (mnist.train, mnist.val, mnist.test)] == [50_000, 10_000, 10_000]
    assert mnist.train[0].mean().abs() < 0.01


def test_batches_resume_where_they_were():
    digits = data.load("digits")
    every = [x for (x, _), _ in zip(digits.batches(500, seed=3), range(7), strict=False)]
    later = [x for (x, _), _ in zip(digits.batches(500, seed=3, first_step=4), range(3), strict=False)]
    assert all(torch.equal(a, b) for a, b in zip(every[4:], later, strict=True))
    assert sorted(len(x) for x in every[:3]) == [200, 500, 500]
    assert not torch.equal(every[0], every[3])


# ---------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_builds_and_takes_a_step(name, tmp_path):
    result = run(recipes.find(name).changed(["width=16", "data=digits", "steps=2", "batch=32"]), tmp_path / "run")
    assert 0 <= result["value"] <= 100
    on_grid = name.count("fp") == 0
    assert (result["quantized_params"] > 0) == on_grid
    assert result["bytes_per_weight"] == (4 if not on_grid else 1 if not name.endswith("paper") else
                                          pytest.approx(0.25 if result["bits"] == 2 else 0.5, rel=0.05))


def test_recipe_settings_are_read_by_type_and_checked():
    recipe = recipes.find("mnist-dnn-quantized-2bit").changed(["lr=0.07", "memory=false", "depth=7", "norm=rms"])
    assert (recipe.lr, recipe.memory, recipe.depth, recipe.norm) == (0.07, False, 7, "rms")
    for bad in ("lr", "nonsense=1", "depth=many", "memory=perhaps", "norm=layer", "steps=0", "name=x", "paper=3"):
        with pytest.raises(ValueError, match=bad.split("=")[0]):
            recipe.changed([bad])
    with pytest.raises(ValueError, match="did you mean mnist-dnn-fp"):
        recipes.find("mnist-dnn-ff")


def test_dnn_has_the_papers_parameters():
    with torch.device("meta"):
        model = DNN(784, 10)
    sizes = [layer.weight.numel() for layer in model.layers]
    assert sum(sizes) == 53_583_872  # the paper: 53.6M
    assert sizes[0] + sizes[-1] == 3_252_224  # the paper's FP32 part of the hybrid: 3.22M


@pytest.mark.parametrize(("quantize", "bits", "updates", "total_bits", "joules"), [
    ("none", 32, 105e9, 1.72e9, 1.54), ("hidden", 4, 24.08e9, 304.56e6, 0.60), ("hidden", 2, 24.08e9, 203.8e6, 0.57),
    ("all", 4, 18.91e9, 214.4e6, 0.54), ("all", 3, 18.91e9, 160.8e6, 0.54), ("all", 2, 18.91e9, 107.2e6, 0.50)])
def test_accounting_gives_the_papers_columns(quantize, bits, updates, total_bits, joules):
    total, outer, steps = 53_583_872, 3_252_224, 1960
    fp32 = {"none": total, "hidden": outer, "all": 0}[quantize]
    assert energy.updates_estimated(fp32, total - fp32, steps) == pytest.approx(updates, rel=0.015)
    assert energy.bits_total(fp32, total - fp32, bits) == pytest.approx(total_bits, rel=0.015)
    assert energy.energy_estimate_j(fp32, total - fp32, bits, steps) == pytest.approx(joules, abs=0.006)


# ---------------------------------------------------------------------------------------------------- runs


FIELDS = {"recipe", "metric", "value", "split", "steps", "seed", "fp32_params", "quantized_params", "bits",
          "updates_estimated", "updates_actual", "energy_estimate_j", "wall_s", "device", "torch", "commit"}


def test_run_folder_can_be_read_back(tmp_path):
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("digits-hybrid-4bit", 96.0), ("digits-quantized-2bit", 96.0)])
def test_default_settings_learn_the_digits(name, least, tmp_path):
    assert run(recipes.find(name).changed(["steps=240"]), tmp_path / "run")["value"] >= least


def test_same_seed_gives_the_same_run(tmp_path):
    recipe = recipes.find("mnist-dnn-quantized-2bit").changed(TINY)
    values = [run(recipe, tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert values[0]["updates_actual"] == values[1]["updates_actual"] != values[2]["updates_actual"]


def test_nan_loss_stops_the_run_and_keeps_the_checkpoint(tmp_path):
    recipe = recipes.find("mnist-dnn-fp").changed([*TINY, "dense_lr=1e30", "norm=none", "steps=200"])
    with pytest.raises(train.TrainingError, match=r"the loss became .* try a smaller"):
        run(recipe, tmp_path / "run", checkpoint_every=1)
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_folder_with_a_run_is_never_overwritten(tmp_path):
    recipe = recipes.find("mnist-dnn-quantized-2bit").changed(TINY)
    first = run(recipe, tmp_path / "run")
    with pytest.raises(train.TrainingError, match="--resume"):
        run(recipe, tmp_path / "run")
    with pytest.raises(train.TrainingError, match="lr"):
        run(recipe.changed(["lr=0.05"]), tmp_path / "run", resume=True)
    assert run(recipe, tmp_path / "run", resume=True) == first


def test_reproduce_writes_a_table_and_resumes(tmp_path, monkeypatch):
    settings = ["width=16", "data=digits", "steps=20", "batch=100"]
    rows = tables.reproduce("mnist-dnn", tmp_path, seeds=2, rows=["fp", "quantized-2bit"], settings=settings, device="cpu")
    assert [row["name"] for row in rows] == ["Full-Precision", "Quantized 2bit"]
    assert all(row["n"] == 2 and row["gap"] == pytest.approx(row["mean"] - row["paper"]) for row in rows)
    text = (tmp_path / "table.md").read_text()
    assert "gft reproduce mnist-dnn --seeds 2" in text
    assert (tmp_path / "curves.png").stat().st_size > 1000
    monkeypatch.setattr(train, "build_model", None)  # a second pass must not train anything
    assert tables.reproduce("mnist-dnn", tmp_path, seeds=2, rows=["fp", "quantized-2bit"], settings=settings,
                            device="cpu") == rows


def test_reproduce_runs_side_by_side(tmp_path):
    settings = ["width=16", "data=digits", "steps=20", "batch=100"]
    (row,) = tables.reproduce("depth", tmp_path, seeds=2, rows=["depth-3"], settings=settings, device="cpu", jobs=2)
    assert row["n"] == 2
    with pytest.raises(ValueError, match="names no row"):
        tables.reproduce("depth", tmp_path, rows=["depth-4"])


def test_short_numbers():
    assert [report.short(n) for n in (53_583_872, 12.0, 1.05e11, 3_220)] == ["53.6M", "12", "105B", "3.22K"]
