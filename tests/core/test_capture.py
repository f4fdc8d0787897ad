"""capture.py: a step replayed as a CUDA graph is the same step."""

import copy
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gft
from gft import capture
from gft.capture import WARM_UP, copies, kind_of, on_the_host


class Loop:
    """A small network, its optimizer, and a step that counts how often Python takes it."""

    def __init__(self, captured: bool, bits: int = 4, memory: bool = True, device: str = "cuda", dropout: float = 0.0,
                 **settings) -> None:
        torch.manual_seed(0)
        body = [nn.Linear(24, 72), nn.ReLU(), nn.Dropout(dropout), nn.Linear(72, 72), nn.ReLU(), nn.Linear(72, 5)]
        self.model = gft.quantize_(nn.Sequential(*body), bits, lambda module, name: name != "5", memory=memory).to(device)
        self.own = gft.GFT(gft.quantized(self.model), **{"lr": 0.3, "seed": 3, **settings})
        # A graph reads lr as float32, so a plain step takes the same one only if float32 holds it exactly.
        self.dense = torch.optim.AdamW(gft.dense(self.model), lr=2**-10, fused=True, capturable=device != "cpu")
        self.optimizer = gft.Hybrid(self.own, self.dense)
        self.calls, self.device = 0, device
        self.take = gft.Captured(self.step, self.optimizer) if captured else self.step

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad(); loss.backward(); self.optimizer.step()
        return loss

    def batch(self, number: int, size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(number)
        x, y = torch.randn(size, 24, generator=draw), torch.randint(5, (size,), generator=draw)
        return x.to(self.device), y.to(self.device)

    def run(self, steps: range, batch_sizes: dict[int, int] | None = None) -> list[float]:
        return [self.take(*self.batch(number, (batch_sizes or {}).get(number, 128))).item() for number in steps]

    def state(self) -> list[torch.Tensor]:
        """Weights and the optimizer's tensors."""
        kept = [*gft.quantized(self.model), *(value for weight in gft.quantized(self.model)
                                              for _, value in sorted(self.own.state[weight].items()))]
        return [torch.as_tensor(value).clone().cpu() for value in kept]


def assert_same_end(one: Loop, other: Loop) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.state(), other.state(), strict=True))
    assert one.own.flips() == other.own.flips() > 0


# ---------------------------------------------------------------------------------------------------- without a GPU


def test_on_a_cpu_the_step_is_taken_as_it_is():
    plain, wrapped = Loop(False, device="cpu"), Loop(True, device="cpu")
    losses = []
    for loop in (plain, wrapped):
        torch.manual_seed(1)
        losses.append(loop.run(range(WARM_UP + 3)))
    assert losses[0] == losses[1]
    assert wrapped.calls == WARM_UP + 3
    assert_same_end(plain, wrapped)


def test_batches_come_by_place_or_by_name_and_are_of_one_kind_if_a_graph_serves_them(refuses):
    x, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    kind = kind_of((x, y), {"mask": None, "weight": 0.5})
    assert kind == kind_of((x + 1, y + 1), {"weight": 0.5, "mask": None})
    others = [((x, y), {"mask": x, "weight": 0.5}), ((x, y), {"mask": None, "weight": 0.7}), ((x, y), {"mask": None}),
              ((x[:2], y), {"mask": None, "weight": 0.5}), ((x, y.int()), {"mask": None, "weight": 0.5}),
              ((x,), {"y": y, "mask": None, "weight": 0.5}), ((x, y), {"mask": None, "weight": "0.5"})]
    kinds = [kind, *(kind_of(*other) for other in others)]
    assert len(set(kinds)) == len(kinds)
    assert kind_of((), {"x": x, "labels": x}) != kind_of((), {"x": x, "labels": x.clone()})  # one tensor twice, or two
    with refuses(ValueError, r"not with a dict; pass what is in it by itself, as in step\(\*\*batch\)"):
        kind_of(({"x": x},), {})


def test_a_batch_is_copied_each_tensor_once():
    x = torch.randn(4, 3)
    (own, number), named = copies((x, 7), {"labels": x, "mask": None, "other": x + 1})
    assert own is named["labels"] is not x
    assert torch.equal(own, x)
    assert own.data_ptr() != x.data_ptr()
    assert (number, named["mask"]) == (7, None)
    assert torch.equal(named["other"], x + 1)


def test_optimizers_with_state_on_the_host_are_known():
    layer = nn.Linear(3, 3)
    model = gft.quantize_(nn.Sequential(nn.Linear(3, 3)), bits=4)
    own = gft.GFT(gft.quantized(model))
    adamw = torch.optim.AdamW(layer.parameters(), capturable=True)
    assert on_the_host(gft.Hybrid(own, adamw)) is None
    assert on_the_host(own) is None
    sgd = torch.optim.SGD(layer.parameters())
    assert on_the_host(gft.Hybrid(own, sgd)) is sgd


def test_an_optimizer_keeps_no_captured_step_alive():
    loop = Loop(True, device="cpu")
    gone = weakref.ref(loop.take)
    loop.take = loop.step
    gc.collect()
    assert gone() is None
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())  # and the hook went with it


# ---------------------------------------------------------------------------------------------------- on a GPU

WAYS = {
    "memory": {"bits": 4, "memory": True, "rule": gft.Rounding(inertia=0.7)},
    "packed": {"bits": 2, "memory": False, "rule": gft.Rounding(threshold=0.9)},
    "running": {"bits": 4, "memory": False, "rule": gft.Rounding(second_moment="running")},
    "topk": {"bits": 3, "memory": False, "rule": gft.TopK(p_min=0.03), "vote": gft.Int4()},
}


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_replayed_steps_are_the_steps(way):
    """A scheduler brings lr to 0 before the end: second moments are renewed all the same."""
    ends, steps = [], WARM_UP + 6
    for captured in (False, True):
        loop = Loop(captured, **WAYS[way])
        schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: max(0.0, 1 - step / (steps - 2)))
        losses = []
        for number in range(steps):
            losses += loop.run(range(number, number + 1), {WARM_UP + 3: 40})  # a short batch in between
            schedule.step()
        ends.append((loop, losses))
    (plain, losses), (replayed, again) = ends
    assert_same_end(plain, replayed)
    assert losses == pytest.approx(again, rel=1e-4)
    assert replayed.calls == WARM_UP + 2  # the first, the recorded one and the short batch
    state = replayed.own.state_dict()["param_groups"][0]
    assert (state["step"], type(state["lr"])) == (steps, float)


@pytest.mark.gpu
def test_a_batch_by_name_is_replayed_as_it_was_given():
    ends = []
    for captured in (False, True):
        loop = Loop(captured)

        def step(*, x, labels, scale, of, loop=loop):
            return loop.step(x * scale if of is None else of, labels)

        take = gft.Captured(step, loop.optimizer) if captured else step
        for number in range(WARM_UP + 4):
            x, y = loop.batch(number)
            take(labels=y, x=x, scale=0.5, of=None)
        ends.append(loop)
    assert_same_end(*ends)
    assert ends[1].calls == WARM_UP + 1


@pytest.mark.gpu
def test_a_short_batch_when_recording_is_due_is_not_the_one_recorded():
    ends = []
    for captured in (False, True):
        loop = Loop(captured)
        loop.run(range(WARM_UP + 5), {WARM_UP: 16})
        ends.append(loop)
    assert_same_end(*ends)
    assert ends[1].calls == WARM_UP + 2  # three full batches, the short one, and the recording
    before = ends[1].calls
    ends[1].run(range(20, 21))
    assert ends[1].calls == before


@pytest.mark.gpu
def test_targets_of_another_shape_or_type_are_not_replayed():
    loop, plain = Loop(True), Loop(False)
    for one in (loop, plain):
        one.run(range(WARM_UP + 2))
    before, (x, y) = loop.calls, loop.batch(50)
    soft = F.one_hot(y, 5).float().mul(0.9).add(0.02)
    assert loop.take(x, soft).item() == pytest.approx(plain.take(x, soft).item(), rel=1e-4)
    assert loop.take(x.double().float(), y).item() == pytest.approx(plain.take(x, y).item(), rel=1e-4)
    assert loop.calls == before + 1
    assert_same_end(loop, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["model and optimizer", "optimizer"])
def test_a_loaded_state_dict_is_what_the_next_steps_go_on_from(what):
    ends = []
    for captured in (False, True):
        loop = Loop(captured)
        loop.run(range(WARM_UP + 2))
        saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
        loop.run(range(WARM_UP + 2, WARM_UP + 4))
        if what != "optimizer":
            loop.model.load_state_dict(saved[0])
        loop.optimizer.load_state_dict(saved[1])
        loop.run(range(WARM_UP + 2, 2 * WARM_UP + 5))
        ends.append(loop)
    assert_same_end(*ends)
    assert ends[1].calls < ends[0].calls


CHANGES = {
    "rule": lambda loop: loop.own.param_groups[0].update(rule=gft.Rounding(inertia=0.2)),
    "encoding": lambda loop: loop.own.param_groups[0].update(rule=gft.Rounding(inertia=0.0)),
    "vote": lambda loop: loop.own.param_groups[0].update(vote=gft.Int4()),
    "seed": lambda loop: loop.own.param_groups[0].update(seed=99),
    "weight_decay": lambda loop: loop.dense.param_groups[0].update(weight_decay=0.3),
}


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_a_setting_changed_after_recording_counts_from_the_next_step(change):
    ends = []
    for captured in (False, True):
        loop = Loop(captured)
        loop.run(range(WARM_UP + 2))
        CHANGES[change](loop)
        loop.run(range(WARM_UP + 2, WARM_UP + 6))
        ends.append(loop)
    assert_same_end(*ends)
    assert ends[1].calls == WARM_UP + 3  # recorded twice, with a step by itself in between


@pytest.mark.gpu
def test_errors_that_are_not_finite_are_reported_in_replays(monkeypatch):
    monkeypatch.setattr(capture, "GPU_STEPS_BETWEEN_REPORTS", 2)
    loop = Loop(True)
    loop.run(range(WARM_UP + 1))
    x, y = loop.batch(7)
    calls = loop.calls
    with pytest.warns(UserWarning, match="NaN or inf"):
        losses = [loop.take(torch.full_like(x, torch.nan), y).item() for _ in range(2)]
    assert all(map(math.isnan, losses))
    assert loop.calls == calls


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_another_gpu_than_the_current_one_is_recorded_there():
    ends = []
    for captured in (False, True):
        loop = Loop(captured, device="cuda:1")
        loop.run(range(WARM_UP + 3))
        ends.append(loop)
    assert_same_end(*ends)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_an_optimizer_on_the_host_is_refused_with_the_mend(refuses):
    layer = nn.Linear(3, 2).cuda()
    with refuses(ValueError, "capturable=True"):
        gft.Captured(lambda x, y: layer(x).sum(), torch.optim.AdamW(layer.parameters()))


@pytest.mark.gpu
def test_a_stopped_run_with_dropout_goes_on_to_the_same_bits(tmp_path):
    """The graph draws dropout's masks from where the checkpoint says the generator was."""
    whole, rest = Loop(True, dropout=0.1), range(WARM_UP + 3, 2 * WARM_UP + 8)
    torch.manual_seed(5)
    whole.run(range(WARM_UP + 3))
    gft.save_checkpoint(tmp_path / "run.safetensors", whole.model, whole.optimizer)
    whole.run(rest)
    resumed = Loop(True, dropout=0.1, seed=8)
    gft.load_checkpoint(tmp_path / "run.safetensors", resumed.model, resumed.optimizer)
    resumed.run(rest)
    assert_same_end(resumed, whole)
