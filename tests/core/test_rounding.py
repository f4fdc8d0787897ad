"""The default rule against the reference: normalised votes, soft threshold, stochastic rounding, inertia, memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gft import ops, reference
from gft.ops.rounding import Rounded, RoundingJob, rounded_values, share_of_newest
from gft.philox import NoiseKey, noise16
from gft.rules import Rounding
from gft.rules.rounding import rms_beyond
from gft.storage import Storage

KEY = NoiseKey(seed=5, step=1, stream=2, call=3)


def random_stored(shape: tuple[int, int], storage: Storage) -> torch.Tensor:
    values = torch.randint(storage.lowest, storage.limit + 1, shape, dtype=torch.int8)
    return storage.from_values(values).clone()


def random_votes(shape: tuple[int, ...], top: int = 40) -> torch.Tensor:
    return torch.randint(-top, top + 1, shape, dtype=torch.int64 if top >= 2**31 else torch.int32)


def noise_of(shape: tuple[int, ...], key: NoiseKey = KEY) -> torch.Tensor:
    return noise16(torch.Size(shape).numel(), key).view(shape)


def name_of(one: object) -> str:
    if isinstance(one, Storage):
        return f"{one.bits}bit-" + ("packed" if not one.memory else "inertia" if one.inertia else "memory")
    return f"{one[0]}x{one[1]}" if isinstance(one, tuple) else str(one)


def job_of(votes: torch.Tensor, storage: Storage, stored: torch.Tensor | None = None, key: NoiseKey = KEY,
           **rest) -> RoundingJob:
    """By which lr is the rms move in levels, where there is no threshold."""
    stored = storage.store(torch.zeros(votes.shape, dtype=torch.int8)) if stored is None else stored.clone()
    return RoundingJob(stored, votes, storage, key, storage.resolution * 65536.0, int(votes.abs().max()), **rest)


def rounded(votes: torch.Tensor, lr: float, storage: Storage, stored: torch.Tensor | None = None,
            **rest) -> tuple[torch.Tensor, Rounded]:
    """Stored weights after a step, and what the step gave."""
    job = job_of(votes, storage, stored, **rest)
    result, = ops.round_many([job], lr)
    return job.stored, result


def positions_of(values: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Where votes have carried each weight, in levels."""
    levels = storage.value_levels(values).double()
    return levels + (values.double() - levels * storage.unit) / storage.resolution


def moves_of(votes: torch.Tensor, lr: float, storage: Storage, **rest) -> tuple[torch.Tensor, torch.Tensor]:
    """lr · u in levels before it is rounded, and the second moments as renewed."""
    plan, moments = ops.rounding_plan(job_of(votes, storage, **rest), lr)
    share = votes * plan.row.double() * plan.column.double()
    return share.clamp(-plan.cap, plan.cap) / (storage.resolution * 65536), moments


# ---------------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize(("storage", "shape", "top", "lr", "follow", "threshold"), [
    (Storage(2), (63, 65), 30_000, 0.37, 70, 0.0),
    (Storage(3), (1, 64), 40, 0.2, 26, 0.0),
    (Storage(4), (257, 130), 40, 0.37, 128, 0.0),
    (Storage(6), (63, 65), 1, 0.8, 200, 0.0),
    (Storage(2, inertia=False), (1, 64), 40, 0.1, 256, 0.0),
    (Storage(4, inertia=False), (63, 65), 1, 0.37, 256, 0.0),
    (Storage(8), (63, 65), 30_000, 0.9, 256, 0.4),
    (Storage(2, memory=False), (63, 65), 1000, 0.6, 256, 1.3),
    (Storage(3, memory=False), (63, 65), 40, 0.37, 256, 0.0),
    (Storage(4, memory=False), (1, 64), 30_000, 0.7, 256, 0.5),
    (Storage(5, memory=False), (63, 65), 40, 0.3, 256, 1.6),
    (Storage(8, memory=False), (63, 65), 1, 0.5, 256, 0.9),
    (Storage(2, memory=False, half=True), (63, 65), 1000, 0.6, 256, 0.6),
], ids=name_of)
def test_rounding_equals_the_reference(storage, shape, top, lr, follow, threshold):
    stored, votes = random_stored(shape, storage), random_votes(shape, top)
    values = storage.values(stored, shape[1])
    expected = reference.rounding(values.tolist(), votes.tolist(), noise_of(shape).tolist(), lr=lr, bits=storage.bits,
                                  memory=storage.asked_for, follow=follow, threshold=threshold)

    new, result = rounded(votes, lr, storage, stored, follow=follow, threshold=threshold)

    # The reference's factors are float64: in one weight of 65,536 or so their last bit may decide. In none of these.
    assert storage.values(new, shape[1]).tolist() == expected
    levels = storage.levels(new, shape[1])
    assert int(result.flips) == int((levels != storage.value_levels(values)).sum()) > 0
    assert int(levels.abs().max()) <= storage.largest
    assert result.second_moment.tolist() == pytest.approx(reference.mean_squares(votes.tolist()), rel=1e-6)


STORAGES = [*(Storage(bits, memory) for bits in range(2, 9) for memory in (True, False)),
            Storage(2, memory=False, half=True)]


@given(st.data())
def test_any_step_is_within_one_unit_of_the_reference(data):
    storage, follow = data.draw(st.sampled_from(STORAGES)), data.draw(st.integers(1, 256))
    storage = replace(storage, inertia=follow < 256)
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    top = data.draw(st.sampled_from([1, 50, 2**14, 2**36]))
    numbers = st.lists(st.integers(-top, top), min_size=rows * columns, max_size=rows * columns)
    votes = torch.tensor(data.draw(numbers)).view(rows, columns)
    lr, threshold = data.draw(st.floats(0.01, 1)), data.draw(st.sampled_from([0.0, 0.6, 3.0]))
    key, stored = NoiseKey(data.draw(st.integers(0, 99)), 7, 8), random_stored((rows, columns), storage)
    values = expected = storage.values(stored, columns)
    if votes.any():  # the reference would divide by the mean of no votes
        expected = torch.tensor(reference.rounding(values.tolist(), votes.tolist(), noise_of((rows, columns), key).tolist(),
                                                   lr=lr, bits=storage.bits, memory=storage.asked_for, follow=follow,
                                                   threshold=threshold))
    new = storage.values(rounded(votes, lr, storage, stored, key=key, follow=follow, threshold=threshold)[0], columns)
    apart = positions_of(new, storage) - positions_of(expected, storage)
    assert float(apart.abs().max()) * storage.resolution <= 1
    assert storage.lowest <= int(new.min())
    assert int(new.max()) <= storage.limit


@pytest.mark.parametrize("top", [2**20, 2**36, 2**50], ids="votes to {}".format)
def test_rounding_of_large_votes_equals_the_reference(top):
    storage, votes = Storage(4), random_votes((63, 65), top)
    stored = random_stored((63, 65), storage)
    expected = reference.rounding(stored.tolist(), votes.tolist(), noise_of((63, 65)).tolist(), lr=0.2, bits=4, memory=True,
                                  follow=99)
    new, _ = rounded(votes, 0.2, storage, stored, follow=99)
    # Beyond 28 bits votes are shifted before they are squared: a small relative error in the moves.
    apart = (positions_of(new, storage) - positions_of(torch.tensor(expected), storage)).abs() * storage.resolution
    assert float(apart.max()) <= 1
    assert float((apart > 0).double().mean()) < 1e-3


@pytest.mark.parametrize("storage", [Storage(2, memory=False), Storage(4, inertia=False)], ids=["packed", "memory"])
def test_rounding_moves_by_lr_times_u_in_the_mean_over_all_noise(storage):
    votes = random_votes((6, 9))
    plan, _ = ops.rounding_plan(job_of(votes, storage), 0.23)
    every_noise = torch.arange(65536, dtype=torch.int32)[:, None].expand(-1, 9)
    room = Storage(8, memory=False)  # so that no edge of the grid is reached
    for row, expected in enumerate(reference.rounding_moves(votes.tolist(), 0.23)):
        moved = rounded_values(torch.zeros(65536, 9, dtype=torch.int8), votes[row].expand(65536, 9), every_noise, room, plan,
                               plan.row[row : row + 1])
        wanted = -storage.resolution * torch.tensor(expected, dtype=torch.float64)
        assert torch.allclose(moved.double().mean(0), wanted, rtol=1e-6, atol=1.1 / 65536)


# ---------------------------------------------------------------------------------------------------- normalised votes


def test_moves_have_rms_lr_however_large_rows_and_columns_are():
    votes = (torch.randn(257, 130) * torch.logspace(2, 4, 257)[:, None] * torch.logspace(-1, 1, 130)).int()
    moved = rounded(votes, 0.3, Storage(4, inertia=False))[0].double() / 16
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.3, rel=0.05)
    assert float(moved.square().mean(1).sqrt().min()) > 0.15
    assert float(moved.square().mean(0).sqrt().min()) > 0.15


def test_no_weight_moves_by_more_than_four_times_the_rms():
    votes = torch.ones(63, 65, dtype=torch.int32)
    votes[torch.arange(63), torch.arange(63)] = -10_000  # u far over 4
    moved = rounded(votes, 0.5, Storage(4, inertia=False))[0]
    assert moved.diagonal().tolist() == [4 * 0.5 * 16] * 63
    assert int(moved.max()) == 4 * 0.5 * 16


def test_rows_columns_and_layers_without_votes_stay():
    storage, votes = Storage(4, inertia=False), random_votes((9, 12))
    votes[4], votes[:, 7] = 0, 0
    stored = random_stored((9, 12), storage)
    new, _ = rounded(votes, 0.9, storage, stored)
    assert torch.equal(new[4], stored[4])
    assert torch.equal(new[:, 7], stored[:, 7])
    assert not torch.equal(new, stored)
    assert torch.equal(rounded(torch.zeros_like(votes), 0.9, storage, stored)[0], stored)


@pytest.mark.parametrize("shift", [1, 20, 40], ids="votes · 2^{}".format)
def test_rounding_depends_on_the_proportions_of_votes_alone(shift):
    storage, votes = Storage(3), random_votes((63, 65), 1000).long()
    stored = random_stored((63, 65), storage)
    one, other = (rounded(beta, 0.3, storage, stored, follow=77)[0] for beta in (votes, votes << shift))
    assert torch.equal(one, other)
    assert not torch.equal(one, stored)


@pytest.mark.parametrize(("bound", "shape"), [(1, (1, 5)), (2**20, (4, 70000)), (2**26, (4, 70000)), (2**31 - 1, (1, 5)),
                                              (2**31 - 1, (4, 70000)), (2**45, (1, 5)), (2**45, (4, 70000))], ids=str)
def test_squares_of_the_largest_votes_are_summed_without_overflow(bound, shape):
    """And no more bits are taken off than need be."""
    job = job_of(torch.full(shape, bound, dtype=torch.int64), Storage(4))
    _, moments = ops.rounding_plan(job, 0.3)
    assert torch.allclose(moments, torch.full((sum(shape) + 1,), float(bound) ** 2), rtol=1e-6)
    assert job.shift == 0 or (2 ** bound.bit_length() >> (job.shift - 1)) ** 2 * 2 ** max(shape).bit_length() > 2**63


def test_lr_in_a_tensor_moves_as_a_number_does():
    storage, votes = Storage(3), random_votes((63, 65))
    stored = random_stored((63, 65), storage)
    one, other = (rounded(votes, lr, storage, stored, follow=50)[0] for lr in (0.37, torch.tensor(0.37)))
    assert torch.equal(one, other)


def test_rounding_gives_the_same_some_rows_at_a_time(monkeypatch):
    storage, votes = Storage(2, memory=False), random_votes((257, 130))
    stored = random_stored((257, 130), storage)
    whole, result = rounded(votes, 0.7, storage, stored, threshold=0.4)
    monkeypatch.setitem(ops.moves.AT_ONCE, "cpu", 50 * 130)
    assert torch.equal(rounded(votes, 0.7, storage, stored, threshold=0.4)[0], whole)
    assert int(result.flips) > 0


# ---------------------------------------------------------------------------------------------------- running second moments


@pytest.mark.parametrize("rescale_step", [False, True], ids=["memory", "packed"])
def test_second_moments_run_over_the_steps_as_the_reference_says(rescale_step):
    betas, running = [random_votes((6, 9)) for _ in range(140)], None
    betas[0][2], betas[0][:, 5] = 0, 0  # their first votes come later, and count in full
    betas[-1] *= 5
    for step, votes in enumerate(betas):
        moves, running = moves_of(votes, 0.3, Storage(4), running=running, rescale_step=rescale_step,
                                  key=replace(KEY, step=step))
        if step in (0, 1, 2, 7, 139):
            expected = reference.running_mean_squares([beta.tolist() for beta in betas[: step + 1]])
            assert running.tolist() == pytest.approx(expected, rel=1e-5)
            wanted = torch.tensor(reference.rounding_moves(votes.tolist(), 0.3, expected, rescale_step), dtype=torch.float64)
            assert torch.allclose(moves, wanted, rtol=1e-5, atol=0)
    rms = float(moves.square().mean().sqrt())  # of votes five times as large as those before
    assert rms == pytest.approx(0.3, rel=0.3) if rescale_step else rms > 0.8
    moves, _ = moves_of(0 * votes, 0.3, Storage(4), running=running, rescale_step=rescale_step)
    assert not moves.any()  # and not NaN


def test_a_step_of_large_votes_moves_further():
    """What Adam's second moment does, and a rule that looks at one step alone does not."""
    votes, running = random_votes((63, 65)), None
    for step in range(300):
        usual, running = moves_of(votes, 0.3, Storage(4), running=running, key=replace(KEY, step=step))
    large, _ = moves_of(2 * votes, 0.3, Storage(4), running=running, key=replace(KEY, step=300))
    assert float(large.square().mean()) == pytest.approx(4 * float(usual.square().mean()), rel=0.05)


@pytest.mark.parametrize("step", [0, 1, 2, 3, 6, 7, 126, 127, 128, 10**6])
def test_the_newest_step_counts_the_same_where_a_tensor_counts_the_steps(step):
    share = share_of_newest(step)
    assert float(share_of_newest(torch.tensor(step))) == share
    assert 1 / 128 <= share <= max(2 / (step + 1), 1 / 128)


# ---------------------------------------------------------------------------------------------------- threshold


@pytest.mark.parametrize(("bits", "threshold"), [(2, 1.9584), (3, 0.5), (8, 3.0)])
def test_votes_below_the_threshold_move_nothing_and_larger_ones_do(bits, threshold):
    storage, votes = Storage(bits, memory=False), (torch.randn(63, 65) ** 3 * 1000).to(torch.int32)
    stored = random_stored((63, 65), storage)
    new, result = rounded(votes, 0.9, storage, stored, threshold=threshold)
    u = moves_of(votes, 1.0, storage)[0]
    moved = storage.values(new, 65) != storage.values(stored, 65)
    assert not moved[u.abs() < 0.999 * threshold].any()
    assert int(result.flips) > 0


@pytest.mark.parametrize("threshold", [0.0, 0.57, 1.0, 1.9584, 3.0])
def test_what_exceeds_the_threshold_is_scaled_to_rms_one(threshold):
    z = torch.randn(1_000_000, dtype=torch.float64)
    beyond = (z.abs() - threshold).clamp_min(0) / rms_beyond(threshold)
    assert float(beyond.square().mean()) == pytest.approx(1, rel=0.05)


# ---------------------------------------------------------------------------------------------------- inertia and memory


@pytest.mark.parametrize("bits", [2, 3, 6], ids="{}bit".format)
def test_levels_wait_as_inertia_says_and_the_rest_is_remembered(bits):
    storage, votes, noise = Storage(bits), random_votes((257, 130)), noise_of((257, 130))
    values = random_stored((257, 130), storage)
    noise -= (noise & 255 == 255).to(noise.dtype)  # so that below 255 are all
    plan, _ = ops.rounding_plan(job_of(votes, storage), 0.2)
    at_once, none, some = (rounded_values(values, votes, noise, storage, replace(plan, follow=follow), plan.row)
                           for follow in (255, 0, 64))
    levels = storage.value_levels
    assert torch.equal(levels(none), levels(values))
    # With or without its level, a weight has been carried equally far, one level from where its level was at most.
    assert torch.equal(positions_of(at_once, storage), positions_of(none, storage))
    assert torch.equal(positions_of(at_once, storage), positions_of(some, storage))
    assert float((positions_of(none, storage) - levels(values)).abs().max()) <= 1
    # What follows goes to the nearest level.
    assert float((levels(at_once) - positions_of(at_once, storage)).abs().max()) == 0.5
    moved = levels(at_once) != levels(values)
    assert float((levels(some) != levels(values))[moved].double().mean()) == pytest.approx(0.25, abs=0.03)


def test_inertia_makes_the_mean_weight_follow_as_momentum_would():
    """Many weights with the same votes: the mean of their levels is lr · momentum's path."""
    inertia, lr, many, storage = 0.8, 0.05, 20_000, Storage(4)
    stored = storage.store_nearest(2 * torch.rand(1, many) - 1)  # evenly over two levels, so that rounding averages out
    wanted, velocity, start = 0.0, 0.0, float(storage.value_levels(stored).double().mean())
    for step in range(60):
        direction = 1 if step < 35 else -1
        votes = torch.full((1, many), 7 * direction, dtype=torch.int32)
        stored, _ = rounded(votes, lr, storage, stored, follow=Rounding(inertia=inertia).follow, key=replace(KEY, step=step))
        velocity = inertia * velocity + (1 - inertia) * direction
        wanted -= lr * velocity
        assert float(storage.value_levels(stored).double().mean()) - start == pytest.approx(wanted, abs=0.07)
    assert wanted < -0.3


def test_some_levels_follow_however_large_the_inertia_is():
    storage, votes = Storage(4), random_votes((257, 130))
    stored = random_stored((257, 130), storage)
    assert int(rounded(votes, 0.5, storage, stored, follow=Rounding(inertia=0.999).follow)[1].flips) > 0


@pytest.mark.parametrize("bits", [2, 4, 6], ids="{}bit".format)
def test_what_gets_no_votes_comes_to_rest(bits):
    """Half-way between two levels, too: else levels would flicker after lr has come to next to nothing."""
    storage, votes = Storage(bits), torch.zeros(40, 50, dtype=torch.int32)
    values, votes[0, 0] = random_stored((40, 50), storage), 1
    plan, _ = ops.rounding_plan(job_of(votes, storage, follow=255), 1e-6)
    at_rest = rounded_values(values, votes, noise_of((40, 50)) & ~255, storage, plan, plan.row)
    assert not torch.equal(at_rest, values)
    for step in range(3):
        again = rounded(votes, 1e-6, storage, at_rest, follow=255, key=replace(KEY, step=step))[0]
        assert torch.equal(again[1:, 1:], at_rest[1:, 1:])


@pytest.mark.parametrize("bits", [2, 4], ids="{}bit".format)
def test_without_inertia_memory_counts_twice_as_finely(bits):
    """On average a weight goes where its votes carry it, and its level is always the nearest."""
    many, lr, storage = 40_000, 0.013, Storage(bits, inertia=False)
    assert storage.resolution == 2 * Storage(bits).resolution
    stored, votes = torch.zeros(1, many, dtype=torch.int8), torch.full((1, many), 7, dtype=torch.int32)
    for step in range(30):
        stored, _ = rounded(votes, lr, storage, stored, key=replace(KEY, step=step))
    assert float(stored.double().mean()) / storage.unit == pytest.approx(-30 * lr, rel=0.02)
    assert len(stored.unique()) > 3
    assert torch.equal(storage.value_levels(stored), torch.floor(stored.double() / storage.unit + 0.5).to(torch.int8))
