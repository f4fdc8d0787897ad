"""The lab: recipes, and runs that can be read back."""

import json
import math
import queue
import shutil

import pytest
import torch

from gft import energy
from gft.lab import build, data, recipes, report, tables, train
from gft.lab.data.augment import middle
from gft.lab.models import DNN, GPT, ViT, vit

TINY = ["width=24", "depth=3", "steps=30", "data=digits", "batch=64"]
# What makes any recipe of a model small enough for a test.
SMALL = {"dnn": ["data=digits", "width=16"], "gpt": ["data=verses", "width=16", "depth=2", "heads=2"],
         "vit": ["data=digits-images", "width=16", "depth=2", "heads=2", "patch=4"]}


def small(name, *settings):
    recipe = recipes.find(name)
    return recipe.changed([*SMALL[recipe.model], "steps=2", "batch=16", "warmup=1", *settings])


def run(recipe, folder, **options):
    return list(train.training(recipe, folder, device="cpu", **options))[-1].result


# ---------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_builds_and_takes_a_step(name, tmp_path):
    result = run(small(name), tmp_path / "run")
    assert 0 <= result["value"] <= 100
    on_grid = not name.endswith("fp")
    assert (result["quantized_params"] > 0) == on_grid
    packed = recipes.variant_of(name) != "default"
    latent = recipes.find(name).method == "ste"
    assert result["bytes_per_weight"] == (4 if not on_grid or latent else 1 if not packed else
                                          pytest.approx(0.25 if result["bits"] == 2 else 0.5, rel=0.05))


def test_recipes_hold_every_row_of_the_papers_tables():
    counts = {table: len(tables.recipes_of(table)) for table in tables.TITLES}
    assert counts == {"mnist-dnn": 7, "shakespeare-gpt": 7, "mnist-vit": 7, "imagenette-vit": 7, "depth": 5, "baselines": 17}
    assert len(tables.recipes_of("mnist-vit", "paper")) == len(tables.recipes_of("mnist-vit", "packed")) == 6
    with pytest.raises(ValueError, match="no variant 'best'"):
        tables.recipes_of("depth", "best")


def test_recipe_settings_are_read_by_type_and_checked():
    recipe = recipes.find("mnist-dnn-quantized-2bit").changed(["lr=0.07", "memory=false", "depth=7", "norm=rms"])
    assert (recipe.lr, recipe.memory, recipe.depth, recipe.norm) == (0.07, False, 7, "rms")
    for bad in ("lr", "nonsense=1", "depth=many", "memory=perhaps", "norm=layer", "steps=0", "name=x", "paper=3",
                "eval_crop=0", "eval_crop=1.5", "eval_crop=0.5", "whole=0.5", "whole=1"):
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


def images(channels, size):
    split = torch.zeros(1, channels, size, size, dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
    return data.Dataset(split, split, split, mean=(0.5,) * channels, std=(0.3,) * channels)


@pytest.mark.parametrize(("table", "quantize", "fp32", "quantized"), [
    ("shakespeare-gpt", "none", 10_775_040, 0),  # 10.8M
    ("shakespeare-gpt", "mlp", 3_697_152, 7_077_888),  # 3.7M
    ("shakespeare-gpt", "blocks", 158_208, 10_616_832),  # 158.21K
    ("mnist-vit", "none", 37_869_578, 0),  # 37.87M
    ("mnist-vit", "mlp", 12_673_034, 25_165_824),  # 12.67M
    ("mnist-vit", "blocks", 65_546, 37_748_736),  # 70K
    ("imagenette-vit", "none", 38_329_866, 0),  # 38.33M
    ("imagenette-vit", "mlp", 13_133_322, 25_165_824),  # the paper prints 13.23M
    ("imagenette-vit", "blocks", 525_834, 37_748_736),  # the paper prints 1.03M; neither agrees with its own 38.33M
])
def test_transformers_have_the_papers_parameters(table, quantize, fp32, quantized):
    import gft

    recipe = next(one for one in tables.recipes_of(table) if one.quantize == quantize)
    source = {"shakespeare-gpt": data.Text.of("".join(map(chr, range(33, 98))) * 50, 256), "mnist-vit": images(1, 28),
              "imagenette-vit": images(3, 224)}[table]
    model = build.build_model(recipe, source)
    assert isinstance(model, GPT if recipe.model == "gpt" else ViT)
    assert sum(parameter.numel() for parameter in gft.dense(model)) == fp32
    layers = gft.layers.quantized_layers(model).values()
    assert sum(layer.grid.rows * layer.grid.columns for layer in layers) == quantized


def test_models_refuse_data_they_cannot_read():
    for name, source in (("shakespeare-gpt-fp", "digits"), ("mnist-dnn-fp", "verses"), ("mnist-vit-fp", "digits")):
        with pytest.raises(ValueError, match="choose"):
            build.build_model(recipes.find(name), data.load(source))
    with pytest.raises(ValueError, match="patch=5"):
        build.build_model(small("mnist-vit-fp", "patch=5"), data.load("digits-images"))
    with pytest.raises(ValueError, match="heads=3"):
        build.build_model(small("shakespeare-gpt-fp", "heads=3"), data.load("verses"))
    with pytest.raises(ValueError, match="context"):
        GPT(9, context=4, width=8, depth=1, heads=1)(torch.zeros(1, 5, dtype=torch.long))


def test_vit_leaves_patches_out_in_training_alone():
    torch.manual_seed(0)
    model, whole = (ViT(1, 8, 10, patch=2, width=16, depth=1, heads=2, patch_dropout=share) for share in (0.75, 0.0))
    whole.load_state_dict(model.state_dict())
    for one in (model, whole):
        torch.nn.init.normal_(one.head.weight, generator=torch.Generator().manual_seed(1))
    x, seen = torch.randn(3, 1, 8, 8), []
    for one in (model, whole):
        one.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    first, second = model(x), model(x)
    assert not torch.equal(first, second)  # other patches each time
    assert not torch.equal(first, whole(x))
    assert torch.equal(model.eval()(x), whole.eval()(x))
    model.see_whole_images()
    assert torch.equal(model.train()(x), whole.train()(x))
    assert seen == [5, 5, 17, 17, 17, 17, 17]  # 4 of 16 patches, and the class token
    some = vit.some_of(6, 4, torch.zeros(5, 1, 1, 1))
    assert some.shape == (5, 4)
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in some.tolist())


def test_the_last_steps_may_see_every_patch(tmp_path, monkeypatch):
    seen, forward = [], ViT.forward

    def counting(model, images):
        seen.extend([model.seen_in_training] if model.training else [])
        return forward(model, images)

    monkeypatch.setattr(ViT, "forward", counting)
    recipe = small("mnist-vit-hybrid2-2bit", "patch_dropout=0.75", "whole=0.4", "steps=5")
    whole = (8 // recipe.patch) ** 2
    for told in train.training(recipe, tmp_path / "run", device="cpu", checkpoint_every=1):
        if told.step == 4:
            break  # stopped among the last
    assert seen == [whole // 4] * 3 + [whole]
    seen.clear()
    run(recipe, tmp_path / "run", resume=True)
    assert seen == [whole]


def test_patches_are_cut_where_a_convolution_would_see_them(monkeypatch):
    torch.manual_seed(0)
    model = ViT(2, 6, 10, patch=2, width=8, depth=0, heads=2, patch_dropout=0.5)
    convolution = torch.nn.Conv2d(2, 8, 2, 2)
    convolution.load_state_dict({"weight": model.patches.weight.view(8, 2, 2, 2), "bias": model.patches.bias})
    seen = torch.tensor([[7, 0, 3, 5], [8, 2, 1, 4]])
    monkeypatch.setattr(vit, "some_of", lambda *_: seen)
    tokens = []
    model.dropout.register_forward_pre_hook(lambda module, inputs: tokens.append(inputs[0][:, 1:]))
    images = torch.randn(2, 6, 6, 2).permute(0, 3, 1, 2)  # channels last in memory
    model(images)
    model.eval()(images)
    some, whole = tokens
    torch.testing.assert_close(whole, convolution(images).flatten(2).transpose(1, 2) + model.positions[:, 1:])
    torch.testing.assert_close(some, torch.stack([row[places] for row, places in zip(whole, seen, strict=True)]))


def test_evaluation_sees_the_middle_alone():
    digits = data.load("digits-images")
    recipe, seen = small("mnist-vit-fp", "eval_crop=0.5", "eval_batch=100"), []
    model = build.build_model(recipe, digits)
    model.register_forward_pre_hook(lambda model, inputs: seen.append(inputs[0]))
    value = train.evaluate(model, digits, "val", recipe)
    whole, labels = digits.normalised(digits.val[0]), digits.val[1]
    torch.testing.assert_close(torch.cat(seen), middle(whole, 0.5))
    assert value == pytest.approx(100 * (model(middle(whole, 0.5)).argmax(1) == labels).double().mean().item())


def test_positions_of_waves_tell_neighbours():
    side, width = 6, 16
    model = ViT(1, 12, 10, patch=2, width=width, depth=1, heads=2, positions="waves")
    start = model.positions[0, 1:].detach()
    assert start.square().mean().sqrt().item() == pytest.approx(vit.POSITIONS_RMS)
    for row, column in ((0, 0), (2, 3), (5, 5)):
        angles = torch.tensor([place * 10000 ** (-n / 3) for place in (column, row) for n in range(4)]).view(2, 4)
        expected = torch.cat([part for one in angles for part in (one.sin(), one.cos())])
        assert torch.allclose(start[row * side + column], vit.POSITIONS_RMS * 2**0.5 * expected, atol=1e-6)
    apart = torch.cdist(start, start)
    right, above, two_right = apart[14, [15, 8, 16]].tolist()
    assert right == pytest.approx(above, rel=1e-4)
    assert right < two_right
    assert not torch.equal(model.positions, ViT(1, 12, 10, patch=2, width=width, depth=1, heads=2).positions)
    with pytest.raises(ValueError, match="width that 4 divides"):
        ViT(1, 12, 10, patch=2, width=6, depth=1, heads=2, positions="waves")
    with pytest.raises(ValueError, match="positions='circles': choose one of random, waves"):
        ViT(1, 12, 10, patch=2, width=8, depth=1, heads=2, positions="circles")


def test_gpt_sees_no_later_character():
    torch.manual_seed(0)
    model = GPT(20, context=12, width=16, depth=2, heads=2).eval()
    tokens = torch.randint(20, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 20
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


def test_rates_rise_then_fall_to_nothing():
    import gft

    recipe = small("verses-gpt-hybrid1-4bit", "steps=20", "warmup=5", "lr=0.5")
    model = build.build_model(recipe, data.load("verses"))
    optimizer = build.build_optimizer(recipe, model, 0)
    scheduler = build.build_scheduler(recipe, optimizer)
    rates = []
    for _ in range(20):
        rates.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step()
    shares = [rate[0] / 0.5 for rate in rates]
    assert shares == pytest.approx([rate[1] / recipe.dense_lr for rate in rates])
    assert shares[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert shares[5:] == pytest.approx([(20 - step) / 15 for step in range(5, 20)])
    assert optimizer.param_groups[0]["lr"] == 0
    assert isinstance(optimizer.optimizers[0], gft.GFT)


@pytest.mark.parametrize(("name", "ways"), [("verses-gpt-hybrid1-4bit", [(0.2, 0)]),
                                            ("verses-gpt-hybrid2-2bit", [(0.2, 0), (0.05, 0.9)])])
def test_integer_attention_may_learn_in_its_own_way(name, ways):
    recipe = small(name, "lr=0.2", "inertia=0", "attention_lr=0.05")
    model = build.build_model(recipe, data.load("verses"))
    groups = build.build_optimizer(recipe, model, 0).optimizers[0].param_groups
    assert [(group["lr"], group["inertia"]) for group in groups] == ways
    of_each = [[block.mlp.up.weight for block in model.blocks], [block.attention.qkv.weight for block in model.blocks]]
    assert [group["params"][::2] for group in groups] == of_each[:len(ways)]


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


def test_a_run_counts_the_joules_of_even_directions(tmp_path):
    voted, even = (run(small("verses-gpt-hybrid2-2bit", f"directions={how}"), tmp_path / how) for how in ("voted", "even"))
    block = [(48, 16), (16, 16), (64, 16), (16, 64)]
    assert even["energy_estimate_j"] - voted["energy_estimate_j"] == pytest.approx(2 * energy.even_directions_j(block * 2))


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


@pytest.mark.parametrize("title", sorted({tables.TITLES[recipe.table] + tables.SUBTITLES[recipes.variant_of(name)]
                                          for name, recipe in recipes.RECIPES.items() if recipe.table in tables.TITLES}))
def test_the_title_of_a_figure_is_within_it(title, tmp_path, monkeypatch):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    report.plot_curves({"Quantized 2bit": [[(1, 50.0), (2, 60.0)]]}, title, "accuracy", [tmp_path / "curves.png"])
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
    settings = ["width=16", "data=digits", "steps=20", "batch=100"]
    chosen = {"seeds": 2, "rows": ["fp", "quantized-2bit"], "settings": settings, "device": "cpu"}
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
    assert "even directions" not in text
    assert "even directions (Quantized 2bit)" in report.markdown("", [rows[0], {**rows[1], "directions": "even"}])
    # Other settings are other runs: the old line does not count as theirs.
    row = tables.reproduce({"mnist-dnn": elsewhere}, seeds=1, rows=["fp"], settings=[*settings, "dense_lr=0.01"],
                           device="cpu")["mnist-dnn"][0]
    assert row["n"] == 2
    fresh = json.loads((elsewhere / "runs.jsonl").read_text().splitlines()[0])
    assert fresh["config"]["dense_lr"] == 0.01
    (tmp_path / "runs.jsonl").write_text("not json")
    with pytest.raises(ValueError, match="line 1"):
        tables.read_lines(tmp_path)


def test_a_table_of_losses_says_that_lower_is_better(tmp_path):
    settings = [*SMALL["gpt"], "steps=6", "batch=4", "warmup=1", "eval_every=3"]
    (row,) = tables.reproduce({"shakespeare-gpt": tmp_path}, seeds=1, rows=["hybrid2-3bit"], variant="packed",
                              settings=settings, device="cpu")["shakespeare-gpt"]
    assert row["lower_is_better"]
    assert row["paper"] == 1.72
    assert row["bytes_per_weight"] == 0.5
    text = (tmp_path / "table.md").read_text()
    assert "lower is better" in text
    assert "--packed" in text


def test_reproduce_runs_tables_side_by_side(tmp_path):
    settings = ["width=16", "data=digits", "steps=20", "batch=100"]
    folders = {table: tmp_path / table for table in ("depth", "mnist-vit", "mnist-dnn")}
    written = tables.reproduce(folders, seeds=2, rows=["depth-3", "dnn-fp"], settings=settings, device="cpu", jobs=2)
    assert {table: [(row["recipe"], row["n"]) for row in rows] for table, rows in written.items()} == {
        "depth": [("mnist-dnn-depth-3", 2)], "mnist-dnn": [("mnist-dnn-fp", 2)]}
    assert "gft reproduce depth --seeds 2" in (tmp_path / "depth" / "table.md").read_text()
    assert not (tmp_path / "mnist-vit").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_stops_leaves_the_others_their_results(tmp_path, jobs, refuses):
    settings = ["width=16", "data=digits", "steps=20", "batch=100", "norm=none", "dense_lr=1e30"]
    folders = {table: tmp_path / table for table in ("mnist-dnn", "depth")}
    with refuses(train.TrainingError, "1 of 2 runs stopped and the others are done; the first is mnist-dnn-fp seed 0"):
        tables.reproduce(folders, seeds=1, rows=["dnn-fp", "depth-3"], settings=settings, device="cpu", jobs=jobs)
    assert json.loads((tmp_path / "depth" / "table.json").read_text())["rows"][0]["n"] == 1
    assert not (tmp_path / "mnist-dnn" / "table.json").exists()


def test_rows_that_no_table_has_are_refused(tmp_path, refuses):
    with refuses(ValueError, "--rows depth-4 names no row of depth, mnist-vit"):
        tables.reproduce({"depth": tmp_path / "a", "mnist-vit": tmp_path / "b"}, rows=["depth-4"])
    assert not any(tmp_path.iterdir())


def test_a_run_whose_table_was_killed_stops(tmp_path, monkeypatch):
    """Or the table, started again, would find it at work in its folder."""
    class Killed:
        def is_alive(self) -> bool:
            return False

    told: queue.Queue = queue.Queue()
    recipe = recipes.find("digits-quantized-2bit").changed(["width=16", "steps=60"])
    monkeypatch.setattr(tables.multiprocessing, "parent_process", Killed)
    threads = torch.get_num_threads()
    tables._work((recipe, 0, tmp_path / "run"), "cpu", told, threads)
    assert told.empty()
    assert not (tmp_path / "run" / "result.json").exists()


def test_short_numbers():
    assert [report.short(n) for n in (53_583_872, 12.0, 1.05e11, 3_220)] == ["53.6M", "12", "105B", "3.22K"]
