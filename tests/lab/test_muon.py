"""Muon, the float baseline of the ladder."""

import pytest
import torch
from torch import nn

from gft.lab.muon import Muon


def test_muon_is_torchs_own_at_adamws_rate():
    theirs = getattr(torch.optim, "Muon", None)
    if theirs is None:
        pytest.skip("this torch has no Muon")
    mine, hers = ([nn.Parameter(weight.clone()) for weight in start] for start in [[
        torch.randn(shape, generator=torch.Generator().manual_seed(place)) for place, shape in
        enumerate([(12, 20), (12, 20), (20, 12)])]] * 2)
    ours = Muon(mine, 0.02, 0.3)
    other = theirs(hers, lr=0.02, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for one, two in zip(mine, hers, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        before = [weight.detach().clone() for weight in mine]
        ours.step(); other.step()
    for one, two, was in zip(mine, hers, before, strict=True):
        moved = one.detach() - was
        assert float(moved.abs().max()) > 0.005
        assert (one - two).abs().max() < 0.2 * moved.abs().max()  # four steps; theirs multiplies in bfloat16


def test_a_matrix_without_a_gradient_stays():
    weights = [nn.Parameter(torch.randn(4, 6)) for _ in range(2)]
    weights[0].grad = torch.randn(4, 6)
    start = [weight.detach().clone() for weight in weights]
    assert Muon(weights, 0.1).step(lambda: 3.0) == 3.0
    assert not torch.equal(weights[0], start[0])
    assert torch.equal(weights[1], start[1])
