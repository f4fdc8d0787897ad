"""step.py: topk and rounding against the reference, and `optimizer.move`, which applies them to a stored weight."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gft import reference, step
from gft.grid import SPACING, Grid
from gft.optimizer import move
from gft.philox import noise16
from gft.vote import Ballot

both_forms = pytest.mark.parametrize("memory", [False, True], ids=["packed", "memory"])
both_rules = pytest.mark.parametrize("rule", ["topk", "rounding"])


def noise_of(shape: tuple[int, ...], seed: int = 5) -> torch.Tensor:
    return noise16(torch.Size(shape).numel(), seed=seed, step=1, stream=2).view(shape)


def random_values(shape: tuple[int, ...], limit: int, lowest: int | None = None) -> torch.Tensor:
    return torch.randint(-limit if lowest is None else lowest, limit + 1, shape, dtype=torch.int8)


def random_votes(shape: tuple[int, ...], top: int = 40) -> torch.Tensor:
    return torch.randint(-top, top + 1, shape, dtype=torch.int64 if top >= 2**31 else torch.int32)


def assert_near_reference(new: torch.Tensor, expected: torch.Tensor) -> None:
    """A move's float factors may differ in their last bit, which may turn one stochastic rounding in thousands."""
    difference = (new.long() - expected.long()).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).double().mean()) < 1e-3


# ---------------------------------------------------------------------------------------------------- topk

VOTES = {
    "ties": lambda shape: random_votes(shape, 3),
    "over 2^16": lambda shape: random_votes(shape, 2**20),
    "over 2^32": lambda shape: random_votes(shape, 2**44),
    "spread over 44 bits": lambda shape: random_votes(shape, 2**44) >> torch.randint(0, 44, shape),
    "all equal": lambda shape: torch.full(shape, -7, dtype=torch.int32),
    "all zero": lambda shape: torch.zeros(shape, dtype=torch.int32),
    "one voter": lambda shape: torch.nn.functional.pad(torch.tensor([[5]]), (0, shape[1] - 1, 0, shape[0] - 1)),
}


@pytest.mark.parametrize("k", [0.001, 0.3, 1.0], ids="k={}".format)
@pytest.mark.parametrize("kind", VOTES)
@pytest.mark.parametrize("shape", [(1, 64), (63, 65)], ids="{0[0]}x{0[1]}".format)
def test_topk_equals_the_reference(shape, kind, k):
    values, votes, noise = random_values(shape, 3), VOTES[kind](shape), noise_of(shape)
    expected = reference.topk(values.tolist(), votes.tolist(), noise.tolist(), k=k, p_min=0.02, largest=3)

    bounds = step.topk_bounds(votes, k)
    new = values if bounds is None else step.topk(values, votes, noise, bounds, 0.02, 1, 3)

    assert (bounds is None) == (round(k * values.numel()) == 0)
    assert new.dtype == torch.int8
    assert new.tolist() == expected


@given(st.data())
def test_topk_equals_the_reference_for_any_votes(data):
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    top = data.draw(st.sampled_from([1, 3, 70_000, 2**46]))
    size = rows * columns

    def matrix(low: int, high: int) -> torch.Tensor:
        numbers = data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        return torch.tensor(numbers).view(rows, columns)

    values, votes, noise = matrix(-7, 7), matrix(-top, top), matrix(0, 65535)
    k, p_min = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    expected = reference.topk(values.tolist(), votes.tolist(), noise.tolist(), k=k, p_min=p_min, largest=7)
    bounds = step.topk_bounds(votes, k)
    new = values if bounds is None else step.topk(values, votes, noise, bounds, p_min, 1, 7)
    assert new.tolist() == expected


@pytest.mark.parametrize("top", [5, 2**17, 2**45], ids="votes to {}".format)
def test_topk_bounds_are_those_of_a_sort(top):
    votes = random_votes((63, 65), top)
    ordered = votes.abs().flatten().sort(descending=True).values
    for count in (1, 2, 1000, 4094, 4095):
        bounds = step.topk_bounds(votes, count / 4095)
        assert (int(bounds.least), int(bounds.largest)) == (int(ordered[count - 1]), int(ordered[0]))


def test_topk_of_k_zero_chooses_nothing():
    assert step.topk_bounds(random_votes((63, 65)), 0.0) is None


def test_topk_moves_a_whole_level_and_keeps_the_memory():
    values, votes = torch.tensor([[-5, 5, 37, 100]], dtype=torch.int8), torch.tensor([[3, -3, 3, -3]])
    new = step.topk(values, votes, torch.zeros(1, 4, dtype=torch.int32), step.topk_bounds(votes, 1.0), 0.1, 16, 112)
    assert new.tolist() == [[-21, 21, 21, 112]]


def test_topk_at_both_ends_of_p_min():
    votes = torch.tensor([[1, -2, 3, -9]])
    bounds = step.topk_bounds(votes, 1.0)
    at_zero, at_one = step.chances(votes, bounds, 0.0), step.chances(votes, bounds, 1.0)
    assert at_zero.tolist() == [[0, 65536 // 8, 65536 * 2 // 8, 65536]]
    assert at_one.tolist() == [[65536] * 4]


def test_topk_chance_is_never_rounded_to_none_nor_given_without_votes():
    votes = torch.tensor([[0, 1, 2]])
    bounds = step.topk_bounds(votes, 1.0)
    assert step.chances(votes, bounds, 1e-9).tolist() == [[0, 32768, 65536]]
    bounds = step.topk_bounds(votes, 0.7)
    assert step.chances(votes, bounds, 1e-9).tolist() == [[0, 1, 65536]]


# ---------------------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize(("bits", "memory_bits", "follow"), [(2, 6, 70), (4, 4, 70), (2, 6, 256), (4, 4, 256), (2, 0, 70),
                                                             (3, 0, 70), (5, 0, 70), (8, 0, 70)])
@pytest.mark.parametrize(("shape", "top"), [((1, 64), 1), ((1, 64), 30_000), ((63, 65), 1), ((63, 65), 30_000),
                                            ((257, 130), 40)], ids=str)
def test_rounding_equals_the_reference(shape, top, bits, memory_bits, follow):
    kept = Grid(bits, *shape, memory_bits > 0)
    assert kept.memory_bits == memory_bits
    values, votes, noise = random_values(shape, kept.limit, kept.lowest), random_votes(shape, top), noise_of(shape)
    expected = reference.rounding(values.tolist(), votes.tolist(), noise.tolist(), lr=0.37, memory_bits=memory_bits,
                                  largest=2 ** (bits - 1) - 1, follow=follow, spare_bits=kept.spare_bits)
    factors = step.rounding_factors(votes, 0.37, kept.resolution(follow < 256))[0]
    new = step.rounding(values, votes, noise, factors, kept.limit, memory_bits, follow, kept.lowest)
    assert new.dtype == torch.int8
    assert_near_reference(new, torch.tensor(expected))
    assert not torch.equal(new, values)


@given(st.data())
def test_rounding_is_within_one_unit_of_the_reference_for_any_votes(data):
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    top = data.draw(st.sampled_from([1, 50, 2**14]))
    numbers = st.lists(st.integers(-top, top), min_size=rows * columns, max_size=rows * columns)
    votes = torch.tensor(data.draw(numbers)).view(rows, columns)
    lr = data.draw(st.floats(0.01, 1))
    values, noise = random_values((rows, columns), 112), noise_of((rows, columns), seed=data.draw(st.integers(0, 99)))
    if not votes.any():
        expected = values  # the reference would divide by the mean of no votes
    else:
        expected = torch.tensor(reference.rounding(values.tolist(), votes.tolist(), noise.tolist(), lr=lr,
                                                   memory_bits=4, largest=7, follow=99))
    new = step.rounding(values, votes, noise, step.rounding_factors(votes, lr, 8)[0], 112, 4, follow=99)
    differ = step_apart(new, expected)
    assert differ <= 1


@pytest.mark.parametrize("unit", [1, 16])
def test_rounding_moves_by_lr_times_u_in_the_mean_over_all_noise(unit):
    votes = random_votes((6, 9))
    factors = step.rounding_factors(votes, 0.23, unit)[0]
    every_noise = torch.arange(65536, dtype=torch.int32)[:, None].expand(-1, 9)
    for row, expected in enumerate(reference.rounding_moves(votes.tolist(), 0.23)):
        moved = step.rounding(torch.zeros(65536, 9, dtype=torch.int8), votes[row].expand(65536, 9), every_noise,
                              factors._replace(row=factors.row[row : row + 1]), 127)
        wanted = -unit * torch.tensor(expected, dtype=torch.float64)
        assert torch.allclose(moved.double().mean(0), wanted, rtol=1e-6, atol=1.1 / 65536)


def test_rounding_has_rms_move_lr_whatever_the_rows_and_columns_weigh():
    votes = (torch.randn(257, 130) * torch.logspace(2, 4, 257)[:, None] * torch.logspace(-1, 1, 130)).int()
    moved = step.rounding(torch.zeros(257, 130, dtype=torch.int8), votes, noise_of((257, 130)),
                          step.rounding_factors(votes, 0.3, 16)[0], 112).double() / 16
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.3, rel=0.05)
    by_row, by_column = moved.square().mean(1).sqrt(), moved.square().mean(0).sqrt()
    assert float(by_row.min()) > 0.15
    assert float(by_column.min()) > 0.15


def test_rounding_moves_no_weight_by_more_than_four_times_the_rms():
    votes = torch.ones(63, 65, dtype=torch.int32)
    votes[torch.arange(63), torch.arange(63)] = -10_000  # u far over 4
    moved = step.rounding(torch.zeros(63, 65, dtype=torch.int8), votes, noise_of((63, 65)),
                          step.rounding_factors(votes, 0.5, 16)[0], 112)
    assert moved.diagonal().tolist() == [4 * 0.5 * 16] * 63
    assert int(moved.max()) == 4 * 0.5 * 16


def test_rounding_leaves_silent_rows_columns_and_layers_alone():
    values, votes = random_values((9, 12), 100), random_votes((9, 12))
    votes[4], votes[:, 7] = 0, 0
    new = step.rounding(values, votes, noise_of((9, 12)), step.rounding_factors(votes, 0.9, 16)[0], 112)
    assert torch.equal(new[4], values[4])
    assert torch.equal(new[:, 7], values[:, 7])
    assert not torch.equal(new, values)
    nothing = torch.zeros_like(votes)
    new = step.rounding(values, nothing, noise_of((9, 12)), step.rounding_factors(nothing, 0.9, 16)[0], 112)
    assert torch.equal(new, values)


def test_squares_run_over_the_steps_as_the_reference_says():
    betas = [random_votes((6, 9)) for number in range(140)]
    betas[0][2], betas[0][:, 5] = 0, 0  # their first voices come later, and count in full
    running = None
    for number, votes in enumerate(betas):
        factors, running = step.rounding_factors(votes, 0.3, 8, before=step.Squares(running, number))
        if number in (0, 1, 2, 7, 139):
            expected = reference.running_mean_squares([beta.tolist() for beta in betas[: number + 1]])
            assert running.tolist() == pytest.approx(expected, rel=1e-5)
            moves = votes * factors.row.double() * factors.column.double() / (8 * 65536)
            wanted = torch.tensor(reference.rounding_moves(votes.tolist(), 0.3, expected), dtype=torch.float64)
            assert torch.allclose(moves.clamp(-1.2, 1.2), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 6, 7, 126, 127, 128, 10**6])
def test_the_share_of_the_newest_is_the_same_on_a_device(number):
    share = step.share_of_newest(number)
    assert float(step.share_of_newest(torch.tensor(number))) == share
    assert share >= 1 / 128
    assert share <= 2 / (number + 1) or share == 1 / 128


def test_a_louder_step_moves_further():
    """What Adam's second moment does, and a rule that looks at one step alone does not."""
    votes, running = random_votes((63, 65)), None
    for number in range(300):
        quiet, running = step.rounding_factors(votes, 0.3, 8, before=step.Squares(running, number))
    loud, _ = step.rounding_factors(3 * votes, 0.3, 8, before=step.Squares(running, 300))

    def rms(votes, factors):
        return float((votes * factors.row * factors.column).double().square().mean().sqrt())

    assert rms(3 * votes, loud) == pytest.approx(3 * rms(votes, quiet), rel=0.05)


@pytest.mark.parametrize("ceiling", [1, 2**20, 2**26, 2**31 - 1, 2**45])
@pytest.mark.parametrize("shape", [(1, 5), (4, 70000)], ids=str)
def test_squares_of_the_largest_votes_fit(ceiling, shape):
    """And no more bits are taken off than need be; the sum of all is right also where int64 cannot hold it."""
    shift = step.square_shift(ceiling, *shape)
    votes = torch.full(shape, ceiling, dtype=torch.int64)
    row, column = step._squares(votes, shift)
    assert row.tolist() == [(ceiling >> shift) ** 2 * shape[1]] * shape[0]
    assert column.tolist() == [(ceiling >> shift) ** 2 * shape[0]] * shape[1]
    assert float(step._sum_as_double(row)) == pytest.approx(float((ceiling >> shift) ** 2 * shape[0] * shape[1]), rel=1e-15)
    assert shift == 0 or (2 ** ceiling.bit_length() >> (shift - 1)) ** 2 * 2 ** max(shape).bit_length() > 2**63


def test_only_votes_beyond_the_quorum_are_heard():
    """Against the reference; and for Gaussian votes the rms move stays lr."""
    values, noise, quorum = random_values((63, 65), 1), noise_of((63, 65)), step.quorum_of(1.6, 2)
    votes = (torch.randn(63, 65, generator=torch.Generator().manual_seed(6)) * 1000).to(torch.int32)
    assert quorum == pytest.approx(2, abs=0.05)
    assert step.quorum_of(1.6, 4) == pytest.approx(0.57, abs=0.05)
    factors = step.rounding_factors(votes, 0.2, 1, quorum=quorum)[0]
    new = step.rounding(values, votes, noise, factors, 1)
    expected = reference.rounding(values.tolist(), votes.tolist(), noise.tolist(), lr=0.2 / step.rms_heard(quorum),
                                  memory_bits=0, largest=1, quorum=quorum)
    assert (new != torch.tensor(expected)).sum() <= 1  # where float32 and float64 differ in the last of 16 bits
    assert (new != values).any()
    size = votes.float() * factors.row * factors.column / (factors.cap / step.CLIP)
    assert torch.equal(new[size.abs() < 0.999 * quorum], values[size.abs() < 0.999 * quorum])

    z = torch.randn(1_000_000, generator=torch.Generator().manual_seed(5)).double()
    for one in (0.0, 0.57, 1.0, quorum):
        assert float((z.abs() - one).clamp_min(0).square().mean().sqrt()) == pytest.approx(step.rms_heard(one), rel=0.02)


def test_levels_a_step_measures_a_move_in_weights_not_in_levels():
    for bits in range(2, 9):
        for inputs, growth in ((9, 1.0), (128, 1.0), (512, 2.0)):
            own = SPACING[bits] / math.sqrt(inputs)  # the scale of a layer that passes variance on
            wanted = 0.3 * SPACING[4] / math.sqrt(inputs) / growth
            for scale in (own, own / 3, own * 5):
                assert 0.3 * step.levels_a_step(scale, bits, inputs) * scale == pytest.approx(wanted)
            assert 0.3 * step.levels_a_step(own / 40, bits, inputs) * own / 40 == pytest.approx(wanted / 10)
    assert step.levels_a_step(SPACING[4] / math.sqrt(128), 4, 128) == pytest.approx(1)


@pytest.mark.parametrize("shift", [1, 20, 40], ids="votes · 2^{}".format)
def test_rounding_depends_on_the_proportions_of_votes_alone(shift):
    values, votes, noise = random_values((63, 65), 112), random_votes((63, 65), 1000).long(), noise_of((63, 65))
    one, other = (step.rounding(values, v, noise, step.rounding_factors(v, 0.3, 16)[0], 112)
                  for v in (votes, votes << shift))
    assert torch.equal(one, other)


@pytest.mark.parametrize("top", [2**20, 2**36, 2**50], ids="votes to {}".format)
def test_rounding_of_large_votes_equals_the_reference(top):
    values, votes, noise = random_values((63, 65), 112), random_votes((63, 65), top), noise_of((63, 65))
    expected = reference.rounding(values.tolist(), votes.tolist(), noise.tolist(), lr=0.2, memory_bits=4, largest=7,
                                  follow=99)
    new = step.rounding(values, votes, noise, step.rounding_factors(votes, 0.2, 8)[0], 112, 4, follow=99)
    # Beyond 15 bits votes are shifted for their row and column sums: a relative error of about 2^-15 in the moves.
    assert step_apart(new, torch.tensor(expected)) <= 1
    assert float((new != torch.tensor(expected)).double().mean()) < 5e-3


def carried_to(values: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """level + rest: where votes have carried each weight, in levels."""
    memory_bits = 8 - bits
    levels = torch.floor(values.double() / 2**memory_bits + 0.5)
    return levels + (values.double() - levels * 2**memory_bits) / 2 ** (memory_bits - 1)


def step_apart(new: torch.Tensor, expected: torch.Tensor) -> int:
    """How many units of 1/8 level the weights of two 4-bit matrices with memory lie apart, at most."""
    return round(float((carried_to(new) - carried_to(expected)).abs().max()) * 8)


@pytest.mark.parametrize("bits", [2, 3, 4, 6], ids="{}bit".format)
def test_levels_wait_as_inertia_says_and_the_rest_is_remembered(bits):
    kept = Grid(bits, 257, 130, memory=True)
    values, votes, noise = random_values((257, 130), kept.limit), random_votes((257, 130)), noise_of((257, 130))
    noise -= (noise & 255 == 255).to(noise.dtype)  # so that below 255 are all
    factors = step.rounding_factors(votes, 0.2, kept.resolution(True))[0]
    at_once, none, some = (step.rounding(values, votes, noise, factors, kept.limit, kept.memory_bits, follow)
                           for follow in (255, 0, 64))
    levels = kept.value_levels
    assert torch.equal(levels(none), levels(values))
    # With or without its level, a weight has been carried equally far, one level from where its level was at most.
    assert torch.equal(carried_to(at_once, bits), carried_to(none, bits))
    assert torch.equal(carried_to(at_once, bits), carried_to(some, bits))
    assert float((carried_to(none, bits) - levels(values)).abs().max()) <= 1
    # Who follows goes to the nearest level.
    assert float((levels(at_once) - carried_to(at_once, bits)).abs().max()) == 0.5
    moved = levels(at_once) != levels(values)
    assert float((levels(some) != levels(values))[moved].double().mean()) == pytest.approx(0.25, abs=0.03)


def test_inertia_makes_the_mean_weight_follow_as_momentum_would():
    """Many weights with the same votes: the mean of their levels is lr · momentum's path."""
    inertia, lr, steps, many = 0.8, 0.05, 60, 20_000
    kept = Grid(4, 1, many, memory=True)
    values = kept.store_nearest(2 * torch.rand(1, many) - 1)  # evenly over two levels, so that rounding averages out
    wanted, velocity, start = 0.0, 0.0, float(kept.value_levels(values).double().mean())
    for number in range(steps):
        direction = 1 if number < 35 else -1
        votes = torch.full((1, many), 7 * direction, dtype=torch.int32)
        factors = step.rounding_factors(votes, lr, kept.resolution(True))[0]
        values = step.rounding(values, votes, noise_of((1, many), seed=number), factors, kept.limit, 4,
                               step.follow_of(inertia))
        velocity = inertia * velocity + (1 - inertia) * direction
        wanted -= lr * velocity
        got = float(kept.value_levels(values).double().mean()) - start
        assert got == pytest.approx(wanted, abs=0.05)
    assert wanted < -0.3


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6], ids="{}bit".format)
def test_what_is_not_voted_on_comes_to_rest(bits):
    """Half-way between two levels, too: else levels would flicker after lr has come to next to nothing."""
    kept = Grid(bits, 40, 50, memory=True)
    values, votes = random_values((40, 50), kept.limit), torch.zeros(40, 50, dtype=torch.int32)
    votes[0, 0] = 1
    factors = step.rounding_factors(votes, 1e-6, kept.resolution(True))[0]
    at_rest = step.rounding(values, votes, noise_of((40, 50)) & ~255, factors, kept.limit, kept.memory_bits, follow=255)
    assert not torch.equal(at_rest, values)
    for seed in range(3):
        noise = noise_of((40, 50), seed=seed)
        for follow in (255, 256):
            assert torch.equal(step.rounding(at_rest, votes, noise, factors, kept.limit, kept.memory_bits, follow)[1:, 1:],
                               at_rest[1:, 1:])


@pytest.mark.parametrize("bits", [2, 4], ids="{}bit".format)
def test_without_inertia_memory_counts_twice_as_finely(bits):
    """On average a weight goes where its votes carry it, and its level is always the nearest."""
    many, lr = 40_000, 0.013
    kept = Grid(bits, 1, many, memory=True)
    assert kept.resolution(waits=False) == 2 * kept.resolution(waits=True) == kept.unit
    values, votes = kept.store(torch.zeros(1, many, dtype=torch.int8)), torch.full((1, many), 7, dtype=torch.int32)
    factors = step.rounding_factors(votes, lr, kept.resolution(waits=False))[0]
    for seed in range(30):
        values = step.rounding(values, votes, noise_of((1, many), seed=seed), factors, kept.limit, kept.memory_bits)
    assert float(values.double().mean()) / kept.unit == pytest.approx(-30 * lr, rel=0.02)
    assert len(values.unique()) > 3
    assert torch.equal(kept.value_levels(values), torch.floor(values.double() / kept.unit + 0.5).to(torch.int8))


def test_follow_of_is_never_none():
    assert step.follow_of(0.0) == 256
    assert step.follow_of(0.9) == 26
    assert step.follow_of(0.99999) == 1


# ---------------------------------------------------------------------------------------------------- both rules


@pytest.mark.parametrize("bits", range(2, 9), ids="{}bit".format)
@both_forms
@both_rules
def test_rules_stay_on_the_grid_and_move_something(rule, memory, bits):
    kept = Grid(bits, 63, 65, memory)
    values, votes, noise = random_values((63, 65), kept.limit), random_votes((63, 65)), noise_of((63, 65))
    if rule == "topk":
        new = step.topk(values, votes, noise, step.topk_bounds(votes, 0.6), 0.05, kept.unit, kept.limit, kept.lowest)
    else:
        factors = step.rounding_factors(votes, 0.8, kept.resolution(True))[0]
        new = step.rounding(values, votes, noise, factors, kept.limit, kept.memory_bits, 60, kept.lowest)
    assert kept.lowest <= int(new.min())
    assert int(new.max()) <= kept.limit
    assert int(kept.value_levels(new).abs().max()) <= 2 ** (bits - 1) - 1
    assert not torch.equal(kept.value_levels(new), kept.value_levels(values))
    moved_against = (values.long() - new.long()) * votes.sign()
    assert float((moved_against >= 0).double().mean()) > 0.85


@pytest.mark.parametrize("bits", [3, 5])
def test_topk_moves_levels_as_if_no_bit_were_to_spare(bits):
    fine, largest = Grid(bits, 63, 65, memory=False), 2 ** (bits - 1) - 1
    values, votes, noise = random_values((63, 65), fine.limit, fine.lowest), random_votes((63, 65)), noise_of((63, 65))
    bounds, levels = step.topk_bounds(votes, 0.6), fine.value_levels(values)
    new = step.topk(values, votes, noise, bounds, 0.05, fine.unit, fine.limit, fine.lowest)
    assert torch.equal(fine.value_levels(new), step.topk(levels, votes, noise, bounds, 0.05, 1, largest))
    assert not torch.equal(fine.value_levels(new), levels)


@both_rules
def test_rules_give_the_same_in_row_blocks(rule):
    values, votes, noise = random_values((257, 130), 112), random_votes((257, 130)), noise_of((257, 130))
    bounds, factors = step.topk_bounds(votes, 0.4), step.rounding_factors(votes, 0.3, 8)[0]

    def on(rows: slice) -> torch.Tensor:
        if rule == "topk":
            return step.topk(values[rows], votes[rows], noise[rows], bounds, 0.01, 16, 112)
        some = factors._replace(row=factors.row[rows])
        return step.rounding(values[rows], votes[rows], noise[rows], some, 112, 4, follow=50)

    blocks = [on(slice(start, start + 50)) for start in range(0, 257, 50)]
    assert torch.equal(torch.cat(blocks), on(slice(None)))


@both_forms
@both_rules
@pytest.mark.parametrize("shape", [(1, 64), (63, 65), (257, 1030)], ids="{0[0]}x{0[1]}".format)  # the last in 3 blocks
def test_move_equals_the_rule_on_the_whole_matrix(shape, rule, memory):
    kept = Grid(3, *shape, memory)
    old, votes = random_values(shape, kept.limit, kept.lowest), random_votes(shape)
    weight = kept.from_values(old).clone()
    weight.grid, weight.read_scale = kept, lambda: 0.05
    ballot = Ballot(vote="int8", sample="token", mask="none", seed=91, layer=4, step=17, votes=votes)

    move(weight, ballot, 2, lr=0.45, rule=rule, p_min=0.03, inertia=0.75, quorum=1.1, sizes="step")

    noise = noise16(votes.numel(), seed=91, step=17, stream=3 * 4, call=2).view(shape)
    if rule == "topk":
        expected = step.topk(old, votes, noise, step.topk_bounds(votes, 0.45), 0.03, kept.unit, kept.limit, kept.lowest)
    else:
        levels = step.levels_a_step(0.05, 3, shape[1]) * (1 if memory else 0.5)
        factors = step.rounding_factors(votes, 0.45, kept.resolution(True), levels,
                                        quorum=0 if memory else step.quorum_of(1.1, 4))[0]
        expected = step.rounding(old, votes, noise, factors, kept.limit, kept.memory_bits, 64, kept.lowest)
    assert torch.equal(kept.values(weight), expected)
    assert int(ballot.flips) == int((kept.levels(weight) != kept.value_levels(old)).sum()) > 0


@both_rules
def test_move_at_lr_zero_changes_nothing(rule):
    kept = Grid(4, 63, 65, memory=True)
    weight = random_values((63, 65), kept.limit)
    weight.grid = kept
    before = weight.clone()
    ballot = Ballot(vote="sign", sample="token", mask="none", seed=1, layer=0, votes=random_votes((63, 65)))
    move(weight, ballot, 0, lr=0.0, rule=rule, p_min=0.5, inertia=0.5, quorum=1.6, sizes="step")
    assert int(ballot.flips) == 0
    assert torch.equal(weight, before)
