"""Moving the weights with the largest votes by one level (paper, Alg. 1 and 3; k is a fraction).

    K = the k·|W| weights with the largest |votes|
    p = clip((|votes| - min_K) / (max_K - min_K), p_min, 1)
    w <- clip(w - sign(votes), -I, I)      with chance p, inside K
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gft.ops.moves import move_rows
from gft.ops.operation import operation
from gft.ops.rounding import ONE
from gft.philox import NoiseKey
from gft.storage import Storage


@dataclass(frozen=True, eq=False, slots=True)
class TopKPlan:
    """What a weight's move needs of its whole layer: the least and the largest |vote| in K, scalars on the device."""

    least: Tensor
    largest: Tensor
    p_min: int = 0  # least chance of a chosen weight to move, in 1/65536


@operation
def kth_largest(votes: Tensor,  # any shape, int32 or int64
                bound: int,
                count: int | Tensor) -> Tensor:  # scalar int64
    """The count-th largest |vote|, none of which is above `bound`: bit by bit, the largest number that at least `count` of
    them reach. A few passes, no sort, no histogram's collisions, and a GPU is not waited for."""
    sizes = votes.abs()
    found = torch.zeros((), dtype=torch.int64, device=sizes.device)
    for bit in reversed(range(bound.bit_length())):
        higher = found + (1 << bit)
        found = torch.where((sizes >= higher).sum() >= count, higher, found)
    return found


def topk_plan(votes: Tensor, k: float | Tensor, bound: int | None = None, p_min: int = 0) -> TopKPlan | None:
    """K's least and largest |vote|; None if K is empty (where k is on the device it is not looked at, and no |vote| reaches
    the least of an empty K). K holds at least round(k · |W|) weights: all weights tied at the threshold are in it (they
    move with chance p_min only), since their order in memory is no reason to prefer any. `bound`: what no |vote| exceeds,
    if that is known; else it is looked up."""
    count = (k.double() * votes.numel()).round() if isinstance(k, Tensor) else round(k * votes.numel())
    if not isinstance(count, Tensor) and count == 0:
        return None
    largest = votes.abs().max().to(torch.int64)
    least = kth_largest(votes, int(largest) if bound is None else bound, count)
    return TopKPlan(torch.where(count > 0, least, largest + 1) if isinstance(count, Tensor) else least, largest, p_min)


def topk_plan_of_rows(votes: Tensor,  # some rows of a weight
                      k: float | Tensor,
                      elements: int,  # of the whole weight
                      bound: int,
                      add_up: Callable[[Tensor], None]) -> TopKPlan | None:
    """`topk_plan` where the other rows are elsewhere: `add_up` adds counts to those of all other rows, in place. Bit by
    bit, as `kth_largest`, for the least and for the largest at once."""
    count = (k.double() * elements).round() if isinstance(k, Tensor) else round(k * elements)
    if not isinstance(count, Tensor) and count == 0:
        return None
    sizes, found = votes.abs(), torch.zeros(2, dtype=torch.int64, device=votes.device)
    wanted = torch.stack([torch.as_tensor(count, device=votes.device).long(), torch.ones_like(found[0])])
    for bit in reversed(range(bound.bit_length())):
        higher = found + (1 << bit)
        reached = torch.stack([(sizes >= each).sum() for each in higher])
        add_up(reached)
        found = torch.where(reached >= wanted, higher, found)
    least, largest = found
    return TopKPlan(torch.where(wanted[0] > 0, least, largest + 1), largest)


def chances(votes: Tensor,  # some rows
            plan: TopKPlan) -> Tensor:  # int64, in 1/65536
    """Each weight's chance to move: DynamicProbability inside K, 0 outside and where the vote is 0. Where all of K is equal
    every chance is 1."""
    sizes = votes.abs().to(torch.int64)
    span = plan.largest - plan.least
    p = torch.where(span > 0, (sizes - plan.least) * ONE // span.clamp_min(1), ONE)
    return torch.where((sizes >= plan.least) & (sizes > 0), p.clamp(plan.p_min, ONE), 0)


@operation
def topk_weights(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8, changed in place
                 votes: Tensor,  # (rows, columns) int32 or int64
                 storage: Storage,
                 plan: TopKPlan,
                 key: NoiseKey) -> Tensor:  # int64 scalar: how many levels changed
    """Move the chosen weights one level against their votes."""

    def new_values(rows: slice, old: Tensor, noise: Tensor) -> Tensor:
        moves = torch.where(noise < chances(votes[rows], plan), votes[rows].sign(), 0)
        return (old - moves * storage.unit).clamp(storage.lowest, storage.limit).to(torch.int8)

    return move_rows(stored, votes.shape[1], storage, key, new_values)
