"""Several layers in one launch.

A network has dozens of matrices in a few shapes, most of them too small to fill a GPU, and every launch has a start and a
tail. So layers that differ in nothing but where they lie, how far they move and which random numbers they draw share one:
the last number of a program says which of them it works on. Their pointers come as tuples among the kernel's arguments. A
table in the GPU's memory would have to be copied there, which takes longer; only for steps that are replayed, where the
arguments cannot change, it is worth that (places.py).
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.ops.places import table_for
from gft.ops.rounding import RoundingJob
from gft.storage import Storage

MOST_LAYERS = 16  # in a launch: a program picks its own out of all of them, one after the other


class Batch(NamedTuple):
    """Weights that one launch moves."""

    stored: Sequence[Tensor]  # (rows, bytes) uint8 or (rows, columns) int8 of each, changed in place
    votes: Sequence[Tensor]  # (rows, columns) int32 or int64, contiguous
    streams: Sequence[int]  # of their random numbers
    storage: Storage


def kind_of(job: RoundingJob) -> Hashable:
    """What the jobs of one launch have in common."""
    return (job.votes.shape, job.votes.dtype, by_eights(job.stored, job.votes.shape[1]), job.running is None, job.shift,
            job.storage, job.threshold, job.follow, job.rescale_step, job.warmup)


def by_eights(stored: Tensor, columns: int) -> bool:
    """Can eight weights be read and written as one word?"""
    return columns % 8 == 0 and stored.data_ptr() % 8 == 0


def shared_launches(kinds: Iterable[Hashable]) -> list[list[int]]:
    """The numbers of the layers that each launch works on: those of one kind, in about equal parts."""
    alike: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(number)
    shared = []
    for numbers in alike.values():
        at_once = triton.cdiv(len(numbers), triton.cdiv(len(numbers), MOST_LAYERS))
        shared += [numbers[start : start + at_once] for start in range(0, len(numbers), at_once)]
    return shared


def padded(one_a_layer: Sequence[Any]) -> tuple[Any, ...]:
    """The last one repeated up to a power of two: each number of layers is a kernel of its own, and a few serve all."""
    return (*one_a_layer, *[one_a_layer[-1]] * (triton.next_power_of_2(len(one_a_layer)) - len(one_a_layer)))


@triton.jit
def pick(one_a_layer, layer):
    """one_a_layer[layer], where the tuple is known when the kernel is compiled, but `layer` only when it runs."""
    picked = one_a_layer[0]
    for other in tl.static_range(1, len(one_a_layer)):
        picked = tl.where(layer == other, one_a_layer[other], picked)
    return picked


def streams_argument(streams: Sequence[int]) -> tuple[int, ...]:
    """The streams of random numbers as a kernel takes them: odd and never 1. Triton compiles 1 and multiples of 16 into the
    kernel if they stand in a tuple, do_not_specialize or not, and then every network would have kernels of its own."""
    return padded([2 * stream + 3 for stream in streams])


@triton.jit
def pick_stream(streams, layer):
    """That of one layer, of what `streams_argument` gave."""
    return (pick(streams, layer) - 3) >> 1


def votes_argument(votes: Sequence[Tensor]) -> tuple[Any, dict[str, bool]]:
    """Votes as a kernel takes them, by their addresses or by a table of these, and the constants that say which."""
    table = table_for(votes)
    if table is None:
        return padded(votes), {"TABLE": False, "WIDE": False}
    return table, {"TABLE": True, "WIDE": votes[0].dtype is torch.int64}


@triton.jit
def pick_votes(votes, layer, TABLE: tl.constexpr, WIDE: tl.constexpr):
    """Those of one layer, of what `votes_argument` gave."""
    if TABLE:
        address = tl.multiple_of(tl.load(votes + layer), 16)
        if WIDE:
            return address.to(tl.pointer_type(tl.int64))
        else:  # without it Triton would compile what follows, too
            return address.to(tl.pointer_type(tl.int32))
    else:
        return pick(votes, layer)
