"""What both ways to keep a running mean of votes have in common."""

import copy

import pytest
import torch
from helpers import integer_net, steps

import gft


@pytest.mark.parametrize(("rule", "memory", "shapes"), [
    (gft.Rounding(momentum=0.9, orthogonalize=True), True, {(40, 24), (41, 40)}),
    (gft.Rounding(momentum_rank=4, threshold=0.6), False, {(64, 4), (81, 4)}),
], ids=["whole", "low_rank"])
def test_a_resumed_run_ends_as_one_never_stopped(rule, memory, shapes, tmp_path):
    def built():
        model = integer_net(memory=memory)
        return model, gft.Hybrid(gft.GFT(gft.quantized(model), 0.2, rule, seed=3),
                                 torch.optim.AdamW(gft.dense(model), lr=1e-3))

    whole, optimizer = built()
    empty = copy.deepcopy(optimizer.state_dict())  # has room for a mean, and none
    steps(whole, optimizer, 5)
    gft.save_checkpoint(tmp_path / "run", whole, optimizer)
    assert {tuple(state["momentum"].shape) for state in optimizer.optimizers[0].state.values()} == shapes
    steps(whole, optimizer, 5)
    resumed, other = built()
    other.load_state_dict(empty)
    gft.load_checkpoint(tmp_path / "run", resumed, other)
    steps(resumed, other, 5)
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    assert other.optimizers[0].state[resumed[0].qweight]["momentum"].any()
