"""Where votes lie, told by a table in the GPU's memory.

Votes are new tensors at each step. A kernel that is launched gets their addresses among its arguments; one that a CUDA graph
replays has its arguments for good. So in a step that may be recorded (replay.py) kernels are given a part of a table, and
the table is written before each replay.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

ALIGNED = 16  # bytes: kernels that read a table take for granted that votes begin at a multiple of it


class Places:
    """The table of one recorded step."""

    def __init__(self, votes: Sequence[Tensor]) -> None:
        self._numbers = {one.data_ptr(): number for number, one in enumerate(votes)}
        self._parts: dict[tuple[int, ...], Tensor] = {}
        self._order: list[int] = []  # which of the votes stand in the table
        self._written: list[int] = []
        self._table = torch.zeros(len(votes), dtype=torch.int64, device=votes[0].device)

    def part_for(self, votes: Sequence[Tensor]) -> Tensor | None:
        """The part of the table where the addresses of these votes will stand, one after the other; None if they are no
        votes of this step but what was made of them in it."""
        numbers = tuple(self._numbers.get(one.data_ptr(), -1) for one in votes)
        if numbers not in self._parts:
            if -1 in numbers or set(numbers) & set(self._order):
                return None
            first = len(self._order)
            self._order += numbers
            self._parts[numbers] = self._table[first : first + len(numbers)]
            _tell(self._parts[numbers], [one.data_ptr() for one in votes])
        return self._parts[numbers]

    @property
    def whole(self) -> bool:
        """Was every vote asked for by the table, so that none was built in?"""
        return len(self._order) == len(self._numbers)

    def write(self, votes: Sequence[Tensor]) -> None:
        """Say where the votes of the step to come lie, once an earlier one has asked for all of them."""
        self._numbers = {one.data_ptr(): number for number, one in enumerate(votes)}
        addresses = [votes[number].data_ptr() for number in self._order]
        if addresses != self._written:
            _tell(self._table, addresses)
            self._written = addresses


def _tell(table: Tensor, addresses: Sequence[int]) -> None:
    # From memory that is not pinned: so few bytes are taken over before the call returns, and nobody waits.
    table.copy_(torch.tensor(addresses, device="cpu"), non_blocking=True)


_IN_USE: ContextVar[Places | None] = ContextVar("in_use", default=None)  # each thread has its own


@contextmanager
def told_by(places: Places) -> Iterator[None]:
    """Give kernels the table, in this block."""
    before = _IN_USE.set(places)
    try:
        yield
    finally:
        _IN_USE.reset(before)


def table_for(votes: Sequence[Tensor]) -> Tensor | None:
    """The addresses of votes as a kernel is to be given them: a part of the table, (votes,) int64; None: as arguments."""
    places = _IN_USE.get()
    return None if places is None else places.part_for(votes)
