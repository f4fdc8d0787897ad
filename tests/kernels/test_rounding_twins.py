"""Moving weights by rounding: C and Triton give the definitions' weights, second moments and flips, bit for bit."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from kernel_cases import (
    KEY,
    aligned,
    assert_on_the_grid,
    on,
    random_job,
    random_stored,
    random_votes,
    rounded_by_definition,
)

from gft import ops
from gft.errors import UsageError
from gft.ops.places import Places, told_by
from gft.ops.rounding import plan_of_sums
from gft.storage import Storage

INT32, INT64 = torch.int32, torch.int64
# Pairs of settings that matter to each other meet at least once; ends of rows inside a byte, a word, a program and not.
JOBS = [
    pytest.param(Storage(2, False), (1, 64), INT32, {"threshold": 0.57}, id="2-packed"),
    pytest.param(Storage(2, False), (63, 65), INT64, {"threshold": 0.57, "running": True, "rescale_step": True},
                 id="2-packed-running"),
    pytest.param(Storage(3, False), (9, 131), INT32, {"threshold": 3.0, "running": True}, id="3-packed"),
    pytest.param(Storage(2, False, half=True), (9, 131), INT32, {"threshold": 0.6, "running": True}, id="2-half"),
    pytest.param(Storage(4, False), (130, 72), INT64, {"rescale_step": True}, id="4-packed"),
    pytest.param(Storage(5, False), (15, 257), INT32, {"threshold": 2.0}, id="5-packed"),
    pytest.param(Storage(8, False), (8, 1024), INT32, {"threshold": 2.0, "running": True}, id="8-packed"),
    pytest.param(Storage(2), (63, 65), INT32, {"follow": 90, "running": True}, id="2-inertia"),
    pytest.param(Storage(3), (64, 128), INT64, {"follow": 26, "threshold": 0.57}, id="3-inertia"),
    pytest.param(Storage(4), (1, 77), INT32, {"follow": 256, "threshold": 2.0, "running": True}, id="4-inertia"),
    pytest.param(Storage(5), (7, 136), INT32, {"follow": 1}, id="5-inertia"),
    pytest.param(Storage(2, inertia=False), (33, 40), INT64, {"threshold": 0.57}, id="2-memory"),
    pytest.param(Storage(4, inertia=False), (130, 9), INT32, {"running": True, "follow": 90}, id="4-memory"),
    pytest.param(Storage(8), (40, 72), INT32, {"threshold": 3.0}, id="8-memory"),
    pytest.param(Storage(4), (24, 72), INT32, {"threshold": None, "follow": 26, "lr_scale": 65536 * 0.15}, id="4-suited"),
    pytest.param(Storage(2), (9, 65), INT64, {"threshold": None, "running": True, "lr_scale": 65536 * 3.0}, id="2-suited"),
]


@pytest.mark.parametrize(("storage", "shape", "dtype", "settings"), JOBS)
def test_weights_move_as_the_definition_says(backend, storage, shape, dtype, settings):
    job = random_job(storage, shape, dtype, **settings)
    plan, moments = ops.rounding_plan.definition(job, 0.8)
    there = on(backend.device, job)
    got, got_moments = backend.rounding_plan(there, 0.8)
    assert torch.equal(got_moments.cpu(), moments)
    assert torch.equal(got.row.cpu(), plan.row)
    assert torch.equal(got.column.cpu(), plan.column)
    assert float(got.cap) == plan.cap
    assert (float(got.threshold_share), got.follow) == (plan.threshold_share, job.follow)

    expected = job.stored.clone()
    flips = ops.round_weights.definition(expected, job.votes, storage, plan, KEY)
    for some_plan in (got, on(backend.device, plan)):  # a cap on the device, and a number
        new = there.stored.clone()
        assert int(backend.round_weights(new, there.votes, storage, some_plan, KEY)) == int(flips) > 0
        assert torch.equal(new.cpu(), expected)
    assert_on_the_grid(expected, storage, shape[1])


@pytest.mark.parametrize("step", [0, 1, 3, 5, 6, 7, 2**32 - 1])
@pytest.mark.parametrize("settings", [{"warmup": 7}, {"warmup": 1}, {"warmup": 7, "threshold": None}], ids=str)
def test_moves_grow_over_the_first_steps_alike_everywhere(backend, step, settings):
    """Sevenths are no float32; and the step may be one that only the device knows."""
    job = random_job(Storage(4), (9, 24), key=replace(KEY, step=step), **settings)
    full = ops.rounding_plan.definition(replace(job, warmup=0, threshold=0.0), 0.3)[0]
    plan, _ = ops.rounding_plan.definition(job, 0.3)
    if job.threshold is not None:
        assert plan.cap == pytest.approx(full.cap * min(1.0, (step + 1) / job.warmup), rel=1e-6)
    for known in (step, torch.tensor(step, device=backend.device)):
        there = on(backend.device, replace(job, key=replace(job.key, step=known)))
        got, _ = backend.rounding_plan(there, 0.3)
        assert float(got.cap) == plan.cap
        assert float(got.threshold_share) == plan.threshold_share
        assert torch.equal(got.row.cpu(), plan.row)


@pytest.mark.parametrize("lr", [0.0, 2.0**-9, 1 / 16, 0.1249999, 0.125, 0.3, 0.5, 1.0, 1.9999999, 2.0, 7.0])
def test_the_threshold_that_suits_a_move_is_the_same_everywhere(backend, lr):
    """At both ends of an octave, and for a lr that only the device knows."""
    job = random_job(Storage(4), (9, 24), threshold=None, lr_scale=65536.0, follow=26)
    expected, _, flips = rounded_by_definition(job, lr)
    plan, _ = ops.rounding_plan.definition(job, lr)
    for rate in (lr, torch.tensor(lr).to(backend.device)):
        there = on(backend.device, job)
        got, _ = backend.rounding_plan(there, rate)
        assert (float(got.cap), float(got.threshold_share)) == (plan.cap, plan.threshold_share)
        assert int(backend.round_weights(there.stored, there.votes, job.storage, got, KEY)) == flips
        assert torch.equal(there.stored.cpu(), expected)


@pytest.mark.parametrize(("storage", "shape", "dtype", "settings"), JOBS)
def test_rows_that_are_shared_out_move_as_the_whole_does(backend, storage, shape, dtype, settings):
    """As ranks have them: sums of squares are added up, random numbers are those of the whole."""
    job, (rows, columns) = random_job(storage, shape, dtype, **settings), shape
    expected, moments, flips = rounded_by_definition(job, 0.8)
    cuts = sorted({0, rows // 3, rows - rows // 4, rows})
    sums = torch.zeros(rows + columns, dtype=INT64)
    for start, stop in pairwise(cuts):
        some = backend.sums_of_squares(job.votes[start:stop].to(backend.device), job.shift).cpu()
        sums[start:stop] += some[: stop - start]
        sums[rows:] += some[stop - start :]
    assert torch.equal(sums, ops.sums_of_squares.definition(job.votes, job.shift))
    plan, got_moments = plan_of_sums(sums, replace(job, votes=job.votes[:1], rows=rows), 0.8)
    assert torch.equal(got_moments, moments)
    for start, stop in pairwise(cuts):
        there = on(backend.device, replace(job, stored=job.stored[start:stop], votes=job.votes[start:stop]))
        own = on(backend.device, replace(plan, row=plan.row[start:stop]))
        flips -= int(backend.round_weights(there.stored, there.votes, storage, own, replace(KEY, first=start * columns)))
        assert torch.equal(there.stored.cpu(), expected[start:stop])
    assert flips == 0


def test_some_rows_are_moved_by_the_plan_of_the_whole():
    job = random_job(Storage(4), (9, 24), running=True)
    expected, moments, _ = rounded_by_definition(job, 0.8)
    sums = ops.sums_of_squares(job.votes, job.shift)
    for start, stop in ((0, 5), (5, 5), (5, 9)):
        some = replace(job, stored=job.stored[start:stop].clone(), votes=job.votes[start:stop], rows=9,
                       key=replace(KEY, first=start * 24))
        assert torch.equal(ops.round_some_rows(sums, some, 0.8).second_moment, moments)
        assert torch.equal(some.stored, expected[start:stop])


def test_random_numbers_beyond_32_bits_are_those_of_the_definition(backend):
    """In the last rows of a very large weight."""
    for shape in ((3, 64), (3, 20)):
        job = random_job(Storage(4), shape)
        key = replace(KEY, first=2**34 + 5 * shape[1] - 2**34 % shape[1])
        plan, expected = ops.rounding_plan.definition(job, 0.8)[0], job.stored.clone()
        ops.round_weights.definition(expected, job.votes, job.storage, plan, key)
        there = on(backend.device, job)
        backend.round_weights(there.stored, there.votes, job.storage, on(backend.device, plan), key)
        assert torch.equal(there.stored.cpu(), expected)


@pytest.mark.parametrize("step", [0, 1, 6, 300])
@pytest.mark.parametrize("rescale_step", [False, True])
def test_plans_equal_the_definition_where_there_are_no_votes(backend, step, rescale_step):
    job = random_job(Storage(4), (37, 65), INT64, running=step > 0, key=replace(KEY, step=step), rescale_step=rescale_step)
    for empty in ([0], range(37)):
        job.votes[empty] = 0
        job.votes[:, 3] = 0
        plan, moments = ops.rounding_plan.definition(job, 0.3)
        got, got_moments = backend.rounding_plan(on(backend.device, job), 0.3)
        assert torch.equal(got_moments.cpu(), moments)
        assert torch.equal(got.row.cpu(), plan.row)
        assert torch.equal(got.column.cpu(), plan.column)


@pytest.mark.parametrize("storage", [Storage(2), Storage(4, inertia=False), Storage(3, False), Storage(2, False, half=True)],
                         ids=str)
@pytest.mark.parametrize("on_device", [False, True], ids=["a number", "on the device"])
def test_at_lr_zero_nothing_moves_and_second_moments_are_renewed(backend, storage, on_device):
    job = random_job(storage, (9, 24), running=True, follow=200, threshold=0.57)
    moments = ops.rounding_plan.definition(job, 0.3)[1]
    lr = torch.tensor(0.0, device=backend.device) if on_device else 0.0
    there = on(backend.device, job)
    plan, got = backend.rounding_plan(there, lr)
    assert int(backend.round_weights(there.stored, there.votes, storage, plan, KEY)) == 0
    assert torch.equal(there.stored.cpu(), job.stored)
    assert torch.equal(got.cpu(), moments)
    assert not torch.equal(got.cpu(), job.running)


# In 1/65536 of a stored value: from what crosses a small grid to the largest that int32 holds.
CAPS = [2.0**18, 2.0**25, 1.75 * 2**27, 2.0**30, 2.0**31 - 128]


@pytest.mark.parametrize("threshold", [0.0, 3.0])
@pytest.mark.parametrize("storage", [Storage(8, False), Storage(5, False), Storage(2, False), Storage(5), Storage(2)],
                         ids=str)
def test_c_is_exact_for_every_cap_that_int32_holds(c_twins, storage, threshold):
    """The cap used to be lowered before the dead zone was taken off, but not for the dead zone: nothing moved."""
    for cap in CAPS:
        job = random_job(storage, (40, 2101), threshold=threshold, follow=99, lr_scale=cap / 4)
        expected, _, flips = rounded_by_definition(job, 1.0)
        plan, _ = c_twins.rounding_plan(job, 1.0)
        assert plan.cap == cap
        assert int(c_twins.round_weights(job.stored, job.votes, storage, plan, KEY)) == flips
        assert torch.equal(job.stored, expected)
        assert flips > 0 or cap == CAPS[0]


@pytest.mark.parametrize("bits", [5, 8])
def test_weights_move_at_large_thresholds_as_the_definition_says(backend, bits):
    job = random_job(Storage(bits, False), (40, 72), threshold=3.0, lr_scale=65536.0 * 8000)
    expected, _, flips = rounded_by_definition(job, 0.3)
    there = on(backend.device, job)
    plan, _ = backend.rounding_plan(there, 0.3)
    assert int(backend.round_weights(there.stored, there.votes, job.storage, plan, KEY)) == flips > 0
    assert torch.equal(there.stored.cpu(), expected)


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**30], ids=["squares fit 32 bits", "squares do not", "with a shift"])
def test_plans_of_large_votes_equal_the_definition(backend, size):
    votes = random_votes((5, 601), INT32).clamp(-size, size)
    votes[2, 3], votes[4, 600] = size, -size
    storage = Storage(2)
    job = ops.RoundingJob(random_stored(storage, votes.shape), votes, storage, KEY, 65536.0, size)
    assert (job.shift > 0) == (size == 2**30)
    plan, moments = ops.rounding_plan.definition(job, 0.5)
    got, got_moments = backend.rounding_plan(on(backend.device, job), 0.5)
    assert torch.equal(got.row.cpu(), plan.row)
    assert torch.equal(got.column.cpu(), plan.column)
    assert torch.equal(got_moments.cpu(), moments)


@pytest.mark.parametrize("threads", [2, 3])
def test_c_gives_the_same_whatever_the_threads(c_twins, threads, monkeypatch):
    monkeypatch.setattr("gft.ops.native.threads.LEAST_A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    job = random_job(Storage(2, False), (131, 77), threshold=0.57)
    expected, moments, flips = rounded_by_definition(job, 0.5)
    plan, got = c_twins.rounding_plan(job, 0.5)
    assert torch.equal(got, moments)
    assert int(c_twins.round_weights(job.stored, job.votes, job.storage, plan, KEY)) == flips > 0
    assert torch.equal(job.stored, expected)


def test_autograd_sees_that_a_weight_has_moved(backend):
    job = on(backend.device, random_job(Storage(4), (9, 24)))
    before = job.stored._version
    backend.round_weights(job.stored, job.votes, job.storage, backend.rounding_plan(job, 0.5)[0], KEY)
    assert job.stored._version > before


def test_what_lies_apart_in_memory_is_moved_by_the_definition():
    """A twin declines it; the operation still moves it."""
    job = random_job(Storage(4), (9, 24))
    expected, _, flips = rounded_by_definition(job, 0.5)
    apart = torch.zeros(9, 48, dtype=torch.int8)[:, ::2].copy_(job.stored)
    job = replace(job, stored=apart, votes=job.votes.t().contiguous().t())
    plan, _ = ops.rounding_plan(job, 0.5)
    assert int(ops.round_weights(job.stored, job.votes, job.storage, plan, KEY)) == flips > 0
    assert torch.equal(apart, expected)


# ---------------------------------------------------------------------------------------------------- many at once

KINDS = [((3, 24), Storage(2), True, {"follow": 90}), ((3, 24), Storage(2), False, {"follow": 90}),
         ((3, 24), Storage(4, False), False, {"threshold": 0.57}),
         ((3, 24), Storage(4, False), True, {"threshold": 0.57, "rescale_step": True}),
         ((3, 24), Storage(2), False, {"follow": 200}), ((5, 9), Storage(3, inertia=False), True, {}),
         ((5, 9), Storage(2, False), False, {"threshold": 2.0}), ((2, 72), Storage(8, False), False, {"threshold": 0.3}),
         ((1, 1), Storage(4), True, {}), ((3, 24), Storage(2), True, {"follow": 90, "threshold": None})]


def jobs_of(draw, kinds, step=6):
    return [random_job(storage, shape, draw.choice([INT32, INT64]), running, seed=draw.randrange(99),
                       key=replace(KEY, step=step, stream=draw.randrange(0, 99, 3)),
                       lr_scale=draw.choice([0.01, 0.3, 1.7]) * 2**20, **settings)
            for shape, storage, running, settings in kinds]


def assert_rounded(jobs, there, results, lr):
    total = 0
    for job, moved, (flips, moments) in zip(jobs, there, results, strict=True):
        stored, expected, expected_flips = rounded_by_definition(job, lr)
        assert torch.equal(moved.stored.cpu(), stored)
        assert torch.equal(moments.cpu(), expected)
        assert int(flips) == expected_flips
        total += expected_flips
    return total


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (1, 6), (2, 6)])
def test_weights_that_move_together_equal_each_by_its_definition(triton_twins, seed, step, monkeypatch):
    monkeypatch.setattr("gft.ops.triton.alike.MOST_LAYERS", 3)
    draw = random.Random(seed)
    jobs = jobs_of(draw, draw.choices(KINDS[:5], k=5) + draw.sample(KINDS, k=4), step)
    there = [on(triton_twins.device, job) for job in jobs]
    assert assert_rounded(jobs, there, triton_twins.round_many(there, 0.4), 0.4) > 0


def test_weights_without_elements_or_with_other_votes_move_together_too(triton_twins):
    jobs = jobs_of(random.Random(3), KINDS[:2])
    small = replace(jobs[0], votes=jobs[0].votes.clamp(-99, 99).to(torch.int16))
    empty = ops.RoundingJob(torch.zeros(0, 24, dtype=torch.int8), torch.zeros(0, 24, dtype=INT32), Storage(2), jobs[0].key,
                            1.0, 1)
    jobs = [small, jobs[1], empty]
    there = [on(triton_twins.device, job) for job in jobs]
    results = triton_twins.round_many(there, 0.4)
    assert assert_rounded(jobs[:2], there[:2], results[:2], 0.4) > 0
    assert int(results[2].flips) == 0


@pytest.mark.parametrize("lr", [0.0, 0.4])
def test_weights_that_move_together_read_numbers_on_the_device(triton_twins, lr):
    """As a captured CUDA graph has them."""
    (job,) = jobs_of(random.Random(1), KINDS[:1])
    there = on(triton_twins.device, job)
    there = replace(there, key=replace(there.key, step=torch.tensor(6, device=triton_twins.device)))
    results = triton_twins.round_many([there], torch.tensor(lr, device=triton_twins.device))
    assert (assert_rounded([job], [there], results, lr) > 0) == (lr > 0)


@pytest.mark.parametrize("seed", range(2))
def test_a_table_tells_where_votes_lie_and_may_be_written_anew(triton_twins, seed, monkeypatch):
    """As a recorded step has them: first the table is asked for, then votes come to lie elsewhere."""
    monkeypatch.setattr("gft.ops.triton.alike.MOST_LAYERS", 3)
    draw = random.Random(seed)
    jobs = jobs_of(draw, draw.choices(KINDS[:5], k=6) + draw.sample(KINDS, k=3))
    places = None
    for _ in range(2):
        there = [replace(on(triton_twins.device, job), votes=aligned(job.votes.to(triton_twins.device))) for job in jobs]
        votes = [job.votes for job in there]
        if places is None:
            places = Places(votes)
        else:
            places.write(votes)
        with told_by(places):
            assert assert_rounded(jobs, there, triton_twins.round_many(there, 0.4), 0.4) > 0
        assert places.whole


def test_what_is_made_of_votes_in_a_step_is_not_in_the_table():
    votes, others, made = (torch.zeros(2, 3, dtype=INT32) for _ in range(3))  # all there at once, at places of their own
    places = Places([votes, others])
    assert places.part_for([made]) is None
    assert places.part_for([votes]) is not None
    assert not places.whole


@pytest.mark.parametrize("other", [{"seed": 1}, {"call": 9}, {"step": 5}], ids=str)
def test_weights_that_move_together_share_their_random_numbers(triton_twins, other, refuses):
    jobs = [on(triton_twins.device, job) for job in jobs_of(random.Random(1), KINDS[:2])]
    jobs[1] = replace(jobs[1], key=replace(jobs[1].key, **other))
    before = jobs[0].stored.clone()
    with refuses(UsageError, "share one device, seed, step and call"):
        triton_twins.round_many(jobs, 0.4)
    assert torch.equal(jobs[0].stored, before)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", [Storage(2), Storage(3, False)], ids=str)
@pytest.mark.parametrize("shape", [(384, 48), (67, 130)], ids=["whole", "odd"])
def test_many_weights_on_gpu_equal_the_cpu(storage, shape):
    jobs = [random_job(storage, shape, running=True, seed=number, threshold=0.57, follow=90,
                       key=replace(KEY, stream=3 * number)) for number in range(35)]
    there = [on("cuda", job) for job in jobs]
    assert assert_rounded(jobs, there, ops.round_many(there, 0.4), 0.4) > 0


@pytest.mark.parametrize(("shape", "first"), [((1,), 0), ((33, 71), 0), ((5, 8), 24), ((1500,), 2**34), ((9,), 3)])
def test_numbers_are_drawn_as_the_definition_draws_them(triton_twins, shape, first):
    key, numbers = replace(KEY, first=first), torch.empty(shape, dtype=torch.int32, device=triton_twins.device)
    wanted = ops.draw_noise.definition(torch.empty(shape, dtype=torch.int32), key)
    got = triton_twins.draw_noise(numbers, key)
    if first % 8:
        assert got is NotImplemented
    else:
        assert torch.equal(got.cpu(), wanted)
    assert wanted.any()
