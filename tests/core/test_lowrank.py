"""`Rounding(momentum_rank=…)`: packed weights follow their votes and a running mean of them, kept as few directions."""

import pytest
import torch
import torch.nn.functional as F
from helpers import integer_net, losses_step_by_step_and_captured, moved, steps

import gft
from gft import reference
from gft.rules import matrices
from gft.rules.lowrank import LowRank
from gft.rules.matrices import BOUND, ONE
from gft.rules.mean import MEAN

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(5, 9), (9, 5), (1, 7), (7, 1), (1, 1), (12, 30)]


def start(rows: int, columns: int, rank: int, device: torch.device) -> torch.Tensor:
    return LowRank(rank).start(rows, columns, device)[MEAN]


def with_momentum(votes: list[torch.Tensor], means: list[torch.Tensor]) -> list[torch.Tensor]:
    """Renew each layer's mean in place; what moves its weights."""
    return LowRank(1).renew(votes, [{MEAN: mean} for mean in means], [])


def some_votes(shape: tuple[int, int], steps: int = 4) -> list[torch.Tensor]:
    return [torch.randint(-99, 100, shape, dtype=torch.int32) for _ in range(steps)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_a_mean_of_full_rank_is_the_running_mean(shape, device):
    """With as many directions as the matrix has nothing is left out, and the definition is an average."""
    steps = some_votes(shape)
    mean = start(*shape, 99, torch.device(device))
    betas = [with_momentum([one.to(device)], [mean])[0] for one in steps]
    wanted = reference.with_momentum([one.tolist() for one in steps])
    assert mean.shape == (sum(shape), min(shape))
    for beta, one in zip(betas, wanted, strict=True):
        assert beta.dtype == torch.int32
        assert (beta.cpu() - torch.tensor(one) * ONE).abs().max() <= 2e-3 * ONE


def test_left_is_orthonormal_and_what_steps_agree_on_is_found_among_noise():
    rows, columns, rank = 60, 80, 4
    agreed = torch.randn(rows, 2) @ torch.randn(2, columns)
    mean, alone = start(rows, columns, rank, torch.device("cpu")), []
    for _ in range(60):
        votes = (100 * (agreed * 0.3 + torch.randn(rows, columns))).to(torch.int32)
        beta, = with_momentum([votes], [mean])
        left, found = mean[:rows], mean[:rows] @ mean[rows:].T
        alone.append(float(F.cosine_similarity(votes.float().flatten(), agreed.flatten(), 0)))
    assert torch.allclose(left.T @ left, torch.eye(rank), atol=1e-4)
    assert float(F.cosine_similarity(found.flatten(), agreed.flatten(), 0)) > 0.85
    assert float(F.cosine_similarity(beta.float().flatten(), agreed.flatten(), 0)) > max(alone) + 0.2


def test_a_step_without_votes_leaves_the_mean_as_it_is():
    mean = start(4, 6, 2, torch.device("cpu"))
    none = torch.zeros(4, 6, dtype=torch.int32)
    before = mean.clone()
    assert not with_momentum([none], [mean])[0].any()
    assert torch.equal(mean, before)
    with_momentum([torch.randint(-9, 10, (4, 6))], [mean])
    after = mean.clone()
    beta, = with_momentum([none], [mean])
    assert torch.equal(mean, after)
    assert after.abs().max() > 0
    assert beta.any()  # the mean alone


def test_layers_have_means_of_their_own_and_none_exceeds_the_bound(monkeypatch):
    monkeypatch.setattr(matrices, "AT_ONCE", 200)
    shapes = [(8, 12), (12, 8), (8, 12), (8, 12), (3, 5), (30, 40)]
    votes, cpu = [some_votes(shape, 1)[0] for shape in shapes], torch.device("cpu")
    votes[0] = torch.full((8, 12), 2**62)
    means, others = ([start(*shape, 3, cpu) for shape in shapes] for _ in range(2))
    for _ in range(3):
        for one, among in zip((with_momentum([one], [mean])[0] for one, mean in zip(votes, others, strict=True)),
                              with_momentum(votes, means), strict=True):
            assert (one - among).abs().max() <= 8  # of 2^20
            assert among.abs().max() <= BOUND
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(means, others, strict=True))
    assert with_momentum([], []) == []


# ---------------------------------------------------------------------------------------------------- in the optimizer


RULE = gft.Rounding(momentum_rank=4)


@pytest.mark.parametrize(("settings", "in_backward"), [({}, False), ({"memory": "half"}, False), ({"bits": 4}, True)],
                         ids=["packed", "half a byte", "4 bits, in backward"])
def test_networks_learn_by_it(settings, in_backward):
    model = integer_net(**{"memory": False, **settings})
    rule = gft.Rounding(momentum_rank=4, threshold=0.6)  # the default starts slowly
    own = gft.GFT(gft.quantized(model), 0.2, rule, in_backward=in_backward, seed=3)
    losses = steps(model, gft.Hybrid(own, torch.optim.AdamW(gft.dense(model), lr=1e-3)), 40)
    assert losses[-1] < 0.7 * losses[0]
    assert own.flips() > 0


@pytest.mark.gpu
def test_a_captured_step_learns_by_it():
    rule = gft.Rounding(momentum_rank=4, threshold=0.6)  # the default starts slowly
    one_by_one, captured = losses_step_by_step_and_captured(integer_net(4, memory=False), 0.2, rule)
    assert captured[-1] < 0.8 * captured[0]
    assert captured == pytest.approx(one_by_one, rel=0.1, abs=0.05)


def test_weights_move_half_as_far_as_if_the_joined_votes_had_been_cast_and_beyond_two_rms():
    votes, rule = some_votes((8, 12), 1)[0], gft.Rounding(threshold=2.0)
    (cast_before,) = with_momentum([votes], [start(8, 12, 4, torch.device("cpu"))])
    assert torch.equal(moved(RULE, 0.8, votes, memory=False), moved(rule, 0.4, cast_before, memory=False))


def test_a_mean_of_another_shape_or_damaged_is_refused_and_changes_nothing(refuses):
    model = integer_net(memory=False)
    optimizer = gft.GFT(gft.quantized(model), 0.2, RULE)
    steps(model, optimizer, 2)
    before = optimizer.state[model[0].qweight]["momentum"].clone()
    for change, words in ((lambda mean: mean[1:], r"of shape \(64, 4\)"), (lambda mean: mean.double(), "float32"),
                          (lambda mean: mean * float("nan"), "not finite"), (lambda mean: "text", "text")):
        state = optimizer.state_dict()
        state["state"][0]["momentum"] = change(state["state"][0]["momentum"])
        with refuses(ValueError, f"a momentum of votes.*{words}"):
            optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[model[0].qweight]["momentum"], before)


def test_a_rule_of_another_rank_starts_a_new_mean_and_one_without_keeps_none():
    model = integer_net(memory=False)
    optimizer = gft.GFT(gft.quantized(model), 0.2, RULE)
    steps(model, optimizer, 2)
    optimizer.param_groups[0]["rule"] = gft.Rounding(momentum_rank=2)
    optimizer.load_state_dict(optimizer.state_dict())  # saved before the rule took a step
    steps(model, optimizer, 1)
    assert optimizer.state[model[0].qweight]["momentum"].shape == (64, 2)
    state = optimizer.state_dict()
    state["param_groups"][0]["rule"] = gft.Rounding().to_dict()
    optimizer.load_state_dict(state)
    assert "momentum" not in optimizer.state[model[0].qweight]


def test_what_cannot_be_is_refused(refuses):
    for wrong in (-1, 5000, 2.5, True, "16"):
        with refuses((ValueError, TypeError), "momentum_rank="):
            gft.Rounding(momentum_rank=wrong)
    with refuses(ValueError, "choose one"):
        gft.Rounding(momentum_rank=4, orthogonalize=True)
    model = integer_net()
    with refuses(ValueError, "momentum_rank=4 is for weights without memory"):
        gft.GFT(gft.quantized(model), rule=RULE)
