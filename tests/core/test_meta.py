"""Models that are built on the meta device, without memory, and get their values later."""

from collections.abc import Callable

import pytest
import torch
from helpers import equal, hybrid_of, train, weights_of
from torch import nn

import gft
from gft.layers import quantized_layers


class Small(nn.Module):
    """A convolution, a linear layer with a bias, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x).mean((-1, -2))))


def built_on_meta(**settings: object) -> nn.Module:
    with torch.device("meta"):
        return gft.quantize_(Small(), **settings)  # type: ignore[arg-type]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(8, 1, 6, 6), torch.randint(5, (8,))) for _ in range(3)]


@pytest.mark.parametrize("settings", [{"bits": 4}, {"bits": 2, "memory": False}, {"bits": 3, "memory": False, "gain": True}],
                         ids=["memory", "packed", "spare bits and gains"])
@pytest.mark.parametrize("fill", ["assign", "to_empty"])
def test_a_model_quantized_on_the_meta_device_is_filled_by_a_state_dict_and_trains_alike(settings, fill):
    there = gft.quantize_(Small(), **settings)
    model = built_on_meta(**settings)
    assert all(parameter.is_meta for parameter in model.parameters())
    if fill == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(there.state_dict(), assign=fill == "assign")
    data = batches()
    for one in (there, model):
        train(one, hybrid_of(one), data)
    assert equal(weights_of(there), weights_of(model))
    assert not equal(weights_of(model), weights_of(gft.quantize_(Small(), **settings)))


def test_a_model_quantized_on_the_meta_device_takes_no_memory_and_draws_no_random_numbers(rng_untouched: Callable):
    with rng_untouched():
        model = built_on_meta(bits=2, init="variance")
    assert {layer.qweight.device.type for layer in quantized_layers(model).values()} == {"meta"}


def test_a_meta_layer_keeps_the_float_type_of_the_layer_it_replaces():
    with torch.device("meta"):
        model = gft.quantize_(Small().double(), bits=4)
    model.load_state_dict(gft.quantize_(Small().double(), bits=4).state_dict(), assign=True)
    assert model.head.dtype is torch.float64
    assert model(torch.randn(2, 1, 6, 6, dtype=torch.float64)).dtype is torch.float64


def test_a_weight_without_values_is_not_trained(refuses):
    model = built_on_meta(bits=2)
    with refuses(gft.UsageError, "on the meta device, without values"):
        gft.GFT(gft.quantized(model))


def test_loading_with_assign_into_a_trained_model_lets_a_new_optimizer_find_the_new_weights():
    model, other = gft.quantize_(Small(), bits=4), gft.quantize_(Small(), bits=4)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    model.load_state_dict(before, assign=True)
    train(model, hybrid_of(model), batches())
    assert any(not torch.equal(layer.qweight, other.get_submodule(name).qweight)
               for name, layer in quantized_layers(model).items())
