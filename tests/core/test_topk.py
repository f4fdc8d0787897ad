"""The paper's rule: the weights with the largest votes take one level, with chance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gft import ops, reference
from gft.ops.topk import chances
from gft.philox import NoiseKey, noise16
from gft.rules import TopK, WeightStep
from gft.rules.topk import least_chance
from gft.storage import Storage

KEY = NoiseKey(seed=5, step=1, stream=2, call=3)
PLAIN = Storage(4, memory=False)  # values are levels


def random_votes(shape: tuple[int, ...], top: int = 40) -> torch.Tensor:
    return torch.randint(-top, top + 1, shape, dtype=torch.int64 if top >= 2**31 else torch.int32)


def random_stored(shape: tuple[int, int], storage: Storage) -> torch.Tensor:
    values = torch.randint(storage.lowest, storage.limit + 1, shape, dtype=torch.int8)
    return storage.from_values(values).clone()


def stepped(stored: torch.Tensor, votes: torch.Tensor, storage: Storage, k: float, p_min: float,
            key: NoiseKey = KEY) -> tuple[torch.Tensor, int]:
    """Stored weights after a step, and how many levels changed."""
    stored = stored.clone()
    result, = TopK(p_min).step([WeightStep(stored, votes, int(votes.abs().max()), storage, 0.05, key)], k)
    return stored, 0 if result.flips is None else int(result.flips)


def noise_of(shape: tuple[int, ...], key: NoiseKey = KEY) -> list[list[int]]:
    return noise16(torch.Size(shape).numel(), key).view(shape).tolist()


@pytest.mark.parametrize(("kind", "shape", "k"), [
    ("ties", (63, 65), 0.3),
    ("ties", (1, 64), 0.001),  # none is chosen
    ("over 2^16", (63, 65), 0.001),
    ("over 2^32", (1, 64), 0.3),
    ("spread over 44 bits", (63, 65), 1.0),
    ("all equal", (1, 64), 0.3),
    ("all equal", (63, 65), 1.0),
    ("all zero", (63, 65), 0.3),
    ("a single one", (63, 65), 0.3),
    ("a single one", (1, 64), 1.0),
], ids=lambda one: f"{one[0]}x{one[1]}" if isinstance(one, tuple) else str(one))
def test_topk_equals_the_reference(kind, shape, k):
    votes = {
        "ties": lambda: random_votes(shape, 3),
        "over 2^16": lambda: random_votes(shape, 2**20),
        "over 2^32": lambda: random_votes(shape, 2**44),
        "spread over 44 bits": lambda: random_votes(shape, 2**44) >> torch.randint(0, 44, shape),
        "all equal": lambda: torch.full(shape, -7, dtype=torch.int32),
        "all zero": lambda: torch.zeros(shape, dtype=torch.int32),
        "a single one": lambda: torch.nn.functional.pad(torch.tensor([[5]]), (0, shape[1] - 1, 0, shape[0] - 1)),
    }[kind]()
    stored = random_stored(shape, PLAIN)
    levels = PLAIN.levels(stored, shape[1]).tolist()
    expected = reference.topk(levels, votes.tolist(), noise_of(shape), k=k, p_min=0.02, largest=7)

    new, flips = stepped(stored, votes, PLAIN, k, p_min=0.02)

    assert PLAIN.levels(new, shape[1]).tolist() == expected
    assert flips == sum(a != b for old, line in zip(levels, expected, strict=True) for a, b in zip(old, line, strict=True))
    assert (flips > 0) == (kind != "all zero" and round(k * votes.numel()) > 0)


@given(st.data())
def test_topk_equals_the_reference_for_any_votes(data):
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    top = data.draw(st.sampled_from([1, 3, 70_000, 2**46]))

    def matrix(low: int, high: int) -> torch.Tensor:
        numbers = data.draw(st.lists(st.integers(low, high), min_size=rows * columns, max_size=rows * columns))
        return torch.tensor(numbers).view(rows, columns)

    levels, votes, key = matrix(-7, 7), matrix(-top, top), NoiseKey(data.draw(st.integers(0, 99)), 4, 5)
    k, p_min = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    expected = reference.topk(levels.tolist(), votes.tolist(), noise_of((rows, columns), key), k=k, p_min=p_min, largest=7)
    new, _ = stepped(PLAIN.store(levels), votes, PLAIN, k, p_min, key)
    assert PLAIN.levels(new, columns).tolist() == expected


@pytest.mark.parametrize("top", [5, 2**17, 2**45], ids="votes to {}".format)
def test_the_chosen_are_those_of_a_sort(top):
    votes = random_votes((63, 65), top)
    ordered = votes.abs().flatten().sort(descending=True).values
    for count in (1, 2, 1000, 4094, 4095):
        for bound in (None, 3 * top):  # what no vote exceeds: looked up, or known
            plan = ops.topk_plan(votes, count / 4095, bound)
            assert (int(plan.least), int(plan.largest)) == (int(ordered[count - 1]), int(ordered[0]))


@pytest.mark.parametrize("k", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_k_zero_chooses_nothing(k):
    votes = random_votes((63, 65))
    plan = ops.topk_plan(votes, k, bound=40, p_min=65536)
    assert plan is None or not chances(votes, plan).any()


@pytest.mark.parametrize("k", [0.001, 0.37, 1.0])
def test_k_in_a_tensor_chooses_as_a_number_does(k):
    votes = random_votes((63, 65))
    one, other = ops.topk_plan(votes, k), ops.topk_plan(votes, torch.tensor(k), bound=50)
    assert (int(one.least), int(one.largest)) == (int(other.least), int(other.largest))


@pytest.mark.parametrize("storage", [Storage(4), Storage(4, inertia=False)], ids=["inertia", "no inertia"])
def test_topk_moves_a_whole_level_and_keeps_the_memory(storage):
    values, votes = torch.tensor([[-5, 5, 37, 100]], dtype=torch.int8), torch.tensor([[3, -3, 3, -3]])
    assert stepped(values, votes, storage, k=1.0, p_min=1.0)[0].tolist() == [[-21, 21, 21, 112]]


@pytest.mark.parametrize("bits", [3, 5])
def test_topk_moves_levels_as_if_no_bit_were_to_spare(bits):
    storage = Storage(bits, memory=False)
    stored, votes = random_stored((63, 65), storage), random_votes((63, 65))
    levels = storage.levels(stored, 65).tolist()
    expected = reference.topk(levels, votes.tolist(), noise_of((63, 65)), k=0.6, p_min=0.05, largest=storage.largest)
    new, flips = stepped(stored, votes, storage, k=0.6, p_min=0.05)
    assert storage.levels(new, 65).tolist() == expected
    assert flips > 0


def test_the_weakest_of_the_chosen_move_with_chance_p_min():
    votes = torch.tensor([[1, -2, 3, -9]])
    at_zero, at_one = (chances(votes, ops.topk_plan(votes, 1.0, p_min=least_chance(p_min))) for p_min in (0.0, 1.0))
    assert at_zero.tolist() == [[0, 65536 // 8, 65536 * 2 // 8, 65536]]
    assert at_one.tolist() == [[65536] * 4]


def test_a_chance_is_never_rounded_to_none_nor_given_without_votes():
    votes = torch.tensor([[0, 1, 2]])
    assert chances(votes, ops.topk_plan(votes, 1.0, p_min=least_chance(1e-9))).tolist() == [[0, 32768, 65536]]
    assert chances(votes, ops.topk_plan(votes, 0.7, p_min=least_chance(1e-9))).tolist() == [[0, 1, 65536]]


def test_topk_gives_the_same_some_rows_at_a_time(monkeypatch):
    stored, votes = random_stored((257, 130), Storage(2)), random_votes((257, 130))
    whole, flips = stepped(stored, votes, Storage(2), k=0.4, p_min=0.01)
    monkeypatch.setitem(ops.moves.AT_ONCE, "cpu", 50 * 130)
    assert torch.equal(stepped(stored, votes, Storage(2), k=0.4, p_min=0.01)[0], whole)
    assert flips > 0
