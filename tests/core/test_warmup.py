"""`Rounding(warmup=…)`: moves that grow over the first steps."""

import no_warmup
import pytest
import torch

import gft
from gft import reference
from gft.ops.rounding import share_of_warmup
from gft.rules import rounding


@pytest.mark.parametrize("warmup", [1, 3, 100, 1_000_000])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 98, 99, 100, 999_999, 2**32 - 1])
def test_moves_grow_evenly_and_then_stay(step, warmup):
    share = share_of_warmup(step, warmup)
    assert share == reference.share_of_warmup(step, warmup)
    assert 0 < share <= 1
    assert share_of_warmup(torch.tensor(step), warmup).item() == torch.tensor(share).item()  # in float32


def test_a_rule_that_says_nothing_takes_the_first_hundred_steps(monkeypatch):
    assert no_warmup.DEFAULT == 100
    monkeypatch.setattr(rounding, "WARMUP", 8)
    ends = [after_steps(rule, [0.8]) for rule in (gft.Rounding(), gft.Rounding(warmup=8), gft.Rounding(warmup=0))]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def after_steps(rule: gft.Rounding, rates: list[float], memory: bool = True, in_backward: bool = False,
                stop: int | None = None) -> torch.Tensor:
    """A layer's stored weight after a step at each rate. stop: after so many its state goes into a new optimizer."""
    torch.manual_seed(1)
    layer = gft.QuantLinear(24, 16, 4, memory=memory)
    optimizer = gft.GFT([layer.qweight], 0.1, rule, seed=5, in_backward=in_backward)
    x = torch.randn(len(rates), 32, 24)
    for number, lr in enumerate(rates):
        if number == stop:
            state = optimizer.state_dict()
            optimizer.release()
            optimizer = gft.GFT([layer.qweight], 0.1, rule, seed=5, in_backward=in_backward)
            optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = lr
        layer(x[number]).square().sum().backward()
        optimizer.step()
    return layer.qweight.clone()


@pytest.mark.parametrize("settings", [{}, {"memory": False}, {"in_backward": True}], ids=["memory", "packed", "in backward"])
@pytest.mark.parametrize("stop", [None, 3])
def test_a_step_moves_as_it_does_without_at_that_share_of_lr(settings, stop):
    """And a training that goes on from its state does not begin again."""
    shares = [1 / 4, 1 / 2, 3 / 4, 1.0, 1.0, 1.0]
    end = after_steps(gft.Rounding(warmup=4), [0.8] * 6, stop=stop, **settings)
    assert torch.equal(end, after_steps(gft.Rounding(warmup=0), [0.8 * share for share in shares], **settings))
    assert not torch.equal(end, after_steps(gft.Rounding(warmup=0), [0.8] * 6, **settings))


@pytest.mark.parametrize("wrong", [-1, 1.5, 2_000_000, float("nan"), True, "10"])
def test_what_is_no_number_of_steps_is_refused(wrong, refuses):
    with refuses((ValueError, TypeError), "warmup="):
        gft.Rounding(warmup=wrong)
