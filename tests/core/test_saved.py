"""saved.py and what asks it: what is loaded is looked at whole before anything changes, and refused in one sentence."""

import copy
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import all_of, hybrid_of, same, train
from torch import nn
from torch.optim import lr_scheduler

from gft.errors import UsageError
from gft.saved import check_generators, check_optimizer, check_scheduler


@pytest.fixture
def trained(tiny_net, batches):
    model = tiny_net(bits=3)
    optimizer = hybrid_of(model)
    train(model, optimizer, batches[:2])
    return model, optimizer


def put(*path):
    """A change of a nest: put(…, "a", 3, value) sets ["a"][3]; put(…, "a", ...) deletes it."""
    *way, key, value = path

    def change(nest):
        for step in way:
            nest = nest[step]
        if value is ...:
            del nest[key]
        else:
            nest[key] = value(nest[key]) if callable(value) else value

    return change


GROUP, STATE = ("param_groups", 0), ("state", 0)
DAMAGE = {
    "no groups": put("param_groups", ...),
    "groups that are none": put("param_groups", {}),
    "a group too many": put("param_groups", lambda groups: groups * 2),
    "a group that is none": put("param_groups", [7]),
    "no state": put("state", ...),
    "state of nothing": put("state", {}),
    "a weight's state that is none": put(*STATE, [1]),
    "no params": put(*GROUP, "params", ...),
    "params that are no names": put(*GROUP, "params", [[0], [1]]),
    "one weight twice": put(*GROUP, "params", [0, 0]),
    "a weight too many": put(*GROUP, "params", [0, 1, 2]),
    "no seed": put(*GROUP, "seed", ...),
    "lr in words": put(*GROUP, "lr", "much"),
    "three lrs": put(*GROUP, "lr", torch.ones(3)),
    "lr of no size": put(*GROUP, "lr", math.nan),
    "a step before the first": put(*GROUP, "step", -1),
    "a step beyond all numbers": put(*GROUP, "step", 2**70),
    "half a step": put(*GROUP, "step", 1.5),
    "several steps": put(*GROUP, "step", torch.zeros(4, dtype=torch.long)),
    "in_backward in words": put(*GROUP, "in_backward", "no"),
    "a rule without a name": put(*GROUP, "rule", {"name": ["Rounding"]}),
    "a rule with a setting without a name": put(*GROUP, "rule", {"name": "Rounding", 3: 4}),
    "a setting without a name": put(*GROUP, 3, 4),
    "a number in words": put(*STATE, "number", "two"),
    "a number below 0": put(*STATE, "number", -3),
    "a number of another layer": put(*STATE, "number", 1),
    "many flips": put(*STATE, "flips", torch.ones(3, dtype=torch.long)),
    "half a flip": put(*STATE, "flips", torch.tensor(1.5)),
    "no flips": put(*STATE, "last_flips", None),
    "a sparse scale": put(*STATE, "x_rms", lambda scale: scale.to_sparse()),
    "a scale without values": put(*STATE, "x_rms", lambda scale: scale.to("meta")),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_state_of_the_optimizer_is_refused_and_changes_nothing(how, trained, refuses):
    model, optimizer = trained
    before = all_of(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    DAMAGE[how](state["optimizers"][0])
    with refuses(UsageError, "."):
        optimizer.load_state_dict(state)
    with refuses(UsageError, "."):
        optimizer.optimizers[0].load_state_dict(state["optimizers"][0])
    assert same(all_of(model, optimizer), before)


def test_scales_of_a_loaded_state_have_memory_of_their_own(trained, batches):
    """Whatever lay behind them: one number for all, or what another optimizer goes on to change."""
    model, optimizer = trained
    part = optimizer.optimizers[0]
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    saved["optimizers"][0]["state"][0]["x_rms"] = torch.ones(1).expand(24)
    optimizer.load_state_dict(saved)
    train(model, optimizer, batches[2:4])
    assert part.state[part.param_groups[0]["params"][0]]["x_rms"].unique().numel() > 1
    assert bool((saved["optimizers"][0]["state"][0]["x_rms"] == 1).all())
    saved["optimizers"][0]["state"][0]["x_rms"] = before["optimizers"][0]["state"][0]["x_rms"]
    assert same(saved["optimizers"][0], before["optimizers"][0])  # a snapshot, which two steps have not changed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", [math.nan, -2.0, 1.0])
def test_what_torch_distributed_checkpoint_reads_is_looked_at_before_it_counts(value, trained, tmp_path):
    """It reads into the tensors that a state_dict has; those are copies."""
    model, optimizer = trained
    part = optimizer.optimizers[0]
    before = all_of(model, optimizer)
    damaged = part.state_dict()
    damaged["state"][1]["grad_rms"].fill_(value)
    dcp.save({"optimizer": damaged}, checkpoint_id=tmp_path)
    if value == 1.0:
        dcp.load({"optimizer": part}, checkpoint_id=tmp_path)
        assert bool((part.state[part.param_groups[0]["params"][1]]["grad_rms"] == 1).all())
    else:
        with pytest.raises(UsageError, match="grad_rms with negative or not finite"):
            dcp.load({"optimizer": part}, checkpoint_id=tmp_path)
        assert same(all_of(model, optimizer), before)


# ---------------------------------------------------------------------------------------------------- torch's optimizers


def stepped(kind, **settings):
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.Rprop,
                                  torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adagrad])
def test_states_of_torchs_optimizers_fit_where_they_come_from(kind):
    check_optimizer(stepped(kind), stepped(kind).state_dict())


FOREIGN = {
    "of another layer": put("state", 0, "exp_avg", torch.zeros(8, 4)),
    "without values": put("state", 0, "exp_avg", lambda moment: moment.to("meta")),
    "a state that is none": put("state", 0, 7),
    "a step in words": put("state", 0, "step", "three"),
    "a step before the first": put("state", 0, "step", torch.tensor(-1.0)),
    "a step of no size": put("state", 0, "step", torch.tensor(math.nan)),
    "no lr": put("param_groups", 0, "lr", ...),
    "lr in words": put("param_groups", 0, "lr", "much"),
    "lr without end": put("param_groups", 0, "lr", math.inf),
    "one beta": put("param_groups", 0, "betas", (0.9,)),
    "betas in words": put("param_groups", 0, "betas", ("a", "b")),
    "a flag that is a number": put("param_groups", 0, "maximize", 1),
}


@pytest.mark.parametrize("how", FOREIGN)
def test_a_state_that_adamw_would_only_fail_on_later_is_refused(how, refuses):
    state = copy.deepcopy(stepped(torch.optim.AdamW).state_dict())
    FOREIGN[how](state)
    with refuses(UsageError, "AdamW"):
        check_optimizer(stepped(torch.optim.AdamW), state)


def test_a_state_of_another_kind_of_optimizer_is_refused(refuses):
    with refuses(UsageError, "no betas of AdamW"):
        check_optimizer(stepped(torch.optim.AdamW), stepped(torch.optim.SGD).state_dict())


# ---------------------------------------------------------------------------------------------------- schedules, generators


SCHEDULES = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
    "one after another": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
    "a function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_takes_its_own_kind_of_state_and_no_other(kind, refuses):
    scheduler, later = (SCHEDULES[kind](stepped(torch.optim.SGD)) for _ in range(2))
    for _ in range(4):
        later.step(*[0.5] if kind == "plateau" else [])
    state = later.state_dict()
    check_scheduler(scheduler, state)
    check_scheduler(later, scheduler.state_dict())
    for change in (put("optimizer", None), put("step", 3), put("last_epoch", "four"), put("last_epoch", None),
                   put("last_epoch", ...), put("_last_lr", [0.1, 0.1]), put("_last_lr", 0.1), put(3, 3)):
        damaged = copy.deepcopy(state)
        change(damaged)
        with refuses(UsageError, type(scheduler).__name__):
            check_scheduler(scheduler, damaged)
    with refuses(UsageError, "a dict belongs here"):
        check_scheduler(scheduler, [state])


def test_a_state_that_torchs_generator_cannot_take_is_refused(refuses, rng_untouched):
    good = torch.get_rng_state()
    with rng_untouched():
        check_generators({"cpu": good})
        for bad in (None, good[:100], good.long(), good[None], good.to("meta"), torch.zeros_like(good) + 255):
            with refuses(UsageError, "random generator"):
                check_generators({"cpu": bad})
        for state in ([good], {}, {"cpu": good, "cuda": 3}):
            with refuses(UsageError, "random generator"):
                check_generators(state)
