"""A running mean of votes, renewed by Triton: the definition's bits, on odd shapes and after several steps."""

import pytest
import torch
from kernel_cases import KEY

from gft import ops
from gft.errors import UsageError
from gft.ops import KeptMean
from gft.rules.matrices import BOUND
from gft.rules.momentum import MEAN, UNIT, Momentum


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("shape", "dtype"), [((33, 72), torch.int32), ((130, 65), torch.int32), ((1, 7), torch.int64),
                                              ((19, 1), torch.int32), ((6, 128), torch.int64)], ids=str)
def test_means_and_moves_are_those_of_the_definition(triton_twins, bits, shape, dtype):
    kept = Momentum(0.95, bits)
    rows, columns = shape
    here, there = (kept.start(rows, columns, device) for device in (torch.device("cpu"), triton_twins.device))
    for step in range(4):
        votes = (torch.randn(shape) * 10 ** torch.randn(columns) * 1000).to(dtype)
        votes[:, 0] = 0 if step % 2 else 3
        wanted = ops.renew_mean.definition(kept.kept(here), votes, 0.95, BOUND, KEY)
        lie = votes.to(triton_twins.device)
        lie = lie.t().contiguous().t() if step == 2 else lie
        got = triton_twins.renew_mean(kept.kept(there), lie, 0.95, BOUND, KEY)
        assert torch.equal(got.cpu(), wanted)
        for name in (MEAN, UNIT):
            assert torch.equal(there[name].cpu(), here[name])
    assert here[MEAN].any()


def test_no_votes_are_no_moves(triton_twins):
    kept = Momentum(0.5)
    state = kept.start(5, 9, triton_twins.device)
    none = torch.zeros(5, 9, dtype=torch.int32, device=triton_twins.device)
    assert not triton_twins.renew_mean(kept.kept(state), none, 0.5, BOUND, KEY).any()
    assert not state[MEAN].any()
    assert triton_twins.renew_mean(kept.kept(kept.start(0, 9, triton_twins.device)), none[:0], 0.5, BOUND,
                                   KEY) is NotImplemented


def test_what_does_not_fit_together_is_refused_before_a_kernel_reads_it(triton_twins, refuses):
    votes = torch.zeros(5, 9, dtype=torch.int32, device=triton_twins.device)
    state = Momentum(0.5).start(5, 8, triton_twins.device)
    with refuses(UsageError, "the mean of votes must be 5 × 9 of int8"):
        triton_twins.renew_mean(KeptMean(state[MEAN], state[UNIT], 8), votes, 0.5, BOUND, KEY)
    with refuses(UsageError, "the mean of votes must be 5 × 5 of uint8"):
        triton_twins.renew_mean(KeptMean(state[MEAN], state[UNIT], 4), votes, 0.5, BOUND, KEY)
    with refuses(UsageError, "the units of the mean of votes must be 9 of float32"):
        triton_twins.renew_mean(KeptMean(votes.to(torch.int8), state[UNIT], 8), votes, 0.5, BOUND, KEY)
