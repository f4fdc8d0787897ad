"""replay.py: a step of the optimizer that is replayed is the same step."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gft
from gft import replay
from gft.ops.places import Places, table_for, told_by


class Loop:
    """A small network that is trained on batches of its own."""

    def __init__(self, replays: bool, bits: int = 4, device: str = "cuda", memory: bool = True, **settings) -> None:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(24, 72), nn.ReLU(), nn.Linear(72, 72), nn.ReLU(), nn.Linear(72, 5))
        self.model = gft.quantize_(body, bits, memory=memory).to(device)
        self.optimizer = gft.GFT(gft.quantized(self.model), **{"lr": 0.3, "seed": 3, **settings})
        self.dense = torch.optim.SGD(gft.dense(self.model), lr=0.01)
        self.device, self.replays = device, replays

    def batch(self, number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(number)
        x, y = torch.randn(size, 24, generator=draw), torch.randint(5, (size,), generator=draw)
        return x.to(self.device), y.to(self.device)

    def step(self, number: int, size: int = 64, micro_batches: int = 1) -> None:
        self.optimizer.zero_grad(); self.dense.zero_grad()
        for micro_batch in range(micro_batches):
            x, y = self.batch(100 * number + micro_batch, size)
            F.cross_entropy(self.model(x), y).backward()
        if not self.replays:
            self.optimizer._graph._in_vain = replay.MOST_IN_VAIN
        self.optimizer.step(); self.dense.step()

    @property
    def recordings(self) -> int:
        return len(self.optimizer._graph._graphs)

    def end(self) -> list[torch.Tensor]:
        state = [value for weight in gft.quantized(self.model) for _, value in sorted(self.optimizer.state[weight].items())]
        return [torch.as_tensor(one).clone().cpu() for one in (*self.model.state_dict().values(), *state)]


def assert_same(one: Loop, other: Loop) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.end(), other.end(), strict=True))
    assert one.optimizer.flips() == other.optimizer.flips() > 0


def test_on_a_cpu_nothing_is_recorded():
    loop = Loop(True, device="cpu")
    for number in range(4):
        loop.step(number)
    assert loop.recordings == 0


class Counted:
    """A step graph that records nothing, and counts."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.taken, self.recorded, self.replayed = None, 0, 0, 0
        monkeypatch.setattr(replay, "built_in", lambda *_: self.now)
        self.steps = replay.StepGraph()
        monkeypatch.setattr(self.steps, "_record", self.record)
        self.one = SimpleNamespace(votes=torch.zeros(1, 1, dtype=torch.int32), layer=lambda: None, discard=lambda: None)

    def record(self, *_):
        self.recorded += 1
        return self

    def replay(self) -> None:
        self.replayed += 1

    def step(self) -> None:
        self.taken += 1
        table_for([self.one.votes])

    def take(self, *kinds) -> None:
        for self.now in kinds:
            self.steps.take(self.step, [self.one], [{"params": [torch.empty(0)], "lr": 0.1}])


def test_what_comes_a_second_time_is_recorded_and_then_replayed(monkeypatch):
    counted = Counted(monkeypatch)
    counted.take("long", "short", "long", "short", "long", "short", None)
    assert (counted.taken, counted.recorded, counted.replayed) == (3, 2, 4)


def test_steps_that_are_hardly_ever_alike_are_recorded_no_more(monkeypatch):
    counted = Counted(monkeypatch)
    for kind in range(50):
        counted.take(kind, kind)
    assert counted.recorded == replay.MOST_IN_VAIN


def test_steps_that_are_alike_for_a_while_are_recorded_for_ever_and_old_graphs_forgotten(monkeypatch):
    counted = Counted(monkeypatch)
    for kind in range(50):
        counted.take(*[kind] * (replay.REPAID + 1))
    assert counted.recorded == 50
    assert len(counted.steps._graphs) == replay.REMEMBERED


def test_a_step_whose_votes_no_table_was_asked_for_is_not_recorded(monkeypatch):
    """A kernel has built in where they lie."""
    counted = Counted(monkeypatch)
    counted.step = lambda: None
    counted.take("here", "here", "here")
    assert counted.recorded == 0


def test_a_step_that_fails_is_not_taken_for_one_that_was_seen(monkeypatch):
    counted = Counted(monkeypatch)
    take_step, counted.step = counted.step, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        counted.take("here")
    counted.step = take_step
    counted.take("here")
    assert (counted.taken, counted.recorded) == (1, 0)


def test_each_thread_has_a_table_of_its_own():
    """Two models in two threads: a step that is recorded in one is told nothing of the other's votes."""
    votes = torch.zeros(1, 1, dtype=torch.int32)
    found = []
    with told_by(Places([votes])):
        other = threading.Thread(target=lambda: found.append(table_for([votes])))
        other.start(); other.join()
        assert table_for([votes]) is not None
    assert found == [None]
    assert table_for([votes]) is None


@pytest.fixture
def pair(request):
    """A loop that replays its steps, and one that takes them."""
    return tuple(Loop(replays, **getattr(request, "param", {})) for replays in (True, False))


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [{}, {"bits": 2}, {"vote": gft.Sign()}, {"rule": gft.Rounding(momentum=0.9)}], ids=str,
                         indirect=True)
def test_replayed_steps_are_the_steps(pair, monkeypatch):
    for loop in pair:
        for number in range(12):
            loop.optimizer.param_groups[0]["lr"] = 0.3 / (number + 1)
            loop.step(number)
    assert pair[0].recordings == 1
    assert_same(*pair)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"momentum": 0.9, "orthogonalize": True}, {"orthogonalize": True},
                                      {"momentum_rank": 3, "threshold": 0.6}], ids=str)
def test_a_step_that_looks_at_whole_matrices_is_replayed_too(monkeypatch, settings):
    """Its products are floats, which a recording need not round as a step by itself does."""
    loop = Loop(True, rule=gft.Rounding(warmup=0, **settings), memory="momentum_rank" not in settings)
    for number in range(6):
        loop.step(number)
    assert loop.recordings == 1
    monkeypatch.setattr(gft.GFT, "_take_step", None)
    flips = []
    for number in range(6, 10):
        before = loop.optimizer.flips()
        loop.step(number)
        flips.append(loop.optimizer.flips() - before)
    assert min(flips) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [{"rule": gft.Rounding(momentum=0.9)}], ids=str, indirect=True)
def test_a_mean_that_was_loaded_is_the_one_that_is_renewed(pair):
    for loop in pair:
        for number in range(5):
            loop.step(number)
        loop.optimizer.load_state_dict(loop.optimizer.state_dict())
        for number in range(5, 10):
            loop.step(number)
    assert_same(*pair)


@pytest.mark.gpu
def test_votes_that_lie_elsewhere_at_each_step_are_found(pair):
    kept = []
    for loop in pair:
        for number in range(8):
            kept.append(torch.empty(72, 72, dtype=torch.int32, device="cuda"))  # where the allocator had put them
            loop.step(number)
    assert pair[0].recordings == 1
    assert_same(*pair)


@pytest.mark.gpu
def test_batches_of_other_sizes_are_replayed_by_one_recording(pair):
    """But for how many bits their votes can have."""
    for loop in pair:
        for number in range(8):
            loop.step(number, size=64 - number)
    assert pair[0].recordings == 1
    assert_same(*pair)


@pytest.mark.gpu
def test_python_takes_no_part_in_a_replayed_step(monkeypatch):
    loop = Loop(True)
    for number in range(6):
        loop.step(number)
    monkeypatch.setattr(gft.GFT, "_take_step", None)
    loop.step(6)
    assert int(loop.optimizer.param_groups[0]["step"]) == 7


@pytest.mark.gpu
def test_other_batches_are_not_replayed_by_the_old_ones(pair):
    for loop in pair:
        for number, (size, micro_batches) in enumerate([(64, 1)] * 5 + [(32, 1)] * 2 + [(64, 2)] * 3 + [(64, 1)] * 2):
            loop.step(number, size, micro_batches)
    assert_same(*pair)


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["rule", "seed", "scale", "branches", "state_dict"])
def test_what_changes_between_steps_counts_from_the_next_on(pair, change):
    for loop in pair:
        for number in range(5):
            loop.step(number)
        if change == "scale":
            loop.model[0].scale.mul_(1.5)
        elif change == "branches":
            loop.model[0].branches = 9
        elif change == "state_dict":
            loop.optimizer.load_state_dict(loop.optimizer.state_dict())
        else:
            loop.optimizer.param_groups[0][change] = gft.Rounding(inertia=0.5) if change == "rule" else 11
        for number in range(5, 10):
            loop.step(number)
    assert_same(*pair)


@pytest.mark.gpu
def test_a_backward_through_weights_that_a_replay_has_moved_is_refused():
    loop = Loop(True)
    for number in range(6):
        loop.step(number)
    loss = loop.model(loop.batch(0, 64)[0]).sum()
    loop.step(6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
