"""Moving the weights with the largest votes: C and Triton give the definition's weights and flips."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import KEY, assert_on_the_grid, on, random_stored, random_votes

from gft import ops
from gft.storage import Storage

CASES = [
    pytest.param(Storage(2, False), (63, 65), torch.int32, 0.35, 1311, id="2-packed"),
    pytest.param(Storage(3, False), (1, 64), torch.int64, 1.0, 65, id="3-packed"),
    pytest.param(Storage(4, False), (130, 72), torch.int32, 0.6, 0, id="4-packed"),
    pytest.param(Storage(2, False, half=True), (9, 131), torch.int32, 0.6, 65, id="2-half"),
    pytest.param(Storage(5, False), (9, 131), torch.int64, 0.35, 1311, id="5-packed"),
    pytest.param(Storage(8, False), (8, 257), torch.int32, 0.2, 40000, id="8-packed"),
    pytest.param(Storage(2), (33, 40), torch.int64, 0.6, 65, id="2-inertia"),
    pytest.param(Storage(4, inertia=False), (5, 77), torch.int32, 1.0, 1311, id="4-memory"),
]


@pytest.mark.parametrize(("storage", "shape", "dtype", "k", "p_min"), CASES)
def test_weights_move_as_the_definition_says(backend, storage, shape, dtype, k, p_min):
    stored, votes = random_stored(storage, shape), random_votes(shape, dtype)
    plan = ops.topk_plan(votes, k, p_min=p_min)
    expected = stored.clone()
    flips = ops.topk_weights.definition(expected, votes, storage, plan, KEY)
    new = stored.to(backend.device, copy=True)
    got = backend.topk_weights(new, votes.to(backend.device), storage, on(backend.device, plan), KEY)
    assert torch.equal(new.cpu(), expected)
    assert int(got) == int(flips) > 0
    assert_on_the_grid(expected, storage, shape[1])


@pytest.mark.parametrize(("storage", "shape", "dtype", "k", "p_min"), CASES)
def test_rows_that_are_shared_out_move_as_the_whole_does(backend, storage, shape, dtype, k, p_min):
    (rows, columns), stored, votes = shape, random_stored(storage, shape), random_votes(shape, dtype)
    plan, expected = ops.topk_plan(votes, k, p_min=p_min), stored.clone()
    ops.topk_weights.definition(expected, votes, storage, plan, KEY)

    def add_up(reached):  # the second rank's, which has come as far
        reached += torch.stack([(votes[cut:].abs() >= each).sum() for each in asked.pop(0)])

    cut, asked, found = rows // 3, [], torch.zeros(2, dtype=torch.int64)
    for bit in reversed(range(int(votes.abs().max()).bit_length())):
        asked.append(found + (1 << bit))
        reached = torch.stack([(votes.abs() >= each).sum() for each in asked[-1]])
        found = torch.where(reached >= torch.tensor([round(k * votes.numel()), 1]), asked[-1], found)
    got = ops.topk_plan_of_rows(votes[:cut], k, votes.numel(), int(votes.abs().max()), add_up)
    assert (int(got.least), int(got.largest)) == (int(plan.least), int(plan.largest))
    for some, first in ((slice(cut), 0), (slice(cut, rows), cut)):
        new = stored[some].to(backend.device, copy=True)
        backend.topk_weights(new, votes[some].to(backend.device), storage, on(backend.device, plan),
                             replace(KEY, first=first * columns))
        assert torch.equal(new.cpu(), expected[some])


def test_weights_move_alike_where_all_votes_are_equal_or_none_is_chosen(backend):
    storage, votes = Storage(4), torch.full((9, 24), -7, dtype=torch.int32)
    stored = random_stored(storage, votes.shape)
    for plan in (ops.topk_plan(votes, 1.0), replace(ops.topk_plan(votes, 1.0), least=torch.tensor(8))):
        expected, new = stored.clone(), stored.to(backend.device, copy=True)
        flips = ops.topk_weights.definition(expected, votes, storage, plan, KEY)
        got = backend.topk_weights(new, votes.to(backend.device), storage, on(backend.device, plan), KEY)
        assert int(got) == int(flips)
        assert torch.equal(new.cpu(), expected)


@pytest.mark.parametrize(("bound", "dtype"), [(0, torch.int32), (3, torch.int64), (255, torch.int32), (256, torch.int64),
                                              (70000, torch.int32), (2**31 - 1, torch.int32), (2**45, torch.int64)])
def test_kth_largest_is_that_of_a_sort(triton_twins, bound, dtype):
    generator = torch.Generator().manual_seed(4)
    votes = torch.randint(-bound, bound + 1, (63, 130), dtype=dtype, generator=generator)
    there, ordered = votes.to(triton_twins.device), votes.abs().flatten().sort(descending=True).values
    for count in (1, 77, 63 * 130):
        assert int(triton_twins.kth_largest(there, bound, count)) == int(ordered[count - 1])
    for count in (0, 500):
        counted = torch.tensor(count, device=triton_twins.device)
        expected = ops.kth_largest.definition(votes, bound, count)
        assert int(triton_twins.kth_largest(there, bound, counted)) == int(expected)
