"""`sizes`: what packed weights' votes are measured by, the step alone or rows and columns that run over many."""

import pytest
import torch

import gft
from gft import reference
from gft import step as rules
from gft.philox import noise16


def votes_of(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-99, 100, (rows, columns), dtype=torch.int32)


def test_a_step_may_be_measured_by_its_own_size_and_by_the_rows_and_columns_of_many():
    """What `sizes="running"` means without memory."""
    betas, running = [votes_of(6, 9) for number in range(9)], None
    betas.append(5 * votes_of(6, 9))
    for number, votes in enumerate(betas):
        factors, running = rules.rounding_factors(votes, 0.3, 8, before=rules.Squares(running, number, own_size=True))
        expected = reference.running_mean_squares([beta.tolist() for beta in betas[: number + 1]])
        assert running.tolist() == pytest.approx(expected, rel=1e-5)
        wanted = torch.tensor(reference.rounding_moves(votes.tolist(), 0.3, expected, own_size=True), dtype=torch.float64)
        moves = votes * factors.row.double() * factors.column.double() / (8 * 65536)
        assert torch.allclose(moves.clamp(-1.2, 1.2), wanted, rtol=1e-5, atol=0)
    assert float(moves.square().mean().sqrt()) == pytest.approx(0.3, rel=0.3)  # although these votes were five times as loud
    factors, running = rules.rounding_factors(0 * votes, 0.3, 8, before=rules.Squares(running, 10, own_size=True))
    assert factors.row.isfinite().all()  # nobody spoke


def test_packed_weights_may_be_measured_by_running_rows_and_columns():
    """The step's own size, the rows and columns of all steps so far; kept in the state, unlike where they are the step's."""
    ends = {}
    for sizes in ("step", "running"):
        torch.manual_seed(0)
        layer = gft.QuantLinear(9, 8, bits=4, memory=False)
        optimizer = gft.GFT([layer.weight], lr=0.8, seed=5, quorum=0.3, sizes=sizes)
        running = None
        for number in range(3):
            ballot = layer.weight.ballot
            ballot.votes, ballot.tokens = votes_of(8, 9), 1
            before = rules.Squares(running, number, own_size=True) if sizes == "running" else rules.NO_SQUARES
            levels = rules.levels_a_step(float(layer.scale), 4, 9) / 2
            factors, squares = rules.rounding_factors(ballot.votes, 0.8, 1, levels, ballot.ceiling, rules.quorum_of(0.3, 4),
                                                      before)
            running = squares if sizes == "running" else None
            noise = noise16(72, seed=5, step=number, stream=0, call=0).view(8, 9)
            expected = rules.rounding(layer.levels(), ballot.votes, noise, factors, 7)
            optimizer.step()
            assert torch.equal(layer.levels(), expected)
        assert ("votes_square" in optimizer.state[layer.weight]) == (sizes == "running")
        ends[sizes] = layer.levels()
    assert not torch.equal(ends["step"], ends["running"])


def test_a_state_dict_of_before_sizes_were_a_setting_loads(tiny_net):
    model = tiny_net(seed=0)
    state = gft.GFT(gft.quantized(model), lr=0.3).state_dict()
    del state["param_groups"][0]["sizes"]
    optimizer = gft.GFT(gft.quantized(model), sizes="running")
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["sizes"] == "step"
