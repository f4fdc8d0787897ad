"""A model compiled by Inductor, torch's own backend, trains as in eager mode."""

import shutil

import pytest
import torch
from torch import nn

import gft

no_compiler = shutil.which("cc") is None and shutil.which("gcc") is None


@pytest.mark.slow
@pytest.mark.skipif(no_compiler, reason="no C compiler")
def test_model_compiled_by_inductor_ends_with_the_same_weights():
    torch.compiler.reset()
    x = torch.randn(16, 9)

    def train(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(gft.QuantLinear(9, 12, bias=True), nn.ReLU(), gft.QuantLinear(12, 7, gain=True))
        optimizer = gft.GFT(gft.quantized(model), lr=0.8, seed=5)
        run = torch.compile(model, fullgraph=True) if compiled else model
        for _ in range(2):
            optimizer.zero_grad(); run(x).square().sum().backward(); optimizer.step()
        assert optimizer.flips() > 0
        return [weight.clone() for weight in gft.quantized(model)]

    for eager, compiled in zip(train(False), train(True), strict=True):
        assert torch.equal(eager, compiled)
