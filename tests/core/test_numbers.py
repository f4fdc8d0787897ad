"""Numbers and calls that go wrong in training: what was forgotten leaves no trace, and the next step is right."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import all_of, equal, hybrid_of, same, train, weights_of

import gft

VOTES = [gft.Int8(), gft.Sign(), gft.Ternary()]


def backward(model, x, y, factor=1.0):
    (F.cross_entropy(model(x), y) * factor).backward()


def raise_in_backward(_):
    raise ZeroDivisionError("in the midst of backward")


def failed(model, optimizer, x, y, how):
    """A batch of which nothing is to remain."""
    if how == "inside backward":
        hook = model.block["mlp"][1].register_full_backward_hook(lambda *_: raise_in_backward(None))
        with pytest.raises(ZeroDivisionError):
            backward(model, x, y)
        hook.remove()
    elif how == "inside forward":
        hook = model.head.register_forward_hook(lambda *_: raise_in_backward(None))
        with pytest.raises(ZeroDivisionError):
            backward(model, x, y)
        hook.remove()
    else:
        backward(model, x, y, {"before the step": 1.0, "all NaN": math.nan, "all inf": math.inf}[how])
    optimizer.zero_grad()


@pytest.mark.parametrize("vote", VOTES, ids=str)
@pytest.mark.parametrize("how", ["inside backward", "inside forward", "before the step", "all NaN", "all inf"])
def test_a_batch_that_fails_and_is_forgotten_leaves_no_trace(how, vote, tiny_net, batches):
    """Also the very first one, whose scales would have stayed."""
    runs = []
    for fails in (False, True):
        model = tiny_net()
        optimizer = hybrid_of(model, vote=vote)
        for number, (x, y) in enumerate(batches[:3]):
            if fails:
                failed(model, optimizer, *batches[number + 3], how)
            optimizer.zero_grad()
            backward(model, x, y)
            optimizer.step()
        runs.append(all_of(model, optimizer))
    assert same(*runs)


def test_steps_that_a_loss_scaler_skips_leave_no_trace(tiny_net, batches):
    """fp16 training begins with a loss scale that overflows: the scaler skips those steps and halves it."""

    def run(overflows, first_scale):
        model = tiny_net()
        optimizer = hybrid_of(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
        for number, (x, y) in enumerate([*batches[:1] * overflows, *batches]):
            optimizer.zero_grad()
            backward(model, x, y, scaler.scale(torch.tensor(math.inf if number < overflows else 1.0)))
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**14
        return all_of(model, optimizer)

    assert same(run(2, 2.0**16), run(0, 2.0**14))


def test_forgetting_zero_grad_changes_nothing_for_integers_and_a_second_step_moves_none(tiny_net, batches):
    runs = []
    for careful in (True, False):
        model = tiny_net()
        optimizer = gft.GFT(gft.quantized(model), lr=0.4)
        for x, y in batches[:3]:
            if careful:
                optimizer.zero_grad()
            backward(model, x, y)
            optimizer.step()
        runs.append(weights_of(model))
    assert equal(*runs)
    optimizer.step()
    assert equal(weights_of(model), runs[1])


@pytest.mark.parametrize("vote", VOTES, ids=str)
@pytest.mark.parametrize("kind", ["zero gradients", "zero inputs", "constant inputs", "one value in a feature"])
def test_inputs_and_gradients_that_say_nothing_are_taken(kind, vote):
    layer = gft.QuantLinear(9, 7)
    optimizer = gft.GFT(gft.quantized(layer), lr=0.5, vote=vote)
    before = layer.qweight.clone()
    for _ in range(3):
        x = {"zero inputs": torch.zeros(4, 9), "constant inputs": torch.ones(4, 9)}.get(kind, torch.randn(4, 9))
        if kind == "one value in a feature":
            x[:, 1:] = 0
        y = layer(x)
        y.backward(torch.zeros_like(y) if kind == "zero gradients" else torch.randn_like(y))
        optimizer.step()
    moved = layer.qweight != before
    assert bool(moved.any()) == (not kind.startswith("zero"))
    assert not (kind == "one value in a feature" and bool(moved[:, 1:].any()))
    for state in optimizer.state.values():
        for name in ("x_rms", "grad_rms", "second_moment"):
            assert name not in state or bool(torch.isfinite(state[name]).all())
    layer(torch.randn(4, 9)).square().sum().backward()  # and then something is said
    optimizer.step()
    assert bool((layer.qweight != before).any())


MANY = 1 << 20


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("vote", "sequence", "most"), [
    (gft.Int8(), 1, MANY * 127**2), (gft.Int4(), 1, MANY * 7**2), (gft.Sign(), 1, MANY),
    (gft.Sign(per="sequence"), MANY, 1), (gft.Sign(per="sequence", literal_mask=True), MANY, 1)], ids=str)
def test_a_million_tokens_overflow_no_vote(vote, sequence, most, device):
    """In one backward: each token votes as loudly as it can, beyond what int32 holds."""
    layer = gft.QuantLinear(2, 3, bits=4, bias=False).to(device)
    optimizer = gft.GFT(gft.quantized(layer), lr=0.5, vote=vote)
    y = layer(torch.full((1, 2, 2), 1e-3, device=device))
    y.backward(torch.full_like(y, 1e-3))
    optimizer.step()  # now the scales are those of small numbers
    before = layer.levels().clone()
    y = layer(torch.ones(MANY // sequence, sequence, 2, device=device))
    y.backward(torch.ones_like(y))
    wanted = torch.full_like(before, 1, dtype=torch.int64)
    if isinstance(vote, gft.Sign) and vote.literal_mask:
        wanted = (before < 0).long()  # the mask takes only votes that make a weight grow
    assert torch.equal(layer.votes.votes.long(), wanted * most)
    optimizer.step()
    assert bool((layer.levels() <= before).all())
    for name, value in optimizer.state[layer.qweight].items():
        assert not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all()), name


def test_two_threads_train_two_models_as_one_after_the_other(tiny_net, batches):
    def run(model):
        train(model, hybrid_of(model, seed=3), batches * 3)
        return weights_of(model)

    models = [tiny_net(seed=seed) for seed in (1, 2, 1, 2)]  # here: torch's generator is all threads' own
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(run, models[:2]))
    assert all(equal(weights, run(model)) for weights, model in zip(both, models[2:], strict=True))
