"""Recipes: every experiment builds, settings are read and checked, and a recipe becomes the optimizer it describes."""

import dataclasses
import json

import pytest

import gft
from gft.errors import UsageError
from gft.lab import build, data, older, recipes, tables
from gft.lab.recipe import PARTS, Integers, Recipe, dotted
from gft.layers import quantized_layers

# A recipe of each kind of network in each variant, and every other method, at different bits.
TRAINED = ["mnist-dnn-fp", "mnist-dnn-hybrid-4bit", "mnist-dnn-quantized-3bit-packed", "mnist-dnn-quantized-2bit-paper",
           "shakespeare-gpt-hybrid1-2bit", "shakespeare-gpt-hybrid2-4bit-packed", "mnist-vit-hybrid2-3bit-paper",
           "imagenette-vit-hybrid2-4bit", "imagenette-vit-hybrid2-3bit-packed", "imagenette-vit-hybrid1-2bit-packed",
           "mnist-dnn-depth-2", "mnist-baselines-ste-3bit", "mnist-baselines-signsgd-4bit", "mnist-baselines-bop-2bit",
           "mnist-baselines-dqt-4bit"]


def test_every_recipe_builds(small):
    sources = {name: data.load(name) for name in ("digits", "digits-images", "verses")}
    for name in recipes.RECIPES:
        recipe = small(name)
        model = build.build_model(recipe, sources[recipe.data.name])
        build.build_scheduler(recipe, build.build_optimizer(recipe, model, 0))
        assert bool(quantized_layers(model)) == (recipe.integers.layers != "none" and recipe.integers.method == "gft")


@pytest.mark.parametrize("name", TRAINED)
def test_recipes_take_steps_and_store_what_they_say(name, small, run, tmp_path):
    result = run(small(name), tmp_path / "run")
    assert 0 <= result["value"] <= 100
    on_grid = not name.endswith("fp")
    assert (result["quantized_params"] > 0) == on_grid
    packed = recipes.variant_of(name) != "default"
    latent = recipes.find(name).integers.method == "ste"
    assert result["bytes_per_weight"] == (4 if not on_grid or latent else 1 if not packed else
                                          pytest.approx(0.25 if result["bits"] == 2 else 0.5, rel=0.05))


def test_tables_hold_their_rows_in_each_variant():
    assert [len(tables.recipes_of("mnist-vit", variant)) for variant in ("default", "paper", "packed")] == [7, 6, 6]
    assert {"gft", "ste", "signsgd", "bop", "dqt"} == {one.integers.method for one in tables.recipes_of("baselines")}
    with pytest.raises(UsageError, match="no variant 'best'"):
        tables.recipes_of("depth", "best")


# ---------------------------------------------------------------------------------------------------- settings


def test_settings_are_read_by_type_with_or_without_their_part():
    recipe = recipes.find("mnist-dnn-quantized-2bit").changed(
        ["integers.lr=0.07", "dense.lr=0.002", "memory=false", "threshold=2.5", "depth=7", "norm=batch", "data=digits",
         "schedule.steps=9", "integers.threshold=none", "second_moment=running"])
    integers = recipe.integers
    assert (integers.lr, recipe.dense.lr, integers.memory, integers.threshold) == (0.07, 0.002, False, None)
    assert (recipe.model.depth, recipe.model.norm, recipe.data.name, recipe.schedule.steps) == (7, "batch", "digits", 9)
    assert integers.second_moment == "running"
    assert recipe.name == "mnist-dnn-quantized-2bit"


@pytest.mark.parametrize(("setting", "says"), [
    ("lr=0.1", "say which lr it is, integers.lr or dense.lr"),
    ("name=x", "say which name it is, data.name or model.name"),
    ("depth", "write KEY=VALUE, like integers.lr=0.2 or width=64"),
    ("nonsense=2", "no setting 'nonsense'; gft train --help lists the settings"),
    ("treshold=2", "no setting 'treshold'; did you mean threshold or"),
    ("dense.width=3", "dense has no 'width'; choose one of lr, weight_decay, beta2, optimizer, clip, blocks"),
    ("paper=3", "no setting 'paper'"),
    ("depth=many", "depth takes a value of type int"),
    ("inertia=much", "inertia takes a value of type float or none"),
    ("memory=perhaps", "memory='perhaps': choose one of True, False, half"),
    ("norm=layer", "norm='layer': choose one of rms, batch, none"),
    ("steps=0", "steps=0: give at least 1"),
    ("bits=9", "bits=9: integer layers have 2 to 8 bits"), ("compute=fp4", "compute='fp4': choose one of None, bf16"),
    ("eval_crop=0", "eval_crop=0.0"), ("eval_crop=0.5", "is for images"),
    ("whole_images=1", "whole_images=1.0"), ("whole_images=0.5", "is for images"),
    ("dropout=1", "dropout=1.0"), ("p_min=2", "a probability"), ("dense.lr=-1", "lr=-1.0: give at least 0"),
    ("data=cifar", "no data set 'cifar'"), ("bop_threshold=-1", "bop_threshold=-1.0"),
])
def test_settings_that_make_no_sense_are_refused_in_a_sentence(setting, says, refuses):
    with refuses(UsageError, says.replace(".", r"\.")):
        recipes.find("mnist-dnn-quantized-2bit").changed([setting])


@pytest.mark.parametrize(("settings", "unused"), [
    (["second_moment=step"], "second_moment=step would not be used: it needs rule=rounding and memory=false"),
    (["rule=topk", "threshold=2"], "threshold=2.0"), (["memory=false", "inertia=0.5"], "inertia"), (["p_min=0.1"], "p_min"),
    (["rule=topk", "inertia=0.5"], "inertia"), (["rule=topk", "orthogonalize=true"], "give orthogonalize=false"),
    (["vote_per=sequence"], "vote_per=sequence would not be used: it needs vote=sign"),
    (["literal_mask=true"], "literal_mask"), (["attention_inertia=0.5"], "attention_inertia"),
])
def test_settings_that_would_not_be_used_are_refused(settings, unused, refuses):
    with refuses(UsageError, unused):
        recipes.find("mnist-dnn-quantized-2bit").changed(settings)
    recipes.find("mnist-dnn-fp").changed(settings)  # where there are no integers nothing is asked of them


@pytest.mark.parametrize("setting", ["scales=row", "compute=fp8", "gain=true"])
def test_settings_of_integers_are_refused_where_there_are_none(setting, refuses):
    with refuses(UsageError, f"integers.{setting} would not be used: it needs method=gft and integer layers"):
        recipes.find("mnist-dnn-fp").changed([setting])


def test_recipes_that_do_not_exist_are_met_with_a_near_one(refuses):
    with refuses(UsageError, "did you mean mnist-dnn-fp"):
        recipes.find("mnist-dnn-ff")


def test_a_config_is_read_back_and_lacks_nothing_that_came_later():
    recipe = recipes.find("imagenette-vit-hybrid2-3bit-packed")
    config = json.loads(json.dumps(recipe.config()))
    assert Recipe.of({**config, "seed": 3}) == recipe
    del config["model"]["positions"], config["integers"]["init"]
    assert Recipe.of(config) == recipe.changed(["positions=random"])


def test_dotted_names_are_those_that_set_takes():
    names = [key for key in dotted(recipes.find("digits-fp").config()) if "." in key]
    assert names == [f"{part}.{field.name}" for part, kind in PARTS.items() for field in dataclasses.fields(kind)]


# ---------------------------------------------------------------------------------------------------- to an optimizer


def groups_of(recipe):
    model = build.build_model(recipe, data.load(recipe.data.name))
    return build.build_optimizer(recipe, model, 5).optimizers[0].param_groups, model


def test_the_papers_variant_trains_by_the_papers_settings(small):
    (group,), _ = groups_of(small("mnist-dnn-hybrid-3bit-paper"))
    assert {key: group[key] for key in gft.PAPER} == dict(gft.PAPER)
    assert group["seed"] == 5


@pytest.mark.parametrize(("fixed", "changes"), [
    ([], {"inertia": 0.3, "orthogonalize": True, "vote": "ternary", "lr": 0.03, "compute": "fp8"}),
    (["memory=false"], {"threshold": 2.5, "second_moment": "running", "vote": "int4"}),
    (["rule=topk", "vote=sign"], {"p_min": 0.3, "vote_per": "sequence", "literal_mask": True, "lr": 0.3}),
], ids=["with memory", "packed", "topk"])
def test_every_integer_setting_changes_what_is_trained(fixed, changes, small, run, tmp_path):
    recipe = small("verses-gpt-hybrid2-2bit", "steps=5", *fixed)
    changed = {key: run(recipe.updated(integers={key: value}), tmp_path / key) for key, value in changes.items()}
    updates = [result["updates_actual"] for result in (run(recipe, tmp_path / "as it is"), *changed.values())]
    assert len(set(updates)) == 1 + len(changes)


@pytest.mark.parametrize(("name", "rates"), [("verses-gpt-hybrid1-4bit", [0.2]), ("verses-gpt-hybrid2-2bit", [0.2, 0.05])])
def test_integer_attention_may_learn_in_its_own_way(name, rates, small):
    groups, model = groups_of(small(name, "integers.lr=0.2", "inertia=0", "attention_lr=0.05"))
    assert [group["lr"] for group in groups] == rates
    of_each = [[block.mlp.up for block in model.blocks], [block.attention.qkv for block in model.blocks]]
    expected = [[layer.qweight for layer in layers] for layers in of_each[:len(rates)]]
    assert [group["params"][::2] for group in groups] == expected


def test_learning_rates_rise_then_fall_to_nothing(small):
    recipe = small("verses-gpt-hybrid1-4bit", "steps=20", "warmup=5", "integers.lr=0.5")
    model = build.build_model(recipe, data.load("verses"))
    optimizer = build.build_optimizer(recipe, model, 0)
    scheduler = build.build_scheduler(recipe, optimizer)
    rates = []
    for _ in range(20):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step(); scheduler.step()
    shares = [rate[0] / 0.5 for rate in rates]
    assert shares == pytest.approx([rate[1] / recipe.dense.lr for rate in rates])
    assert shares[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert shares[5:] == pytest.approx([(20 - step) / 15 for step in range(5, 20)])
    assert optimizer.param_groups[0]["lr"] == 0


def test_the_rate_of_floats_may_stay_where_it_is(small, refuses):
    def rates_of(name, *settings):
        recipe = small(name, "steps=8", "warmup=1", *settings)
        model = build.build_model(recipe, data.load(recipe.data.name))
        optimizer = build.build_optimizer(recipe, model, 0)
        scheduler, rates = build.build_scheduler(recipe, optimizer), []
        for _ in range(8):
            rates.append([group["lr"] / group["initial_lr"] for group in optimizer.param_groups])
            optimizer.step(); scheduler.step()
        return list(zip(*rates, strict=True))

    falls, both_fall = rates_of("verses-gpt-hybrid1-4bit")
    own, stays = rates_of("verses-gpt-hybrid1-4bit", "floats_fall=false")
    assert falls == both_fall == own
    assert own[-1] < 0.2
    assert stays == (0.5, *[1.0] * 7)
    assert rates_of("verses-gpt-fp", "floats_fall=false") == [stays]
    with refuses(UsageError, "nothing in digits-quantized-2bit is a float"):
        rates_of("digits-quantized-2bit", "floats_fall=false")
    with refuses(UsageError, "not from those of method=dqt"):
        rates_of("verses-gpt-hybrid1-4bit", "floats_fall=false", "method=dqt", "integers.lr=0.001")


# ---------------------------------------------------------------------------------------------------- older results


def test_flat_settings_of_older_results_have_todays_names_and_units():
    flat = {"name": "x", "table": "t", "row": "r", "paper": None, "metric": "loss", "data": "verses", "model": "gpt",
            "quantize": "blocks", "bits": 3, "memory": False, "rule": "rounding", "vote": "int8", "lr": 0.2, "inertia": 0.0,
            "quorum": 5.7, "sizes": "running", "directions": "even", "threshold": 2.0, "dense_lr": 0.01, "whole": 0.0,
            "p_min": 0.001, "sample": "token", "mask": "none"}
    recipe = Recipe.of(older.in_parts(flat))
    assert recipe.integers == Integers("blocks", 3, memory=False, lr=0.2, threshold=2.01438, second_moment="running",
                                       orthogonalize=True)
    assert (recipe.dense.lr, recipe.data.name, recipe.model.name) == (0.01, "verses", "gpt")
    with_memory = Recipe.of(older.in_parts({**flat, "bits": 2, "memory": True}))
    assert (with_memory.integers.threshold, with_memory.integers.inertia) == (None, 0.0)
    coarse = Recipe.of(older.in_parts({**flat, "bits": 2, "quorum": 8.5}))
    assert coarse.integers.threshold == 3.0
    paper = Recipe.of(older.in_parts({**flat, "rule": "topk", "vote": "sign", "sample": "sequence", "directions": "voted"}))
    assert (paper.integers.p_min, paper.integers.vote_per, paper.integers.orthogonalize) == (0.001, "sequence", False)
