"""Weights whose rows ranks share out: FSDP2, torch's `fully_shard`.

`fully_shard(block)` turns a layer's integer weight into a DTensor: each rank keeps some rows of it, packed as they are.
torch gathers the bytes of all rows before a block's forward and backward, and drops them after. What is ours is the votes:

    backward     every rank casts votes on the whole weight; their sum is reduce-scattered at once, and a rank keeps
                 those on its own rows: no rank ever holds the votes of more than one layer whole
    GFT.step     each rank moves its rows. What a move depends on of the whole weight is summed over ranks first: the
                 squares of votes by row and by column (rounding), or how many votes are as large (topk)

Random numbers are those of the whole weight (NoiseKey.first), sums are of integers, and the running scales, a few numbers a
row and a column, are kept whole by every rank. So the rows together are what data-parallel ranks would have.

Votes on a shared-out weight are int32 in any case, on the wire and between steps: a rank cannot know in backward how many
tokens the others have, and so whether int64 is called for. What may not fit is saturated: one rank's vote at 2^31 over the
number of ranks, the sum at 2^31. With a group's "wire" at "int8" a vote takes a byte on the wire, rounded without bias.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gft import ops
from gft.distributed import Ranks, largest_over, sum_over
from gft.errors import UsageError
from gft.philox import NoiseKey
from gft.rules import Part
from gft.rules.orthogonalize import orthogonalized
from gft.votes import INT32_BOUND


def is_sharded(weight: Any) -> bool:
    """Have ranks shared out the rows of this weight? (A DTensor: asked in a way that imports none.)"""
    return type(weight) is not nn.Parameter and hasattr(weight, "device_mesh") and hasattr(weight, "placements")


def own_rows(weight: Any) -> Tensor:
    """This rank's rows of a weight, in the same memory; all of them where nothing is shared out."""
    return weight.detach().to_local() if is_sharded(weight) else weight.detach()


def all_rows(weight: Any) -> Tensor:
    """The whole weight, gathered from all ranks where they have shared it out: then all of them must ask."""
    return weight.detach().full_tensor() if is_sharded(weight) else weight.detach()


def handed_out(whole: Tensor, weight: Any) -> Tensor:
    """This rank's rows of what the first rank has for all, where they have shared out this weight."""
    if not is_sharded(weight):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, weight.device_mesh, weight.placements).to_local()


def like_rows_of(own: Tensor, weight: Any) -> Any:
    """This rank's rows of some tensor, as the part of a whole that ranks share out as they do this weight: in the same
    memory, and known to torch.distributed.checkpoint."""
    if not is_sharded(weight):
        return own
    from torch.distributed.tensor import DTensor

    shape = torch.Size((weight.shape[0], *own.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride)


def of_first_rank(number: Tensor, weight: Any) -> Tensor:
    """What the first of the ranks has that have shared out this weight."""
    if not is_sharded(weight):
        return number
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(number, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim).to_local()


def ranks_with_rows(weight: Any) -> Ranks:
    """The ranks that have the rows of a weight between them, and this one's place; other ranks have copies."""
    (axis,) = [number for number, placement in enumerate(weight.placements) if placement.is_shard()]
    mesh = weight.device_mesh
    return Ranks(mesh.get_local_rank(axis), mesh.size(axis), mesh.get_group(axis))


def check_sharding(weight: Any, ranks: Ranks, other: Any = None) -> None:
    """Refuse what is not shared out by rows, over the ranks that train together, as the `other` weights are."""
    shards = [placement for placement in weight.placements if placement.is_shard()]
    if len(shards) != 1 or shards[0].dim != 0 or any(placement.is_partial() for placement in weight.placements):
        raise UsageError(f"this integer weight is a DTensor placed as {tuple(weight.placements)}; gft.GFT trains weights "
                         "that fully_shard has sharded by rows, over one dimension of a mesh")
    if weight.device_mesh.size() != ranks.world:
        raise UsageError(f"this integer weight is sharded over {weight.device_mesh.size()} ranks, but the optimizer has "
                         f"{ranks.world}; pass process_group=mesh.get_group() of the mesh that fully_shard was given")
    if other is not None and (weight.device_mesh, weight.placements) != (other.device_mesh, other.placements):
        raise UsageError("these integer weights are sharded over different meshes; give fully_shard the same mesh for all "
                         "of them, or each mesh an optimizer of its own")


def part_of(weight: Any) -> Part:
    """Which rows of a weight this rank moves, and how it learns of the others."""
    ranks, rows = ranks_with_rows(weight), weight.shape[0]
    first = min(ranks.rank * -(-rows // ranks.world), rows)  # as torch.chunk cuts, and fully_shard with it
    return Part(first, rows, partial(sum_over, ranks), partial(largest_over, ranks))


def scatter_of(weight: Any) -> Callable[[Tensor, NoiseKey | None], Tensor]:
    """What votes go through in backward (`VoteAccumulator.scatter`): this rank's votes on all rows in, int32, the sum of all
    ranks' on this rank's rows out. A collective, which all ranks must reach in the same order, as fully_shard's own."""
    return partial(_scattered, weight.device_mesh, tuple(weight.placements), ranks_with_rows(weight))


def _scattered(mesh: Any, placements: tuple[Any, ...], ranks: Ranks, votes: Tensor, key: NoiseKey | None) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial

    if key is not None:
        votes = _scattered_as_bytes(ranks, votes, key)
        for axis, placement in enumerate(placements):
            if placement.is_replicate():
                dist.all_reduce(votes, group=mesh.get_group(axis))
        return votes
    parts = DTensor.from_local(votes, mesh, [Partial()] * mesh.ndim, run_check=False)
    return parts.redistribute(placements=placements).to_local()


def _scattered_as_bytes(ranks: Ranks, votes: Tensor, key: NoiseKey) -> Tensor:
    """A byte a vote on the wire. Each rank rounds its votes, without bias, to -127..127 times a power of two, one a row, and
    sends each rank those on its rows: summed where they arrive, in integers, they cannot overflow on the way."""
    most = -(-len(votes) // ranks.world)  # rows a rank
    limits = 127 << torch.arange(25, device=votes.device)
    shift = (votes.abs().amax(1, keepdim=True) > limits).sum(1)  # (rows,): the least that makes all of a row fit
    units = torch.ldexp(torch.full_like(shift, 65536, dtype=torch.float32), -shift)
    rounded = ops.quantize(votes.t().float(), units, 127, key).q.t()
    outgoing = F.pad(torch.cat([rounded, shift[:, None].to(torch.int8)], 1), (0, 0, 0, most * ranks.world - len(votes)))
    arrived = torch.empty_like(outgoing)
    dist.all_to_all_single(arrived, outgoing.contiguous(), group=ranks.group)
    total = torch.zeros(most, votes.shape[1], dtype=torch.int64, device=votes.device)
    for part in arrived.view(ranks.world, most, -1):
        total += part[:, :-1].to(torch.int32) << part[:, -1:]
    own = min(max(len(votes) - ranks.rank * most, 0), most)
    return total[:own].clamp_(1 - INT32_BOUND, INT32_BOUND - 1).to(torch.int32)


def column_sums(weight: Any) -> Tensor:
    """A few numbers that differ where weights do: the sums of the stored bytes by column, int64, of all rows."""
    sums = own_rows(weight).sum(0, dtype=torch.int64)
    if is_sharded(weight):
        sum_over(ranks_with_rows(weight), [sums])
    return sums


def count_together(counts: Sequence[Tensor], weights: Sequence[Any]) -> None:
    """Add up, in place, what the ranks have counted on their own rows of each weight."""
    pairs = [(count, weight) for count, weight in zip(counts, weights, strict=True) if is_sharded(weight)]
    if pairs:
        together = torch.stack([count for count, _ in pairs])
        sum_over(ranks_with_rows(pairs[0][1]), [together])
        torch._foreach_copy_([count for count, _ in pairs], list(together.unbind()))


def orthogonalized_rows(votes: Sequence[Tensor],  # on this rank's rows of each weight
                        weights: Sequence[Any],
                        alone: bool = False) -> list[Tensor]:
    """rules.orthogonalize, which needs whole matrices: as many at a time as there are ranks, each gathered by one of them,
    which hands the rows of the result back. No rank holds more than one."""
    results: list[Tensor] = []
    for start in range(0, len(votes), ranks_with_rows(weights[0]).world if weights else 1):
        results += _orthogonalized_together(votes[start:], weights[start:], alone)
    return results


def _orthogonalized_together(votes: Sequence[Tensor], weights: Sequence[Any], alone: bool) -> list[Tensor]:
    """Of the first few, one a rank."""
    ranks = ranks_with_rows(weights[0])
    own, results = votes[0].new_empty(0), []
    for owner, (some, weight) in enumerate(zip(votes[: ranks.world], weights, strict=False)):
        most = -(-weight.shape[0] // ranks.world)  # rows; ranks with fewer, or none, add zeros
        padded = F.pad(some, (0, 0, 0, most - len(some)))
        parts = [torch.empty_like(padded) for _ in range(ranks.world)] if owner == ranks.rank else None
        dist.gather(padded, parts, group=ranks.group, group_dst=owner)
        if parts is not None:
            (own,) = orthogonalized([torch.cat(parts)], alone)  # rows of zeros stay so, and change no other
    for owner, (some, weight) in enumerate(zip(votes[: ranks.world], weights, strict=False)):
        result = some.new_empty(-(-weight.shape[0] // ranks.world), some.shape[1], dtype=torch.int32)
        parts = [part.contiguous() for part in own.chunk(ranks.world)] if owner == ranks.rank else None
        dist.scatter(result, parts, group=ranks.group, group_src=owner)
        results.append(result[: len(some)])
    return results
