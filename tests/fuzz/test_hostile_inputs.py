"""A few hundred of the inputs that fuzz.py can make a million of: each is taken, or refused in one sentence and nothing has
changed."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import TARGETS

EXAMPLES = {"checkpoint": 150, "safetensors": 300, "state": 150, "config": 300}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_inputs_are_taken_or_refused_in_one_sentence_and_change_nothing(name):
    target, seen = TARGETS[name](), set()

    @settings(max_examples=EXAMPLES[name])
    @given(st.integers(0, 2**32))
    def feed(seed: int) -> None:
        seen.add(target.feed(target.damaged(Random(seed))))

    feed()
    assert seen == {True, False}  # lest all fall at the first hurdle
