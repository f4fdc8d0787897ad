"""Every scheduler of torch drives GFT, alone and in a Hybrid, as it drives torch's own optimizers."""

import copy
import inspect
import warnings

import pytest
import torch
from helpers import equal, levels_of, train, weights_of
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

import gft

STEPS = 6
WITH_MOMENTUM = {
    "CyclicLR": lambda opt, cycle: lrs.CyclicLR(opt, [g["lr"] / 4 for g in opt.param_groups],
                                                [g["lr"] for g in opt.param_groups], step_size_up=3, cycle_momentum=cycle),
    "OneCycleLR": lambda opt, cycle: lrs.OneCycleLR(opt, [g["lr"] for g in opt.param_groups], total_steps=9,
                                                    cycle_momentum=cycle),
}
# Name -> scheduler of (optimizer, whether momentum is cycled too). In six steps each of them changes lr.
SCHEDULERS = {
    "ChainedScheduler": lambda opt, _: lrs.ChainedScheduler(
        [lrs.ConstantLR(opt, 0.5, total_iters=3), lrs.ExponentialLR(opt, 0.8)], opt),
    "ConstantLR": lambda opt, _: lrs.ConstantLR(opt, 0.3, total_iters=3),
    "CosineAnnealingLR": lambda opt, _: lrs.CosineAnnealingLR(opt, STEPS, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda opt, _: lrs.CosineAnnealingWarmRestarts(opt, 3),
    "ExponentialLR": lambda opt, _: lrs.ExponentialLR(opt, 0.7),
    "LambdaLR": lambda opt, _: lrs.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "LinearLR": lambda opt, _: lrs.LinearLR(opt, 1.0, 0.0, total_iters=STEPS),
    "MultiStepLR": lambda opt, _: lrs.MultiStepLR(opt, [2, 4], 0.3),
    "MultiplicativeLR": lambda opt, _: lrs.MultiplicativeLR(opt, lambda step: 0.9),
    "PolynomialLR": lambda opt, _: lrs.PolynomialLR(opt, STEPS, power=2.0),
    "ReduceLROnPlateau": lambda opt, _: lrs.ReduceLROnPlateau(opt, factor=0.5, patience=1),
    "SWALR": lambda opt, _: SWALR(opt, [g["lr"] / 10 for g in opt.param_groups], anneal_epochs=4),
    "SequentialLR": lambda opt, _: lrs.SequentialLR(
        opt, [lrs.ConstantLR(opt, 0.3, total_iters=2), lrs.ExponentialLR(opt, 0.8)], [2]),
    "StepLR": lambda opt, _: lrs.StepLR(opt, 2, 0.3),
    **WITH_MOMENTUM,
}
DENSE = {"AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3),
         "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)}
OPTIMIZERS = ["GFT", "Hybrid of GFT and AdamW", "Hybrid of GFT and SGD"]


def optimizer_of(model, kind):
    integers = gft.GFT(gft.quantized(model), lr=0.4, seed=11)
    return integers if kind == "GFT" else gft.Hybrid(integers, DENSE[kind.split()[-1]](gft.dense(model)))


def has_momentum(optimizer):
    return isinstance(optimizer, gft.Hybrid)


def tick(scheduler):
    """One step of a scheduler; on a plateau that lasts."""
    scheduler.step(1.0) if isinstance(scheduler, lrs.ReduceLROnPlateau) else scheduler.step()


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_no_scheduler_of_torch_is_left_out():
    every = {name for name, value in vars(lrs).items()
             if inspect.isclass(value) and issubclass(value, lrs.LRScheduler) and not name.startswith("_")}
    assert {*every, "SWALR"} - {"LRScheduler"} == set(SCHEDULERS)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_is_driven_as_that_of_sgd_and_reaches_the_weights(name, kind, tiny_net, batches):
    model, constant = tiny_net(), tiny_net()
    optimizer = optimizer_of(model, kind)
    twin = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates(optimizer)])
    scheduler, twin_scheduler = (SCHEDULERS[name](one, has_momentum(optimizer)) for one in (optimizer, twin))
    seen = [rates(optimizer)]
    for batch in batches[:STEPS]:
        train(model, optimizer, [batch])
        twin.step()
        for one in (scheduler, twin_scheduler):
            tick(one)
        assert rates(optimizer) == rates(twin)
        seen.append(rates(optimizer))
    assert len({lr for lr, *_ in seen}) > 1
    train(constant, optimizer_of(constant, kind), batches[:STEPS])
    moved, unscheduled, start = (levels_of(one) for one in (model, constant, tiny_net()))
    assert not equal(moved, start)
    assert not equal(moved, unscheduled)  # as they would be, did the rule not see the group's lr


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_saved_schedule_goes_on_to_the_same_weights(name, kind, tiny_net, batches):
    def made():
        model = tiny_net(seed=1)
        optimizer = optimizer_of(model, kind)
        return model, optimizer, SCHEDULERS[name](optimizer, has_momentum(optimizer))

    def go_on(parts, some):
        for batch in some:
            train(parts[0], parts[1], [batch])
            tick(parts[2])

    whole, halves = made(), made()
    go_on(whole, batches[:STEPS])
    go_on(halves, batches[:3])
    saved = copy.deepcopy([part.state_dict() for part in halves])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some schedulers step when they are made
        resumed = made()
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    go_on(resumed, batches[3:STEPS])
    assert rates(resumed[1]) == rates(whole[1])
    assert equal(weights_of(resumed[0]), weights_of(whole[0]))


@pytest.mark.parametrize("dense", DENSE)
@pytest.mark.parametrize("name", WITH_MOMENTUM)
def test_momentum_is_cycled_as_in_the_part_alone(name, dense, tiny_net, batches):
    results, momenta = [], []
    for join in (False, True):
        model = tiny_net(bits=None)
        part = DENSE[dense](model.parameters())
        optimizer = gft.Hybrid(part) if join else part
        scheduler, seen = WITH_MOMENTUM[name](optimizer, True), []
        for batch in batches[:STEPS]:
            train(model, optimizer, [batch])
            seen.append(part.param_groups[0]["betas"] if dense == "AdamW" else part.param_groups[0]["momentum"])
            scheduler.step()
        results.append(weights_of(model))
        momenta.append(seen)
    assert momenta[0] == momenta[1]
    assert len(set(momenta[0])) > 2
    assert equal(*results)


def test_momentum_goes_to_the_parts_that_have_one_and_leaves_inertia_alone(tiny_net, batches):
    model = tiny_net()
    integers = gft.GFT(gft.quantized(model), lr=0.4, rule=gft.Rounding(inertia=0.7))
    adamw, sgd = DENSE["AdamW"](model.embed.parameters()), DENSE["SGD"](model.head.parameters())
    adagrad = torch.optim.Adagrad(gft.dense(model.block), lr=0.01)
    optimizer = gft.Hybrid(integers, adamw, sgd, adagrad)
    scheduler = WITH_MOMENTUM["OneCycleLR"](optimizer, True)
    train(model, optimizer, batches[:1])
    assert adamw.param_groups[0]["betas"] == (0.95, 0.999)
    assert sgd.param_groups[0]["momentum"] == 0.95
    scheduler.step()
    train(model, optimizer, batches[1:2])
    assert adamw.param_groups[0]["betas"][0] == sgd.param_groups[0]["momentum"] < 0.95
    assert integers.param_groups[0]["rule"] == gft.Rounding(inertia=0.7)
    assert not any("momentum" in group for part in (integers, adamw, adagrad) for group in part.param_groups)


@pytest.mark.parametrize("name", WITH_MOMENTUM)
def test_a_momentum_that_nobody_has_is_refused_in_a_sentence(name, tiny_net, refuses):
    model = tiny_net()
    for optimizer in (integers := gft.GFT(gft.quantized(model)), gft.Hybrid(integers)):
        with refuses(ValueError, "cycle_momentum"):
            WITH_MOMENTUM[name](optimizer, True)
