"""What ranks send and keep, by arithmetic: checked by hand here, and against real collectives in tests/distributed."""

import pytest

from gft.lab.traffic import SCHEMES, Scheme, Setup, gft_scheme, kept, passing, sent

FOUR = Setup("", 1000.0, (10, 20), 4)


def test_a_ring_sends_all_but_a_ranks_own_part():
    assert sent(Scheme("", 2, 4, 16, 6), FOUR) == {"gathered": 3000, "reduced": 3000, "small": 0}
    assert sent(gft_scheme(2, False), FOUR) == {"gathered": 375, "reduced": 3000, "small": 2 * 12 * 5 * 30 * 0.75}


def test_a_rank_keeps_its_share_and_holds_one_layer_for_a_moment():
    assert kept(gft_scheme(4, True), FOUR) == 5 * 250
    assert kept(gft_scheme(4, False, in_backward=True), FOUR) == 0.5 * 250
    assert passing(gft_scheme(4, False), FOUR) == 4.5 * 200
    assert passing(gft_scheme(4, False, wire="int8"), FOUR) == 6.5 * 200


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_one_rank_sends_nothing(scheme):
    assert sum(sent(scheme, Setup("", 1e9, (10, 20), 1)).values()) == 0
