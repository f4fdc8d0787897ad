"""Moving weights by stochastic rounding: how votes become a plan, and how a plan moves stored weights.

    u = clip(votes / sqrt(R · C / M), -4, 4)          R, C, M: second moments of the votes by row, by column, of all
    move = lr_scale · lr · soft_threshold(u)           in 1/65536 of a stored value
    value <- clip(value - floor(move + noise))

rules/rounding.py says why, and how lr_scale and the threshold come about. Everything derived from votes is derived in
integers, or rounded once in float, so that every device gives the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gft.ops.moves import move_rows
from gft.ops.operation import operation
from gft.philox import NoiseKey
from gft.storage import Storage

ONE = 65536  # one stored value, in 16-bit fixed point
FOLLOW_ALL = 256  # chance 1 of a level to follow
CLIP = 4.0  # no weight moves by more than 4 times the rms move
MOST_HALVINGS = 7  # the newest second moments count for no less than 1/2^7: some hundred steps are remembered

# The soft threshold that suits a move (rules/rounding.py says why): in rms, for moves of at least two stored values rms, of
# at least one, a half, a quarter, an eighth, a sixteenth, and of less; and what a move is multiplied by, so that its mean is
# as without a threshold: 1 over the share of a Gaussian beyond it. Float32 holds all of them as they stand.
SUITED = (0.0, 0.28125, 0.453125, 0.6875, 0.953125, 1.25, 1.5)
MULTIPLES = (1.0, 1.2841796875, 1.537109375, 2.033203125, 2.9365234375, 4.732421875, 7.484375)


@dataclass(frozen=True, eq=False, slots=True)
class RoundingJob:
    """One weight that is to be moved by rounding, and all that its move depends on but lr."""

    stored: Tensor  # (rows, bytes) uint8 or (rows, columns) int8, changed in place
    votes: Tensor  # (rows, columns) int32 or int64
    storage: Storage
    key: NoiseKey
    lr_scale: float  # rms move at lr = 1, in 1/65536 of a stored value; exact in float32
    bound: int  # no |vote| is larger
    threshold: float | None = 0.0  # in rms: smaller votes move nothing; None: the one that suits the move
    follow: int = FOLLOW_ALL  # chance of a level to follow where votes have carried it, in 1/256
    running: Tensor | None = None  # (rows + columns + 1,) float32: running second moments, None at first
    rescale_step: bool = False  # rows and columns by the running moments, but the step as a whole by its own
    rows: int | None = None  # of the whole weight, where `stored` and `votes` are some rows of it; None: they are all
    warmup: int = 0  # over how many first steps moves grow to their full size

    @property
    def shift(self) -> int:
        """Bits to take off |votes| <= bound, so that the squares of a row or a column add up in int64."""
        longest = max(self.votes.shape if self.rows is None else (self.rows, self.votes.shape[1]))
        return max(0, -(-(2 * self.bound.bit_length() + longest.bit_length() - 63) // 2))


@dataclass(frozen=True, eq=False, slots=True)
class RoundingPlan:
    """What a weight's move needs of its whole layer: move = votes · row · column, in 1/65536 of a stored value."""

    row: Tensor  # (rows, 1) float32
    column: Tensor  # (1, columns) float32
    cap: float | Tensor  # no move is larger: CLIP rms; on a GPU: there
    threshold_share: float | Tensor = 0.0  # the threshold, as a share of the cap; on a GPU, if it suits the move: there
    follow: int = FOLLOW_ALL  # in 1/256


class Rounded(NamedTuple):
    """What a step by rounding gives of one weight."""

    flips: Tensor  # int64 scalar: how many levels have changed
    second_moment: Tensor  # (rows + columns + 1,) float32, as renewed


# ---------------------------------------------------------------------------------------------------- second moments


def share_of_newest(step: int | Tensor) -> float | Tensor:
    """What the second moments of step 0, 1, 2, … count for: 1, 1/2, 1/2, 1/4 (four times), … 1/128. Nearly the mean of all
    steps at first. Powers of two, so that no processor rounds the product."""
    if isinstance(step, Tensor):
        reached = sum((step + 1 >= 1 << halvings).long() for halvings in range(1, MOST_HALVINGS + 1))
        return torch.ldexp(torch.ones((), dtype=torch.float64, device=step.device), -reached)  # type: ignore[operator]
    return 2.0 ** -min((step + 1).bit_length() - 1, MOST_HALVINGS)


@operation
def sums_of_squares(votes: Tensor,  # (rows, columns) int32 or int64
                    shift: int) -> Tensor:  # (rows + columns,) int64
    """Sums of (votes >> shift)² by row, then by column. Integer sums do not depend on their order, nor on who adds them."""
    squares = (votes >> shift).to(torch.int64).square_()
    return torch.cat([squares.sum(1), squares.sum(0)])


def _sum_as_double(numbers: Tensor) -> Tensor:
    """The sum of int64 >= 0, which int64 may not hold: in two halves, each exact, and rounded once."""
    high, low = (numbers >> 32).sum(), (numbers & 0xFFFFFFFF).sum()
    return (high + (low >> 32)).double() * 2.0**32 + (low & 0xFFFFFFFF).double()


@operation
def rounding_plan(job: RoundingJob, lr: float | Tensor) -> tuple[RoundingPlan, Tensor]:  # and the renewed second moments
    """1/sqrt of the second moments of rows and columns, as the two float factors of every move."""
    return plan_of_sums(sums_of_squares.definition(job.votes, job.shift), job, lr)


def plan_of_sums(sums: Tensor,  # (rows + columns,) sums_of_squares of the whole weight
                 job: RoundingJob,
                 lr: float | Tensor) -> tuple[RoundingPlan, Tensor]:
    """The plan of the whole weight, of which the job may have but some rows."""
    shift, features = job.shift, job.votes.shape[1]
    size, threshold_share = suited(size_of_moves(job, lr), job.threshold)
    out = len(sums) - features
    row, column = sums.split([out, features])
    total = _sum_as_double(row) / max(out * features, 1)
    mean = torch.cat([row.double() / max(features, 1), column.double() / max(out, 1), total.view(1)]) * 4.0**shift
    own = mean[-1].float().double().sqrt()
    if job.running is not None:
        old = job.running.double()
        mean = torch.where(old > 0, old + (mean - old) * share_of_newest(job.key.step), mean)
    moments = mean.float()
    # Division and square root in float64 are correctly rounded everywhere; rsqrt is not.
    rms = moments.double().sqrt()
    inverse = torch.where(moments > 0, 1.0 / rms, 0.0)
    overall = moments[-1].double() / torch.where(own > 0, own, 1.0) if job.rescale_step else rms[-1]
    row_factor = (inverse[:out] * overall * size).float()
    plan = RoundingPlan(row_factor[:, None], inverse[out:-1].float()[None, :], CLIP * size, threshold_share, job.follow)
    return plan, moments


def size_of_moves(job: RoundingJob, lr: float | Tensor) -> float | Tensor:
    """The rms move of this step in 1/65536 of a stored value, before any threshold: a float32; a tensor: on a GPU."""
    size = torch.as_tensor(lr, dtype=torch.float32) * job.lr_scale
    if job.warmup:
        size = size * share_of_warmup(job.key.step, job.warmup)
    return size if size.is_cuda else size.item()


def share_of_warmup(step: int | Tensor, warmup: int) -> float | Tensor:
    """Which share of their full size the moves of step 0, 1, 2, … have. Divided in float64, as all devices do alike."""
    if isinstance(step, Tensor):
        return ((step.double() + 1.0) / warmup).clamp_max(1.0).float()
    return min(1.0, (step + 1) / warmup)


def suited(size: float | Tensor,  # the rms move in 1/65536 of a stored value: a float32; a tensor: on a GPU
           threshold: float | None) -> tuple[float | Tensor, float | Tensor]:
    """The rms move before the threshold is taken off, and the threshold as a share of its cap."""
    if threshold is not None:
        return size, threshold / CLIP
    rms = torch.as_tensor(size, dtype=torch.float32)
    multiple, share = torch.ones_like(rms), torch.zeros_like(rms)
    for octave in range(1, len(SUITED)):
        below = rms < 4.0 * ONE / 2**octave
        multiple = torch.where(below, MULTIPLES[octave], multiple)
        share = torch.where(below, SUITED[octave] / CLIP, share)
    both = rms * multiple, share
    return both if isinstance(size, Tensor) else (both[0].item(), both[1].item())


# ---------------------------------------------------------------------------------------------------- moves


@operation
def round_weights(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8, changed in place
                  votes: Tensor,  # (rows, columns) int32 or int64
                  storage: Storage,
                  plan: RoundingPlan,
                  key: NoiseKey) -> Tensor:  # int64 scalar: how many levels changed
    """Move every weight by the stochastic rounding of its share."""

    def new_values(rows: slice, old: Tensor, noise: Tensor) -> Tensor:
        return rounded_values(old, votes[rows], noise, storage, plan, plan.row[rows])

    return move_rows(stored, votes.shape[1], storage, key, new_values)


def round_some_rows(sums: Tensor,  # (rows + columns,) sums_of_squares of the whole weight
                    job: RoundingJob,  # of some rows, whose first the key knows
                    lr: float | Tensor) -> Rounded:
    """A step of some rows of a weight: they move as they do in a step of all. The second moments are of all."""
    plan, moments = plan_of_sums(sums, job, lr)
    first = job.key.first // max(job.votes.shape[1], 1)
    plan = replace(plan, row=plan.row[first : first + len(job.votes)])
    return Rounded(round_weights(job.stored, job.votes, job.storage, plan, job.key), moments)


def rounded_values(values: Tensor,  # (rows, columns) int8
                   votes: Tensor,  # (rows, columns)
                   noise: Tensor,  # (rows, columns) 0..65535
                   storage: Storage,
                   plan: RoundingPlan,
                   row: Tensor) -> Tensor:  # the plan's factors of these rows -> (rows, columns) int8
    """values - floor(move + noise). With inertia z moves, and the level follows it with a chance of follow/256."""
    share = votes.float() * row * plan.column
    move = share.clamp_(-plan.cap, plan.cap).to(torch.int32)  # type: ignore[call-overload, arg-type]
    if isinstance(plan.threshold_share, Tensor) or plan.threshold_share:
        # In integers: no add a GPU could fuse with the product before it.
        dead_zone = (torch.as_tensor(plan.cap, dtype=torch.float32) * plan.threshold_share).to(torch.int32)
        move = move - torch.minimum(torch.maximum(move, -dead_zone), dead_zone)
    move = move.add_(noise).bitwise_right_shift_(16)
    if not storage.inertia:
        return (values - move).clamp_(storage.lowest, storage.limit).to(torch.int8)
    half = storage.memory_bits - 1  # 2^half counts one level of z
    level = storage.value_levels(values).to(torch.int32)
    centre, limit = level << half, storage.limit >> 1
    z = values - (level << storage.memory_bits) + centre - move
    z = torch.minimum(torch.maximum(z.clamp_(-limit, limit), centre - (1 << half)), centre + (1 << half) - 1)
    # The noise's low byte has next to no say in the rounding, which its high byte decides. At lr = 0 nothing follows; where
    # lr is on the device, only it can tell.
    follow = plan.follow * (plan.cap > 0)
    follows = (noise & (FOLLOW_ALL - 1)) < follow
    # A tie goes to the even level: always up would lift the mean weight, and by chance it would flicker for ever.
    nearest = z + (1 << half >> 1)
    nearest = (nearest - (nearest >> half & 1)) >> half
    new = torch.where(follows, nearest, level)
    return ((new << half) + z).to(torch.int8)


@operation
def round_many(jobs: Sequence[RoundingJob],  # on one device, with one seed, step and call
               lr: float | Tensor) -> list[Rounded]:
    """A step of many weights: `rounding_plan`, then `round_weights`. On a GPU those of a kind share their launches."""
    results = []
    for job in jobs:
        plan, moments = rounding_plan(job, lr)
        results.append(Rounded(round_weights(job.stored, job.votes, job.storage, plan, job.key), moments))
    return results
