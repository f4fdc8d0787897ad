"""Running means of a model's float values; and packing, which changes none of them."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import gft
from gft.layers import quantized_layers


def network(**options) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 12), nn.ReLU(),
                          nn.Linear(12, 3))
    return gft.quantize_(model, filter_fn=lambda module, name: name in ("0", "4"), **options)


def trained(model: nn.Module, after_step=lambda model: None, steps: int = 12) -> nn.Module:
    x = torch.randn(48, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0, 0, 0] > 0).long() + (x[:, 0, 1, 1] > 0).long()
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.5), torch.optim.AdamW(gft.dense(model), lr=1e-2))
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        after_step(model)
    optimizer.optimizers[0].release()
    return model


@pytest.mark.parametrize("decay", [None, 0.8])
@pytest.mark.parametrize("options", [{"bits": 2}, {"bits": 4, "memory": False}, {"bits": 3, "scales": 9}], ids=str)
def test_an_average_is_that_of_the_float_models_torch_would_have_averaged(options, decay):
    model = network(**options)
    average = gft.averaged(model, decay)
    expected = AveragedModel(gft.dequantize_(copy.deepcopy(model)),
                             multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))

    def update(model):
        average.update_parameters(model)
        expected.update_parameters(gft.dequantize_(copy.deepcopy(model)))

    trained(model, update)
    for (name, one), other in zip(average.module.named_parameters(), expected.module.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6), name
    assert all(map(torch.equal, average.buffers(), expected.buffers()))
    assert not torch.allclose(average.module[4].weight, model[4].float_weight(), atol=1e-3)
    update_bn([torch.randn(8, 1, 5, 5)], average)
    assert average(torch.randn(2, 1, 5, 5)).isfinite().all()
    average.load_state_dict(average.state_dict())
    gft.quantize_(average.module, bits=4, init="fit", filter_fn=lambda module, name: name in ("0", "4"))


def test_torchs_own_average_of_integers_is_refused(refuses):
    model = network()
    with refuses(ValueError, r"gft\.averaged\(model\)"):
        AveragedModel(model)
    with refuses(ValueError, "AveragedModel averages float ones"):
        gft.averaged(nn.Linear(2, 2))
    with refuses(ValueError, "decay=1.5"):
        gft.averaged(model, 1.5)


@pytest.mark.parametrize("options", [{"bits": 2}, {"bits": 2, "memory": "half"}, {"bits": 3, "scales": 9},
                                     {"bits": 4, "scales": "row"}], ids=str)
def test_packing_keeps_every_output_to_the_bit_in_a_fraction_of_the_bytes(options):
    model = trained(network(**options)).eval()
    x = torch.randn(5, 1, 5, 5)
    y, levels = model(x), [layer.levels() for layer in quantized_layers(model).values()]
    before = sum(layer.qweight.nbytes for layer in quantized_layers(model).values())
    assert gft.pack_(model) is model
    assert torch.equal(model(x), y)
    assert all(map(torch.equal, levels, (layer.levels() for layer in quantized_layers(model).values())))
    after = sum(layer.qweight.nbytes for layer in quantized_layers(model).values())
    share = (0.25 if options["bits"] == 2 else 0.5) * (2 if options.get("memory") == "half" else 1)
    assert after <= before * share * 1.1  # rows end on a byte
    gft.pack_(model)  # what is packed stays so
    trained(model.train())
    assert not torch.equal(model.eval()(x), y)


def test_packing_a_model_in_training_is_refused_and_changes_nothing(refuses):
    model = network()
    optimizer = gft.GFT(gft.quantized(model))
    with refuses(ValueError, r"release\(\) first"):
        gft.pack_(model)
    assert all(layer.memory for layer in quantized_layers(model).values())
    optimizer.release()
    gft.pack_(model)
    with refuses(ValueError, "no quantized layer"):
        gft.pack_(nn.Linear(2, 2))
