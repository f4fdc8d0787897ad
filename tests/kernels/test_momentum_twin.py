"""A running mean of votes, renewed by Triton and by C: the definition's bits, on odd shapes and after several steps."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import KEY, aligned, random_votes

from gft import ops
from gft.errors import UsageError
from gft.ops import KeptMean
from gft.ops.places import Places, told_by
from gft.rules.matrices import BOUND


def mean_of_nothing(rows: int, columns: int, device: torch.device) -> KeptMean:
    return KeptMean(torch.zeros(rows, columns, dtype=torch.int8, device=device), torch.zeros(columns, device=device))


@pytest.mark.parametrize(("shape", "dtype"), [((33, 72), torch.int32), ((130, 65), torch.int32), ((1, 7), torch.int64),
                                              ((19, 1), torch.int32), ((6, 128), torch.int64)], ids=str)
def test_means_and_moves_are_those_of_the_definition(backend, shape, dtype):
    rows, columns = shape
    here, there = (mean_of_nothing(rows, columns, device) for device in (torch.device("cpu"), backend.device))
    for step in range(4):
        votes = (torch.randn(shape) * 10 ** torch.randn(columns) * 1000).to(dtype)
        votes[:, 0] = 0 if step % 2 else 3
        amax = ops.mean_amax.definition(here, votes, 0.95)
        wanted = ops.renew_mean.definition(here, votes, amax, 0.95, BOUND, KEY)
        lie = votes.to(backend.device)
        lie = lie.t().contiguous().t() if step == 2 else lie
        found = backend.mean_amax(there, lie, 0.95)
        assert torch.equal(found.cpu(), amax)
        got = backend.renew_mean(there, lie, found, 0.95, BOUND, KEY)
        assert torch.equal(got.cpu(), wanted)
        assert torch.equal(there.stored.cpu(), here.stored)
        assert torch.equal(there.scale.cpu(), here.scale)
    assert here.stored.any()


@pytest.mark.parametrize("columns", [72, 7])
def test_some_rows_are_renewed_as_among_all_of_them(backend, columns):
    votes = torch.randint(-999, 1000, (21, columns), dtype=torch.int32)
    whole, device = mean_of_nothing(21, columns, torch.device("cpu")), backend.device
    amax = ops.mean_amax.definition(whole, votes, 0.9)
    wanted = ops.renew_mean.definition(whole, votes, amax, 0.9, BOUND, KEY)
    for first, last in ((0, 5), (5, 12), (12, 21)):
        key = replace(KEY, first=first * columns)
        for where, operations in ((torch.device("cpu"), ops), (device, backend)):
            rows = mean_of_nothing(last - first, columns, where)
            got = operations.renew_mean(rows, votes[first:last].to(where), amax.to(where), 0.9, BOUND, key)
            assert torch.equal(got.cpu(), wanted[first:last])
            assert torch.equal(rows.stored.cpu(), whole.stored[first:last])
            assert torch.equal(rows.scale.cpu(), whole.scale)


@pytest.mark.parametrize("by_table", [False, True], ids=["by their addresses", "by a table"])
def test_layers_that_share_launches_are_renewed_each_by_itself(triton_twins, monkeypatch, by_table):
    """Four layers of one shape, which two launches take, among others; from the second step on votes lie elsewhere."""
    monkeypatch.setattr("gft.ops.triton.alike.MOST_LAYERS", 3)
    shapes = [(21, 72), (9, 130), (21, 72), (5, 7), (21, 72), (21, 72), (9, 130)]
    keys = [replace(KEY, stream=5 * number) for number in range(len(shapes))]
    here, there = ([mean_of_nothing(*shape, device) for shape in shapes]
                   for device in (torch.device("cpu"), triton_twins.device))
    places = None
    for step in range(3):
        votes = [random_votes(shape, torch.int64 if shape == (5, 7) else torch.int32, seed=100 * step + number)
                 for number, shape in enumerate(shapes)]
        wanted = ops.renew_means.definition(here, votes, 0.9, BOUND, keys)
        moved = [aligned(one.to(triton_twins.device)) for one in votes]
        if not by_table:
            got = triton_twins.renew_means(there, moved, 0.9, BOUND, keys)
        else:
            places = places or Places(moved)
            places.write(moved)
            with told_by(places):
                got = triton_twins.renew_means(there, moved, 0.9, BOUND, keys)
            assert places.whole
        assert all(torch.equal(one.cpu(), other) for one, other in zip(got, wanted, strict=True))
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.stored, other.stored.cpu())
        assert torch.equal(one.scale, other.scale.cpu())


@pytest.mark.parametrize("other", [{"seed": 1}, {"call": 9}, {"step": 5}, {"first": 72}], ids=str)
def test_layers_of_other_draws_share_no_launch(triton_twins, other):
    kept = [mean_of_nothing(4, 72, triton_twins.device) for _ in range(2)]
    votes = [one.stored.int() + 3 for one in kept]
    assert triton_twins.renew_means(kept, votes, 0.9, BOUND, [KEY, replace(KEY, **other)]) is NotImplemented
    assert not any(one.stored.any() for one in kept)


def test_no_votes_are_no_moves(backend):
    kept = mean_of_nothing(5, 9, backend.device)
    none = torch.zeros(5, 9, dtype=torch.int32, device=backend.device)
    amax = backend.mean_amax(kept, none, 0.5)
    assert not amax.any()
    assert not backend.renew_mean(kept, none, amax, 0.5, BOUND, KEY).any()
    assert not kept.stored.any()
    empty = mean_of_nothing(0, 9, backend.device)
    assert backend.mean_amax(empty, none[:0], 0.5) is NotImplemented
    assert torch.equal(ops.mean_amax.definition(empty, none[:0], 0.5), amax)


def test_what_does_not_fit_together_is_refused_before_a_kernel_reads_it(backend, refuses):
    votes = torch.zeros(5, 9, dtype=torch.int32, device=backend.device)
    kept, amax = mean_of_nothing(5, 8, backend.device), torch.zeros(11, device=backend.device)
    with refuses(UsageError, "the mean of votes must be 5 × 9 of int8"):
        backend.mean_amax(kept, votes, 0.5)
    with refuses(UsageError, "the scales of the mean of votes must be 9 of float32"):
        backend.renew_mean(KeptMean(votes.to(torch.int8), kept.scale), votes, amax, 0.5, BOUND, KEY)
    with refuses(UsageError, "the largest entries of the mean of votes must be 11 of float32"):
        backend.renew_mean(kept, votes, amax[1:], 0.5, BOUND, KEY)
