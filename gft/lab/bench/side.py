"""One side of a comparison: a network in training, by us or by AdamW, and the ways to run its step.

    eager       as it is written
    compiled    torch.compile(model), nothing else
    captured    the same, and all of the step one CUDA graph (gft.Captured); on a CPU, compiled
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor, nn

import gft
from gft.lab.bench.rows import say
from gft.lab.bench.works import Ours, Work
from gft.lab.muon import Muon
from gft.lab.recipe import MOMENTUM

STEPS = 8  # in one timing, so that the host can run ahead as it does in a training loop. More than gft.Captured warms up for
WAYS = {"eager": {"compiled": False, "captured": False}, "compiled": {"compiled": True, "captured": False},
        "captured": {"compiled": True, "captured": True}}

FLOAT8 = "float8 (torchao)"
MUON = " and Muon"  # behind a precision: for the body's matrices, AdamW for the rest


def has_float8() -> bool:
    """Is there a torchao that this torch can import? It is no dependency."""
    try:
        importlib.import_module("torchao.float8")
    except (ImportError, AttributeError) as error:  # the latter of a torch that it is not made for
        say(f"    no torchao to compare with: {error}")
        return False
    return True


def to_float8_(model: nn.Module, work: Work) -> None:
    """torchao's float8 training, a scale for each row of every factor: the recipe nearest to ours."""
    torchao = importlib.import_module("torchao.float8")
    torchao.convert_to_float8_training(model, config=torchao.Float8LinearConfig.from_recipe_name("rowwise"),
                                       module_filter_fn=work.filter_fn)


class Side:
    """`steps` is a function that takes one training step.

    ours: None leaves the network float.
    precision: "bf16" by autocast, or "fp32"; "bf16 and Muon"; or FLOAT8, bf16 with torchao's float8 products in the layers
        of the body.
    """

    def __init__(self, work: Work, device: torch.device, ours: Ours | None, precision: str, *,
                 memory: bool = True, in_backward: bool = False) -> None:
        torch.manual_seed(0)
        with device:  # a wide network takes long to draw on the CPU
            model = work.build()
        parts: list[torch.optim.Optimizer] = []
        if ours is not None:
            gft.quantize_(model, ours.bits, work.filter_fn, memory=memory, bias=work.bias, compute=ours.compute)
            rule = gft.Rounding(**MOMENTUM) if ours.momentum else gft.Rounding()
            parts.append(gft.GFT(gft.quantized(model), rule=rule, in_backward=in_backward))
        if precision == FLOAT8:
            to_float8_(model, work)
        rest = gft.dense(model)
        if precision.endswith(MUON):
            body = {id(module.weight): module.weight for name, module in model.named_modules()
                    if isinstance(module, nn.Linear) and work.filter_fn(module, name)}
            parts.append(Muon(body.values(), 1e-3))
            rest = [parameter for parameter in rest if id(parameter) not in body]
        if rest:
            parts.append(torch.optim.AdamW(rest, fused=True, capturable=device.type == "cuda"))
        self.model, self.optimizer, self.batch = model, gft.Hybrid(*parts), work.batch(device)
        self._loss, self._device, self._half = work.loss, device, not precision.startswith("fp32")

    @cached_property
    def compiled(self) -> Callable[..., Tensor]:
        return torch.compile(self.model)

    def steps(self, compiled: bool, captured: bool) -> Callable[[], object]:
        model, optimizer = self.compiled if compiled else self.model, self.optimizer

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(self._device.type, torch.bfloat16) if self._half else nullcontext():
                loss = self._loss(model, x, y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            return loss

        run = gft.Captured(step, optimizer) if captured else step
        return lambda: run(*self.batch)
