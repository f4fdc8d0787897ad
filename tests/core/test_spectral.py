"""`Rounding(spectral_clip=…)`: moves whose parts all point one way are taken smaller."""

import pytest
import torch
from helpers import losses_step_by_step_and_captured, train
from torch import nn

import gft
from gft import reference
from gft.rules import matrices
from gft.rules.spectral import shares

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(5, 9), (9, 5), (1, 7), (7, 1), (1, 1), (12, 30)]


def agreeing(shape: tuple[int, int], how_much: int) -> torch.Tensor:
    """Votes of which a part is of rank one."""
    left, right = torch.randn(shape[0], 1), torch.randn(1, shape[1])
    return (torch.randint(-99, 100, shape) + how_much * left @ right).round().to(torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("how_much", [150, 1000])
def test_shares_are_those_of_the_reference(shape, how_much, device):
    votes = agreeing(shape, how_much)
    share, = shares([votes.to(device)], 0.5)
    assert (share.shape, share.dtype, share.device.type) == ((), torch.float32, device)
    assert float(share) == pytest.approx(reference.spectral_share(votes.tolist(), 0.5), rel=0.02)


def test_noise_moves_in_full_and_votes_that_agree_move_by_one_over_the_root_of_the_size():
    rows, columns = 200, 300
    noise = torch.randint(-9, 10, (rows, columns))
    signs = torch.randn(rows, 1).sign() @ torch.randn(1, columns).sign()
    random, alike = shares([noise, signs.to(torch.int32) * 7], 1.0)
    assert float(random) == pytest.approx(1, abs=0.1)
    assert float(alike) == pytest.approx((rows**0.5 + columns**0.5) / (rows * columns) ** 0.5, rel=1e-4)
    assert float(shares([noise], 2.0)[0]) == 1


def test_how_large_rows_and_columns_are_does_not_count():
    votes = agreeing((20, 30), 60)
    by_row, by_column = torch.randint(1, 1000, (20, 1)), torch.randint(1, 1000, (1, 30))
    one, other = shares([votes, votes.long() * by_row * by_column], 0.5)
    assert float(one) == pytest.approx(float(other), rel=0.1)  # rows and columns are made equal once, not again and again
    assert float(one) < 0.9


def test_any_votes_give_a_share():
    none, wide, single = torch.zeros(4, 6).int(), torch.full((3, 4), 2**62), torch.zeros(4, 6).int()
    single[1, 2] = 2**31 - 1
    for share in shares([none, wide, single, torch.zeros(3, 0).int()], 1.0):
        assert 0 < float(share) <= 1
    assert shares([], 1.0) == []


def test_layers_have_shares_of_their_own(monkeypatch):
    monkeypatch.setattr(matrices, "AT_ONCE", 200)
    votes = [agreeing(shape, how_much) for shape, how_much in zip(SHAPES * 3, range(0, 900, 50), strict=True)]
    assert [float(one) for one in shares(votes, 1.0)] == pytest.approx([float(shares([one], 1.0)[0]) for one in votes])


# ---------------------------------------------------------------------------------------------------- in the optimizer


def moved(votes: list[torch.Tensor], rule: gft.Rounding, lr: float, **kept) -> list[torch.Tensor]:
    """The weights of layers after a step by these votes."""
    torch.manual_seed(1)
    layers = [gft.QuantLinear(one.shape[1], one.shape[0], 4, **kept) for one in votes]
    optimizer = gft.GFT([layer.qweight for layer in layers], lr, rule, seed=5)
    for layer, one in zip(layers, votes, strict=True):
        layer.votes.votes, layer.votes.tokens = one, int(one.abs().max())
    optimizer.step()
    return [layer.qweight.clone() for layer in layers]


@pytest.mark.parametrize("kept", [{}, {"memory": False}], ids=["memory", "packed"])
def test_each_layer_moves_by_its_share_of_lr(kept):
    votes = [agreeing((12, 30), 20), agreeing((30, 12), 3000), agreeing((12, 30), 9000)]
    ends = moved(votes, gft.Rounding(spectral_clip=0.5), 0.8, **kept)
    for number, (end, share) in enumerate(zip(ends, shares(votes, 0.5), strict=True)):
        assert torch.equal(end, moved(votes, gft.Rounding(), 0.8 * float(share), **kept)[number])
    unclipped = moved(votes, gft.Rounding(), 0.8, **kept)
    assert not torch.equal(ends[2], unclipped[2])
    assert all(map(torch.equal, moved(votes, gft.Rounding(spectral_clip=20.0), 0.8, **kept), unclipped))


@pytest.mark.parametrize(("in_backward", "settings"), [(False, {}), (True, {}), (False, {"orthogonalize": True})],
                         ids=["step", "in backward", "orthogonalized"])
def test_networks_learn_by_clipped_moves(in_backward, settings):
    torch.manual_seed(0)
    model = gft.quantize_(nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 5)), 2)
    own = gft.GFT(gft.quantized(model), 0.4, gft.Rounding(spectral_clip=1.0, **settings), in_backward=in_backward, seed=3)
    optimizer = gft.Hybrid(own, torch.optim.AdamW(gft.dense(model), lr=1e-3))
    x = torch.randn(64, 24)
    losses = train(model, optimizer, [(x, (x @ torch.randn(24, 5)).argmax(1))] * 40)
    assert losses[-1] < 0.6 * losses[0]
    assert own.flips() > 0
    own.release()
    again = gft.GFT(gft.quantized(model))
    again.load_state_dict(own.state_dict())
    assert again.param_groups[0]["rule"].spectral_clip == 1.0


@pytest.mark.gpu
def test_a_captured_step_learns_by_clipped_moves():
    torch.manual_seed(0)
    model = gft.quantize_(nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 5)), 4)
    one_by_one, captured = losses_step_by_step_and_captured(model, 0.2, gft.Rounding(spectral_clip=1.0))
    assert captured[-1] < 0.8 * captured[0]
    assert captured == pytest.approx(one_by_one, rel=0.1, abs=0.05)


@pytest.mark.parametrize("wrong", [0.0, -1.0, 21.0, float("nan"), True, "1"])
def test_what_is_no_limit_is_refused(wrong, refuses):
    with refuses((ValueError, TypeError), "spectral_clip="):
        gft.Rounding(spectral_clip=wrong)
