"""averaged: a running mean of a model's float values (EMA, SWA), for evaluation.

Integers cannot be averaged in place: between -1 and 0 there is nothing, and the low bits of a byte with memory mean
something else than its high bits. So the mean is kept of what the levels stand for, by a float copy of the model.

    average = gft.averaged(model, decay=0.999)
    for x, y in batches:
        ...; optimizer.step()
        average.update_parameters(model)
    accuracy(average)                                   # a float model, as torch's AveragedModel
    gft.quantize_(average.module, bits=2, init="fit")   # back to integers, if it is to be shipped as such
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gft.convert import dequantize_
from gft.errors import UsageError
from gft.layers import quantized_layers
from gft.settings import check_number


class Averaged(AveragedModel):
    """torch's AveragedModel over the float values of a quantized model; `gft.averaged` makes one."""

    def __init__(self, model: nn.Module, multi_avg_fn: Callable[..., Any] | None = None, use_buffers: bool = False) -> None:
        super().__init__(dequantize_(copy.deepcopy(model)), multi_avg_fn=multi_avg_fn, use_buffers=use_buffers)

    def update_parameters(self, model: nn.Module) -> None:
        """Take the model's present values into the mean."""
        super().update_parameters(_FloatValues(model, self.module))  # type: ignore[arg-type]


class _FloatValues:
    """A model's parameters and buffers, as its float copy has them: a layer's levels as floats, no scale, no gain."""

    def __init__(self, model: nn.Module, like: nn.Module) -> None:
        self.model, self.like, self.layers = model, like, quantized_layers(model)

    def parameters(self) -> Iterator[Tensor]:
        for name, _ in self.like.named_parameters():
            owner, _, own = name.rpartition(".")
            yield self.layers[owner].float_weight() if owner in self.layers and own == "weight" else (
                self.model.get_parameter(name))

    def buffers(self) -> Iterator[Tensor]:
        for name, _ in self.like.named_buffers():
            yield self.model.get_buffer(name)


def averaged(model: nn.Module, decay: float | None = None, *, use_buffers: bool = False) -> Averaged:
    """A float copy of a quantized model that averages its values over time, as torch.optim.swa_utils.AveragedModel does.

    decay: None: the mean of all that `update_parameters(model)` has seen (SWA). 0.999: an exponential mean that remembers
        some thousand of them (EMA). At 0 it is the model's last state, near 1 it hardly moves from its first.
    use_buffers: average the buffers too (batch norm's statistics); by default they are the last ones.
    """
    if not quantized_layers(model):
        raise UsageError("no quantized layer in this model; torch.optim.swa_utils.AveragedModel averages float ones")
    if decay is not None:
        check_number("decay", decay, 0.0, 1.0, "it is the share of the mean that stays in an update")
    return Averaged(model, None if decay is None else get_ema_multi_avg_fn(decay), use_buffers)


def _refuse_averages_of_integers(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """torch's own AveragedModel would average the bytes of integer weights without a word."""
    if isinstance(module, AveragedModel) and submodule is not None and quantized_layers(submodule):
        raise UsageError("torch's AveragedModel would average the bytes of integer weights; use gft.averaged(model), which "
                         "averages what they stand for")


register_module_module_registration_hook(_refuse_averages_of_integers)
