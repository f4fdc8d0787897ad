"""Votes of many processes as those of one: data-parallel training.

Each rank casts votes on its part of the batch. Before any weight moves, four things are made the same on all ranks:

    counts     tokens and samples, summed: all that a rule derives from them follows the whole batch   one small all_reduce
    votes      summed as integers, so the order of ranks does not matter                 an all_reduce per bucket of layers
    squares    the mean squares behind the running scales: the mean over the ranks that have votes        one all_reduce
    at first   weights and settings, which are only compared                                    one all_reduce of two numbers

With orthogonalize=True each rank orthogonalizes some of the layers, and another all_reduce hands them to all; momentum of
low rank likewise. Then every rank takes the same step by itself: same votes, same scales, same random numbers, same weights,
bit for bit. With `Sign(per="token")` that step is the one a single process takes with the whole batch. Other votes are
rounded by noise of each rank's own (`VoteAccumulator.call`). A layer that a rank has not used gets zeros from it; one that
no rank has used stays as it is.

Collectives come in an order that follows from the counts, so no rank waits in vain for one that has fewer votes. Every rank
must take the same number of steps; one that is missing makes the others raise `RankLost` after `patience()`.
"""

import os
import time
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gft.errors import UsageError, UsageTypeError
from gft.philox import NoiseKey
from gft.rules.mean import RunningMean, State
from gft.rules.orthogonalize import orthogonalized
from gft.votes import VoteAccumulator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Small layers are summed together, up to so many bytes; a layer as large goes by itself, in place: that bounds the scratch.
BUCKET = 25 << 20
SCALES = ("x_rms", "grad_rms")


class Ranks(NamedTuple):
    """The processes that train together, and this one's place among them."""

    rank: int = 0
    world: int = 1
    group: "ProcessGroup | None" = None  # None: torch's default, or none at all


ALONE = Ranks()


class RankLost(UsageError):
    """Another process of the group has not come to a step that all take together."""


def ranks_of(process_group: "ProcessGroup | bool | None") -> Ranks:
    """The processes to train with. None: torch's default group if there is one, else this process alone. False: alone in
    any case."""
    if process_group is False or (process_group is None and not (dist.is_available() and dist.is_initialized())):
        return ALONE
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this process is not in the process_group it was given; make gft.GFT only in processes that are, "
                         "or pass process_group=False to train alone")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise UsageTypeError(f"process_group={process_group!r}: give a ProcessGroup, None for torch's default, or False to "
                             "train alone")
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    return Ranks(rank, world, process_group) if world > 1 else ALONE


# ---------------------------------------------------------------------------------------------------- sums over ranks


def buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Which of some tensors are summed together: indices, at most `most` bytes a bucket. What is as large stands alone."""
    full: list[list[int]] = []
    filling: list[int] = []
    room = most
    for index, size in enumerate(sizes):
        if size >= most:
            full.append([index])
            continue
        if size > room:
            full.append(filling)
            filling, room = [], most
        filling.append(index)
        room -= size
    return [*full, filling] if filling else full


def patience() -> timedelta:
    """How long a step waits for the other ranks: $GFT_RANK_SECONDS, or ten minutes, where torch itself would wait thirty. A
    rank that evaluates or saves for longer between two steps needs more."""
    given = os.environ.get("GFT_RANK_SECONDS", "600")
    try:
        return timedelta(seconds=max(1e-3, float(given)))
    except (ValueError, OverflowError):
        raise UsageError(f"GFT_RANK_SECONDS={given!r}: give seconds that a step waits for the other ranks, as 600") from None


def all_reduce(tensor: Tensor, group: "ProcessGroup | None", how: Any = None, *, host_waits: bool = False) -> None:
    """dist.all_reduce, a sum if not told otherwise, and one sentence where a rank does not come. On a GPU that takes a host
    that waits for the sum, as for the counts that a step begins with. Elsewhere it goes on at once, and what a lost rank
    means is for NCCL's own watchdog to say (init_process_group(timeout=…))."""
    how = dist.ReduceOp.SUM if how is None else how
    if tensor.is_cuda and not host_waits:
        dist.all_reduce(tensor, how, group)
        return
    wait = patience()
    try:
        work = dist.all_reduce(tensor, how, group, async_op=True)
        if work is not None:
            if tensor.is_cuda:
                _look_until_done(work, wait)
            work.wait(wait)
    except RuntimeError as error:
        raise RankLost(f"another rank has not come to this step: it has ended, takes fewer steps or was stopped for more "
                       f"than {wait.total_seconds():g} s; look at what it said, and start all ranks again from the last "
                       "checkpoint") from error


def _look_until_done(work: Any, longest: timedelta) -> None:
    """NCCL's own wait looks each few milliseconds, which is as long as many a step takes."""
    end = time.monotonic() + longest.total_seconds()
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(2e-5)


def sum_over(ranks: Ranks, tensors: Iterable[Tensor]) -> None:
    """Sum contiguous tensors over ranks, in place. All ranks bring the same shapes and types in the same order."""
    _reduce_over(ranks, dist.ReduceOp.SUM, tensors)


def largest_over(ranks: Ranks, tensors: Iterable[Tensor]) -> None:
    """The largest of each entry, likewise."""
    _reduce_over(ranks, dist.ReduceOp.MAX, tensors)


def _reduce_over(ranks: Ranks, how: Any, tensors: Iterable[Tensor]) -> None:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        for bucket in buckets([tensor.nbytes for tensor in alike], BUCKET):
            some = [alike[index] for index in bucket]
            if len(some) == 1:
                all_reduce(some[0], ranks.group, how)
                continue
            flat = torch.cat([tensor.view(-1) for tensor in some])
            all_reduce(flat, ranks.group, how)
            parts = flat.split([tensor.numel() for tensor in some])
            torch._foreach_copy_([tensor.view(-1) for tensor in some], list(parts))


# ---------------------------------------------------------------------------------------------------- before the first step


def fingerprint(layers: Iterable[Any],
                column_sums: Iterable[Tensor],  # of each layer's stored weight
                settings: Iterable[Mapping[str, Any]]) -> int:
    """A number that differs where weights, their scales, what divides their moves or a group's settings do."""
    parts: list[Any] = [sorted((key, float(value) if isinstance(value, Tensor) else value) for key, value in group.items())
                        for group in settings]
    for layer, sums in zip(layers, column_sums, strict=True):
        scales, columns = (tensor.cpu().numpy().tobytes() for tensor in (layer.scale, sums))
        parts.append((layer.float_shape, layer.storage, layer.branches, zlib.crc32(scales), zlib.crc32(columns)))
    return zlib.crc32(repr(parts).encode())


def check_alike(ranks: Ranks, number: int, device: torch.device) -> None:
    """Raise on every rank if one has another fingerprint: they would drift apart from the first step on."""
    bounds = torch.tensor([number, -number], device=device)
    all_reduce(bounds, ranks.group, dist.ReduceOp.MAX, host_waits=True)
    if bounds.sum().item() != 0:
        raise UsageError("the ranks start from different integer weights or settings; wrap the model in "
                         "DistributedDataParallel or build it from one seed, give gft.GFT the same settings everywhere, and "
                         "load a checkpoint on every rank")


# ---------------------------------------------------------------------------------------------------- before every step


class Counts(NamedTuple):
    """What one accumulator has counted since the last step; summed over ranks, what all of them have. `features` is how a
    rank that has never used a layer learns the length of its scales."""

    tokens: int
    samples: int
    ranks_with_votes: int
    ranks_with_x: int  # with mean squares of x
    x_features: int  # their lengths added up
    ranks_with_grad: int
    grad_features: int

    def ranks_with(self, which: str) -> int:
        return self.ranks_with_x if which == "x_rms" else self.ranks_with_grad

    def features_of(self, which: str) -> int:
        """The length of one rank's mean squares."""
        return (self.x_features if which == "x_rms" else self.grad_features) // self.ranks_with(which)


def counts_of(votes: VoteAccumulator) -> Counts:
    """What this rank alone has counted."""
    lengths = [len(votes.mean_squares[which]) if which in votes.mean_squares else 0 for which in SCALES]
    x, grad = ((int(which in votes.mean_squares), length) for which, length in zip(SCALES, lengths, strict=True))
    return Counts(votes.tokens, votes.samples, int(votes.votes is not None), *x, *grad)


def all_reduce_votes(layers: Sequence[Any],
                     settled: Sequence[Container[str]],  # which of each layer's running scales are the same on all ranks
                     ranks: Ranks) -> None:
    """Make the votes and scales of all layers the same on all ranks. On a GPU the host waits for the counts: they decide
    which layers have votes anywhere, and of which type."""
    own = torch.tensor([counts_of(layer.votes) for layer in layers], dtype=torch.int64, device=layers[0].qweight.device)
    all_reduce(own, ranks.group, host_waits=True)
    counts = [Counts(*row) for row in own.tolist()]
    _sum_votes(layers, counts, ranks)
    _average_squares(layers, settled, counts, ranks)


def _sum_votes(layers: Sequence[Any], counts: Sequence[Counts], ranks: Ranks) -> None:
    with_votes = []
    for layer, all_ranks in zip(layers, counts, strict=True):
        votes: VoteAccumulator = layer.votes
        votes.tokens, votes.samples = all_ranks.tokens, all_ranks.samples
        if votes.scatter is not None:  # summed in backward
            if all_ranks.ranks_with_votes not in (0, ranks.world):
                raise UsageError(f"{all_ranks.ranks_with_votes} of {ranks.world} ranks have used a layer whose rows they "
                                 "share out; run the same layers on every rank, on an empty batch where there is no other")
        elif all_ranks.ranks_with_votes:
            dtype = torch.int64 if votes.wide else torch.int32
            if votes.votes is None:
                votes.votes = torch.zeros(layer.rows, layer.columns, dtype=dtype, device=layer.qweight.device)
            votes.votes = votes.votes.to(dtype).contiguous()
            with_votes.append(votes.votes)
    sum_over(ranks, with_votes)


def _average_squares(layers: Sequence[Any], settled: Sequence[Container[str]], counts: Sequence[Counts],
                     ranks: Ranks) -> None:
    """The mean over the ranks that have votes, each counted alike, however many tokens it had. A scale that is not settled,
    as in the first step, was this rank's own until now, and starts anew from that mean."""
    averaged = []
    for layer, known, all_ranks in zip(layers, settled, counts, strict=True):
        votes: VoteAccumulator = layer.votes
        for which in SCALES:
            if all_ranks.ranks_with(which):
                # A new tensor also of one batch: its own may be kept by a graph that is to be used again.
                square = votes.mean_squares[which] / votes.backwards if which in votes.mean_squares else torch.zeros(
                    all_ranks.features_of(which), device=layer.qweight.device)
                averaged.append((votes, which, square, all_ranks.ranks_with(which), which in known))
            elif which not in known:
                votes.set_scale(which, None)  # of a batch that was discarded
    sum_over(ranks, [square for _, _, square, _, _ in averaged])
    for votes, which, square, count, is_known in averaged:
        votes.mean_squares[which], votes.backwards = square / count, 1
        if not is_known:
            votes.set_scale(which, votes.mean_squares[which].sqrt())


def orthogonalized_over(ranks: Ranks,
                        votes: Sequence[Tensor],
                        alone: bool = False) -> list[Tensor]:  # the same on all ranks
    """rules.orthogonalize, each rank's share of the layers by itself. The sum with the others' zeros hands them to all: the
    work is divided, and products of floats, which another processor may round otherwise, are the same everywhere."""
    if ranks.world == 1:
        return orthogonalized(votes, alone)
    results = [torch.zeros(one.shape, dtype=torch.int32, device=one.device) for one in votes]
    results[ranks.rank :: ranks.world] = orthogonalized(votes[ranks.rank :: ranks.world], alone)
    sum_over(ranks, results)
    return results


def renewed_over(ranks: Ranks, kept: RunningMean, votes: Sequence[Tensor], means: Sequence[State],
                 keys: Sequence[NoiseKey]) -> list[Tensor]:  # the same on all ranks, as means are then
    """RunningMean.renew: by each rank for itself where all of them get the same bits, else each rank's share of the layers,
    likewise."""
    if ranks.world == 1 or kept.exact:
        return kept.renew(votes, means, keys)
    results = [torch.zeros(one.shape, dtype=torch.int32, device=one.device) for one in votes]
    own = slice(ranks.rank, None, ranks.world)
    results[own] = kept.renew(votes[own], means[own], keys[own])
    for number, mean in enumerate(means):
        if number % ranks.world != ranks.rank:
            for tensor in mean.values():
                tensor.zero_()
    sum_over(ranks, results)
    sum_over(ranks, [tensor for mean in means for tensor in mean.values()])
    return results
