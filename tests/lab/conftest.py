"""What the lab's tests share: any recipe made small enough for a test, and a run of it."""

import pytest

from gft.lab import recipes, train
from gft.lab.data import folder

# What makes any recipe of a model small.
SMALL = {"dnn": ["data=digits", "width=16"], "gpt": ["data=verses", "width=16", "depth=2", "heads=2"],
         "llama": ["data=verses", "context=16", "vocabulary=none", "width=16", "depth=2", "heads=2"],
         "vit": ["data=digits-images", "width=16", "depth=2", "heads=2", "patch=4"],
         "resnet": ["data=digits-images", "width=4", "depth=1"], "cnn": ["data=digits-images", "width=4"]}


@pytest.fixture(scope="session")
def small():
    """small("mnist-vit-fp", "steps=5") -> the recipe with a tiny network, two steps and a few settings of one's own."""

    def make(name, *settings):
        recipe = recipes.find(name)
        return recipe.changed([*SMALL[recipe.model.name], "steps=2", "batch=16", "warmup=1", *settings])

    return make


@pytest.fixture(scope="session")
def run():
    """run(recipe, folder) -> its result."""

    def train_to_the_end(recipe, folder, **options):
        return list(train.training(recipe, folder, device="cpu", **options))[-1].result

    return train_to_the_end


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty data folder, and nothing of the user's own in reach."""
    monkeypatch.setenv("GFT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(folder, "_user_cache", lambda: tmp_path / "user")
    return tmp_path / "data"
