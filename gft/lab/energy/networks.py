"""The recipes' networks as an estimate of energy needs them: parameters counted and products listed, without any data.

Everything is built on torch's meta device, so that nothing is allocated or computed.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch

import gft
from gft.lab import data as datasets
from gft.lab import tables
from gft.lab.build import DataSet, build_float_model, build_model
from gft.lab.energy.estimate import Joules, Product, products, rule_extras_j, step_energy
from gft.lab.energy.paper import Counts
from gft.lab.recipe import SEES_IMAGES, Recipe
from gft.layers import quantized_layers

# One sample of each of the paper's data sets: their shapes are known, so that an estimate needs no download.
SHAPES = {"mnist": (784,), "mnist-images": (1, 28, 28), "imagenette": (3, 224, 224)}
CHARACTERS = 65  # of Tiny Shakespeare


class Network(NamedTuple):
    """What an estimate needs to know of a recipe."""

    counts: Counts
    products: list[Product]
    shapes: list[tuple[int, int]]  # (out, in) of the integer layers

    def step(self, recipe: Recipe, precision: str, node: str, moved: float | None = None) -> Joules:
        """Joules of one training step; `moved` as in estimate.gft_step_pj."""
        joules = step_energy(self.products, *self.counts, recipe.integers.bits, precision, node, moved)
        added = rule_extras_j(recipe.integers, self.shapes, node)
        return dataclasses.replace(joules, optimizer=joules.optimizer + added)


def stand_in(name: str, context: int | None = None) -> DataSet:
    """A data set with the shape of the one named, or that itself."""
    if name == "shakespeare":
        return datasets.Text.of("".join(map(chr, range(33, 33 + CHARACTERS))) * 100)
    if name not in SHAPES:
        return datasets.load(name, context)
    split = torch.zeros(1, *SHAPES[name]), torch.zeros(1, dtype=torch.long)
    return datasets.Dataset(split, split, split)


@functools.cache
def network(recipe: Recipe) -> Network:
    """The recipe's network with the products of a step that leaves patches out as the recipe says."""
    data, batch = stand_in(recipe.data.name, recipe.data.context), recipe.data.batch
    with torch.device("meta"):
        float_model = build_float_model(recipe, data)
        # Its integers start anew: there are no float values to keep on this device.
        model = build_model(recipe.updated(integers={"init": "paper"}), data)
    layers = quantized_layers(model)
    shapes = [(layer.rows, layer.columns) for layer in layers.values()]
    integers = sum(out * features for out, features in shapes)
    if not isinstance(data, datasets.Dataset):
        x = torch.zeros(batch, data.context, dtype=torch.long, device="meta")
    else:
        shape = data.shape if recipe.model.name in SEES_IMAGES else (data.inputs,)
        x = torch.zeros(batch, *shape, device="meta")
    counts = Counts(sum(parameter.numel() for parameter in gft.dense(model)), integers)
    return Network(counts, products(float_model, x, layers), shapes)


def whole_images(recipe: Recipe) -> Recipe:
    """The recipe without patch dropout."""
    return recipe.updated(model={"patch_dropout": 0.0})


def over_a_run(recipe: Recipe) -> Network:
    """`network` with the products of the mean step of a whole training, whose last steps may see every patch."""
    share = recipe.schedule.whole_images
    own, at_the_end = network(recipe), network(whole_images(recipe))
    mean = [dataclasses.replace(some, macs=round((1 - share) * some.macs + share * every.macs))
            for some, every in zip(own.products, at_the_end.products, strict=True)]
    return own._replace(products=mean)


def networks(table: str) -> dict[str, Network]:
    """A row's name -> the paper's network, which sees every patch of an image at every step. Rows that differ in bits alone
    share one."""
    made: dict[str, Network] = {}
    for recipe in tables.recipes_of(table):
        if recipe.integers.layers not in made:
            made[recipe.integers.layers] = network(whole_images(recipe))
    return {recipe.row: made[recipe.integers.layers] for recipe in tables.recipes_of(table)}
