"""hybrid.py: several optimizers as one, for schedulers, trainers and loops that take a single optimizer."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import all_of, equal, hybrid_of, same, train, weights_of
from torch import nn

import gft


@pytest.mark.parametrize("joined", [False, True], ids=["GFT", "Hybrid"])
def test_step_takes_a_closure(joined, tiny_net, batches):
    x, y = batches[0]
    results = []
    for with_closure in (False, True):
        model = tiny_net()
        optimizer = hybrid_of(model) if joined else gft.GFT(gft.quantized(model), lr=0.4, seed=11)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure) if with_closure else closure()
        if not with_closure:
            optimizer.step()
        results.append((float(loss.detach()), weights_of(model)))
    assert results[0][0] == results[1][0]
    assert equal(results[0][1], results[1][1])
    assert not equal(weights_of(tiny_net()), results[0][1])


def test_add_param_group_sends_parameters_to_the_part_that_trains_them(tiny_net, refuses):
    model, more = tiny_net(), tiny_net(seed=1)
    optimizer = hybrid_of(model)
    gft_part, adamw = optimizer.optimizers
    optimizer.add_param_group({"params": gft.quantized(more), "lr": 0.1})
    optimizer.add_param_group({"params": more.head.parameters(), "lr": 0.01})  # a generator, as modules give it
    optimizer.add_param_group({"params": more.embed.weight})
    assert [len(group["params"]) for group in gft_part.param_groups] == [2, 2]
    assert [len(group["params"]) for group in adamw.param_groups] == [len(gft.dense(model)), 2, 1]
    with refuses(ValueError, "no part of this Hybrid"):
        gft.Hybrid(gft_part).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_both_are_torch_optimizers(tiny_net):
    model = tiny_net()
    optimizer = hybrid_of(model)
    for one in (optimizer, optimizer.optimizers[0]):
        assert isinstance(one, torch.optim.Optimizer)
        assert "lr" in repr(one)
    assert optimizer.param_groups[0] is optimizer.optimizers[0].param_groups[0]


def test_step_hooks_are_called(tiny_net, batches):
    model = tiny_net()
    optimizer = hybrid_of(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, batches[:1])
    assert calls == ["before", "after"]


def test_no_part_has_moved_when_a_setting_of_one_is_refused(tiny_net, batches, refuses):
    """AdamW may come first: it must not have stepped when GFT refuses to."""
    model = tiny_net()
    optimizer = gft.Hybrid(torch.optim.AdamW(gft.dense(model), lr=0.01), gft.GFT(gft.quantized(model), lr=0.5))
    before = weights_of(model)
    optimizer.param_groups[1]["lr"] = 2.0
    with refuses(ValueError, "lr=2"):
        train(model, optimizer, batches[:1])
    assert equal(weights_of(model), before)


# ---------------------------------------------------------------------------------------------------- state, copies


def test_a_state_that_one_part_refuses_changes_no_part(tiny_net, batches, refuses):
    model, other = tiny_net(), tiny_net(seed=1)
    optimizer, saved = (gft.Hybrid(torch.optim.AdamW(gft.dense(one), lr=lr), gft.GFT(gft.quantized(one), lr=0.3))
                        for one, lr in ((model, 0.01), (other, 0.02)))
    train(model, optimizer, batches[:2])
    train(other, saved, batches[2:4])
    state = copy.deepcopy(saved.state_dict())
    state["optimizers"][1]["state"][0]["x_rms"] *= -1
    before = all_of(model, optimizer)
    with refuses(ValueError, "x_rms with negative"):
        optimizer.load_state_dict(state)
    assert same(all_of(model, optimizer), before)


def test_a_state_of_other_optimizers_is_refused(tiny_net, refuses):
    model = tiny_net()
    optimizer = hybrid_of(model)
    with refuses(ValueError, "not of a Hybrid of 2 optimizers"):
        optimizer.load_state_dict(optimizer.optimizers[0].state_dict())


def test_pickled_optimizer_goes_on_alike_and_a_copy_without_its_model_says_what_to_do(tiny_net, batches, refuses):
    model = tiny_net(bits=3)
    optimizer = hybrid_of(model, rule=gft.Rounding(inertia=0.6), seed=3)
    train(model, optimizer, batches[:2])
    twin, twin_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    for one, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        train(one, its_optimizer, batches[2:5])
    assert equal(weights_of(model), weights_of(twin))
    assert not equal(weights_of(model), weights_of(tiny_net(bits=3)))
    with refuses(ValueError, "deep copy of weights"):
        copy.deepcopy(optimizer)


def test_model_and_optimizer_copied_together_train_alike_and_apart(tiny_net, batches):
    model = tiny_net(bits=3)
    optimizer = hybrid_of(model, in_backward=True)
    train(model, optimizer, batches[:2])
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    before = weights_of(model)
    train(twin, twin_optimizer, batches[2:5])
    assert equal(weights_of(model), before)
    train(model, optimizer, batches[2:5])
    assert equal(weights_of(model), weights_of(twin))


# ---------------------------------------------------------------------------------------------------- what is refused


def test_hybrid_refuses_quantized_weights_in_adamw(tiny_net, refuses):
    model = tiny_net()
    with refuses(ValueError, r"AdamW was given a quantized weight.*gft\.dense\(model\)"):
        gft.Hybrid(gft.GFT(gft.quantized(model)), torch.optim.AdamW(model.parameters()))


def test_hybrid_refuses_parameters_with_two_optimizers(tiny_net, refuses):
    model = tiny_net()
    with refuses(ValueError, "AdamW and SGD share a parameter"):
        gft.Hybrid(torch.optim.AdamW(gft.dense(model)), torch.optim.SGD([model.head.weight]))


def test_hybrid_refuses_what_is_no_optimizer(refuses):
    with refuses(ValueError, "at least one"):
        gft.Hybrid()
    with refuses(TypeError, "not Linear"):
        gft.Hybrid(nn.Linear(2, 2))
