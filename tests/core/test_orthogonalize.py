"""`Rounding(orthogonalize=True)`: votes half as they were cast, half with all singular values of the matrix equal."""

import pytest
import torch
import torch.nn.functional as F
from helpers import integer_net, losses_step_by_step_and_captured, moved

import gft
from gft import reference
from gft.rules import matrices
from gft.rules.matrices import BOUND, ONE
from gft.rules.orthogonalize import orthogonal, orthogonalized

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BFLOAT16 = 0.03  # how far its rounding carried an entry of such small matrices in 200 draws: 0.017


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 7), (7, 1), (1, 1)], ids="{0[0]}x{0[1]}".format)
def test_votes_are_orthogonalized_as_the_reference_does(shape, device):
    votes = torch.randint(-99, 100, shape, dtype=torch.int32)
    beta, = orthogonalized([votes.to(device)])
    assert beta.dtype == torch.int32
    wanted = torch.tensor(reference.orthogonalized(votes.tolist())) * ONE
    assert (beta.cpu() - wanted).abs().max() <= (1e-5 if device == "cpu" else BFLOAT16) * ONE


def test_small_singular_values_become_as_large_as_the_others_by_half():
    """The same singular vectors; a value a hundredth of the largest is no longer next to nothing."""
    left, right = (torch.linalg.qr(torch.randn(24, 24)).Q for _ in range(2))
    values = torch.logspace(0, -2, 24)
    votes = (left * values @ right.T * 1e6).to(torch.int32)
    beta, = orthogonalized([votes])
    along = torch.diag(left.T @ beta.float() @ right)
    across = left.T @ beta.float() @ right - torch.diag(along)
    assert across.abs().max() < 1e-3 * along.max()
    assert 0.2 < along[-1] / along[0] < 0.5  # 0.01 as they were cast
    alone = orthogonal(votes.float()[None] / votes.float().norm())[0]
    assert torch.linalg.svdvals(alone).min() > 0.5
    assert torch.linalg.svdvals(alone).max() < 1.3


@pytest.mark.parametrize("device", DEVICES)
def test_layers_are_orthogonalized_each_by_itself(device, monkeypatch):
    monkeypatch.setattr(matrices, "AT_ONCE", 200)  # some products take two layers, some one
    shapes = [(8, 12), (12, 8), (8, 12), (8, 12), (3, 5), (12, 8), (30, 40)]
    votes = [torch.randint(-9999, 10000, shape, dtype=torch.int32, device=device) for shape in shapes]
    for one, among in zip(votes, orthogonalized(votes), strict=True):
        alone, = orthogonalized([one])
        assert (alone - among).abs().max() <= (2 if device == "cpu" else BFLOAT16 * ONE)


def test_no_votes_stay_none_and_large_ones_stay_below_the_bound():
    assert orthogonalized([]) == []
    none = torch.zeros(4, 6, dtype=torch.int32)
    single = none.clone()
    single[1, 2] = 2**31 - 1  # all of the length in one entry
    wide = torch.full((3, 4), 2**40, dtype=torch.int64)
    beta = orthogonalized([none, single, wide])
    assert not beta[0].any()
    assert beta[1][1, 2] == beta[1].abs().sum() == BOUND
    assert all(one.abs().max() <= BOUND for one in beta)


# ---------------------------------------------------------------------------------------------------- in the optimizer


def task() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 24)
    return x, (x @ torch.randn(24, 5)).argmax(1)


@pytest.mark.parametrize(("memory", "in_backward", "parts"), [(True, False, 1), (False, False, 2), (True, True, 2)],
                         ids=["memory", "packed, two micro-batches", "in backward"])
def test_networks_learn_by_orthogonalized_votes(memory, in_backward, parts):
    model = integer_net(4, memory=memory)
    rule = gft.Rounding(orthogonalize=True)
    own = gft.GFT(gft.quantized(model), 0.3, rule, in_backward=in_backward, seed=3)
    optimizer = gft.Hybrid(own, torch.optim.AdamW(gft.dense(model), lr=1e-3))
    losses, (x, y) = [], task()
    for _ in range(25):
        optimizer.zero_grad()
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.cross_entropy(model(x_part), y_part)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert own.flips() > 0


@pytest.mark.gpu
def test_a_captured_step_learns_by_orthogonalized_votes():
    rule = gft.Rounding(orthogonalize=True)
    one_by_one, captured = losses_step_by_step_and_captured(integer_net(4, memory=True), 0.1, rule)
    assert captured[-1] < 0.8 * captured[0]
    assert captured == pytest.approx(one_by_one, rel=0.1, abs=0.05)


def test_weights_move_as_if_the_orthogonalized_votes_had_been_cast():
    votes = torch.randint(-99, 100, (8, 12), dtype=torch.int32)
    ends = [moved(gft.Rounding(orthogonalize=setting), 0.8, cast)
            for setting, cast in ((True, votes), (False, orthogonalized([votes])[0]), (False, votes))]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
