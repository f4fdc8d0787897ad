"""Settings of rules and votes: they check themselves, are written as plain numbers, and are read back."""

import json
import math
from dataclasses import FrozenInstanceError, dataclass

import pytest

from gft.rules import Rounding, Rule, TopK
from gft.settings import Setting
from gft.votes import Int4, Int8, Sign, Ternary, Vote

SETTINGS = [Rounding(), Rounding(inertia=0.5), Rounding(warmup=7, momentum_rank=3),
            Rounding(momentum=0.9, orthogonalize=True),
            Rounding(threshold=1.25, second_moment="running", orthogonalize=True),
            Rounding(threshold=0, second_moment="step"), TopK(), TopK(p_min=0.25), Int8(), Int4(), Ternary(), Sign(),
            Sign(per="sequence", literal_mask=True)]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_settings_are_read_back_from_plain_numbers(setting):
    kind = Rule if isinstance(setting, Rule) else Vote
    saved = json.loads(json.dumps(setting.to_dict()))
    assert kind.from_dict(saved) == setting
    assert type(kind.from_dict(saved)) is type(setting)


def test_settings_of_ones_own_are_read_back_once_they_are_defined(refuses):
    saved = {"name": "Halved", "share": 0.5}
    with refuses(ValueError, "'Halved' is not a Rule.*import the module that defines it"):
        Rule.from_dict(saved)

    @dataclass(frozen=True)
    class Halved(TopK):
        share: float = 0.25

    assert Rule.from_dict(saved) == Halved(share=0.5)


@pytest.mark.parametrize(("kind", "saved", "message"), [
    (Rule, {"name": "Adam"}, "'Adam' is not a Rule.*Rounding.*TopK"),
    (Rule, {"name": "Int8"}, "'Int8' is not a Rule"),
    (Vote, {"name": "TopK", "p_min": 0.5}, "'TopK' is not a Vote.*Sign"),
    (Vote, {}, "None is not a Vote"),
    (Rule, {"name": "TopK", "k": 0.5}, "TopK has other settings.*k.*make a new optimizer"),
    (Vote, {"name": "Int8", "per": "token"}, "Int8 has other settings.*per"),
    (Rule, {"name": "TopK", "p_min": 1.5}, "p_min=1.5"),
    (Rule, {"name": "TopK", "p_min": "half"}, "p_min='half'"),
], ids=str)
def test_saved_settings_that_are_not_known_are_refused(kind, saved, message, refuses):
    with refuses(ValueError, message):
        kind.from_dict(saved)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Rounding(threshold=3.01), "threshold=3.01.*0 to 3"),
    (lambda: Rounding(threshold=-0.1), "threshold=-0.1"),
    (lambda: Rounding(threshold=math.nan), "threshold=nan"),
    (lambda: Rounding(inertia=1), "inertia=1.*0 to 0.999"),
    (lambda: Rounding(inertia=math.inf), "inertia=inf"),
    (lambda: Rounding(second_moment="steps"), "second_moment='steps': choose one of None, 'step', 'running'"),
    (lambda: Rounding(orthogonalize="half"), "orthogonalize='half': choose one of False, True"),
    (lambda: TopK(p_min=1.0001), "p_min=1.0001.*0 to 1"),
    (lambda: TopK(p_min=math.nan), "p_min=nan"),
    (lambda: Sign(per="word"), "per='word': choose one of 'token', 'sequence'"),
    (lambda: Sign(literal_mask="no"), "literal_mask='no': choose one of False, True"),
])
def test_values_that_cannot_be_used_are_refused(make, message, refuses):
    with refuses(ValueError, message):
        make()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Rounding(inertia="0.9"), "inertia='0.9'.*give a number"),
    (lambda: Rounding(threshold=True), "threshold=True.*give a number"),
    (lambda: TopK(p_min=None), "p_min=None.*give a number"),
    (lambda: Rule.check("rounding", "rule"), r"rule='rounding': give gft.Rounding\(\).*gft.TopK\(\)"),
    (lambda: Rule.check(Int8(), "rule"), "rule=Int8"),
    (lambda: Vote.check(Int8, "vote"), "vote=<class.*give gft.Int8"),
    (lambda: Vote.check(Vote(), "vote"), "vote=Vote"),
    (lambda: Vote.check(None, "vote"), "vote=None"),
])
def test_values_of_another_type_are_refused(make, message, refuses):
    with refuses(TypeError, message):
        make()


def test_settings_cannot_be_changed_behind_the_optimizers_back():
    with pytest.raises(FrozenInstanceError):
        Rounding().inertia = 0.5
    assert issubclass(Rounding, Setting)
