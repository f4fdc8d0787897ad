"""Whether damage is what a number says, and nothing that came before it."""

import json
from random import Random

from mutations import STRANGE, damaged_nest


def test_the_same_number_damages_the_same_way_whatever_came_before():
    nest, strange = json.dumps({"a": [1, {"b": "c"}], "d": 2.5}), repr(STRANGE)
    first = [repr(damaged_nest(json.loads(nest), Random(number))) for number in range(300)]
    assert [repr(damaged_nest(json.loads(nest), Random(number))) for number in range(300)] == first
    assert repr(STRANGE) == strange
