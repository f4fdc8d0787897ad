"""Rounding, the default rule: every weight moves by the stochastic rounding of lr times its normalised votes.

    u = clip(votes / sqrt(R · C / M), -4, 4)      R, C, M: means of votes² by row, by column and of all
    w <- clip(stochastic_round(w - lr/2 · soft_threshold(u)), -I, I)                 packed

    z <- clip(stochastic_round(z - lr · u), -I, I)         kept to within one level of w   with memory
    w <- round(z)                                          with chance 1 - inertia, else w stays

z is where the votes have carried the weight, w the level that the network computes with. Each step only some of the
levels follow. Along any direction made of many weights w is then an average of past z that forgets by a share of
1 - inertia a step, and that is momentum: v <- inertia · v + (1 - inertia) · u; w <- w - lr · v gives the same w. It costs
no state: what waits is in the memory already. Without inertia w is always round(z), so memory need not tell them apart and
counts z twice as finely (storage.py). docs/method.md has the algebra.

With memory R, C and M are means over many steps, as Adam's second moment is, factored as Adafactor's: taken from one step's
votes alone they follow its noise. Without memory they are the step's own, or, with second_moment="running", those means
scaled as a whole to the step's own M.

Without memory nothing adds votes up over steps, and most of them are noise: soft_threshold(u) = sign(u) · max(|u| - t, 0),
scaled to rms 1, moves a weight only by what exceeds t, and by default t grows with the spacing of the levels. With memory t
is 0 unless it is given.

threshold="auto" weighs two noises. A move is rounded to whole units: of memory, or levels. If it is r units rms, rounding
adds 0.8 · r units² to the variance of where a weight lies, and the noise of the votes, which is nearly all of them, r². At
the same mean move, with P the share of Gaussian votes beyond t, their sum is

    r · A(t) + r² · G(t),     A = E[max(|u| - t, 0)] / P,     G = E[max(|u| - t, 0)²] / P²

which is least at some t that falls with r: ops.rounding.SUITED.

Moves grow to their full size over the first `warmup` steps, whatever lr does. However small or large votes are, they are
normalised; and those of first steps agree from sample to sample, so that a layer's move lies in few directions and changes
its output by far more than a later one of its size.

From lr to a moved weight:  GFT.step -> Rounding.step -> lr_scale (below) -> ops.rounding_plan -> ops.round_weights.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from gft import ops
from gft.errors import UsageError
from gft.initialize import SPACING
from gft.ops.rounding import FOLLOW_ALL, ONE, Rounded, RoundingJob
from gft.rules.lowrank import LowRank
from gft.rules.mean import RunningMean
from gft.rules.momentum import Momentum
from gft.rules.rule import Part, Rule, StepResult, WeightStep
from gft.settings import check_choice, check_count, check_number
from gft.storage import Storage

INERTIA = 0.9  # with memory, unless the rule says otherwise
THRESHOLD_SPACINGS = 1.6  # without memory: 2 rms at 2 bits, 0.57 at 3 and 4
MOST_THRESHOLD = 3.0  # rms; beyond it next to nothing moves
WARMUP = 100  # first steps over which moves grow
MOST_WARMUP = 1_000_000  # steps
AUTO = "auto"  # the threshold that suits a move
PACKED_LR = 0.5  # of lr without memory or momentum: nothing averages out what the rounding adds
RANK_LR, RANK_THRESHOLD = 0.5, 2.0  # of that lr, since such moves go one way for longer; and by default, in rms
MOMENTUM_LR = 0.25  # of lr with momentum, whose moves go one way for longer still, however weights are stored
REFERENCE_INPUTS = 128  # at which, in a layer that preserves variance, lr is the rms move in levels of a 4-bit grid
REFERENCE_BRANCHES = 12  # up to which layers that add to a residual stream move as far as all others
MOST_MOMENTUM = 0.999
MOST_RANK = 4096  # of a running mean of votes
LARGEST_GROWTH = 4.0  # a layer that starts smaller moves as if it were so many times its size, at most


@dataclass(frozen=True)
class Rounding(Rule):
    """Move every weight by the stochastic rounding of lr times its normalised votes. None: the default for its storage.

    inertia: With memory: the share of levels that wait in a step before they follow where their votes have carried them. It
        does what momentum does, without its state; 0.9 by default. At 0 every level follows at once, memory counts twice as
        finely, and large networks are held to small lr; near 1 levels lag far behind.
    threshold: Votes smaller than this many rms move nothing (soft threshold). Packed: by default 2 at 2 bits and with
        momentum_rank, else 0.57 at 3 and 4; at 0 every vote counts, and noise moves most weights; at 3, the most, one vote
        in 400 counts, and short trainings barely start. With memory: by default 0. "auto": the one at which a move of its
        size is rounded with least noise, 0 for moves of two units of memory and more, up to 1.5 for small ones, as those of
        wide layers at the end of a training; lr then is the move before the threshold.
    second_moment: Packed: rows and columns are normalised by their votes in this "step" alone (the default), or in a
        "running" mean over many steps. With memory it is always running.
    orthogonalize: True: half of what moves the weights is the layer's votes with all singular values equal, as Muon does
        with a gradient; with momentum all of it. Costs products of the layer's size cubed, and devices no longer give the
        same bits (ranks do).
    momentum: The share that a running mean of the votes keeps of itself in a step; with it that mean moves the weights, and
        inertia is 0 by default. It takes one more byte a weight. 0: none. 0.9 with orthogonalize=True is Muon's update, and
        what to take; without it a network may learn next to nothing.
    momentum_rank: Packed: how many directions of a running mean of the votes are kept, 4 B a row and a column each; half of
        what moves the weights is that mean. 0: none. With 16 packed language models learn more in our trials.
    warmup: Over how many first steps of the optimizer moves grow evenly to what lr says: 100 by default, 0 for none. It
        comes on top of any schedule of lr, and one lr then serves short trainings and small batches, too.
    """

    inertia: float | None = None
    threshold: float | str | None = None
    second_moment: str | None = None
    orthogonalize: bool = False  # type: ignore[misc]
    momentum: float = 0.0
    momentum_rank: int = 0
    warmup: int | None = None
    lr_meaning: ClassVar[str] = "the rms move of a weight in levels"
    replays: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.inertia is not None:
            check_number("inertia", self.inertia, 0.0, 0.999, "it is the share of levels that wait in a step")
        if self.threshold not in (None, AUTO):
            check_number("threshold", self.threshold, 0.0, MOST_THRESHOLD, 'it counts rms of the votes, or is "auto"')
        check_choice("second_moment", self.second_moment, (None, "step", "running"))
        check_choice("orthogonalize", self.orthogonalize, (False, True))
        check_number("momentum", self.momentum, 0.0, MOST_MOMENTUM, "it is the share that a mean of votes keeps in a step")
        check_count("momentum_rank", self.momentum_rank, 0, MOST_RANK, "it counts directions")
        if self.warmup is not None:
            check_count("warmup", self.warmup, 0, MOST_WARMUP, "it counts steps")
        if self.momentum_rank and self.orthogonalize:
            raise UsageError("momentum_rank and orthogonalize are two ways to make more of a step's votes; choose one")
        if self.momentum_rank and self.momentum:
            raise UsageError("momentum and momentum_rank are two ways to keep a running mean of the votes; choose one")

    def storage_for(self, storage: Storage) -> Storage:
        """Refuse a setting that this weight could only ignore; where there is memory, choose its encoding."""
        kept = f"{storage.bits} bits" + ("" if storage.memory else f", memory={storage.asked_for!r}")
        if self.inertia and not storage.memory_bits:
            raise UsageError(f"inertia={self.inertia} needs memory, which this weight ({kept}) has none of; build the layer "
                             "with memory=True and at most 6 bits, or leave inertia out")
        if self.second_moment is not None and storage.memory_bits:
            raise UsageError(f"second_moment={self.second_moment!r} is for weights without memory, and this one ({kept}) "
                             "has it; leave second_moment out, or build the layer with memory=False")
        if self.momentum_rank and storage.memory_bits:
            raise UsageError(f"momentum_rank={self.momentum_rank} is for weights without memory, and this one ({kept}) has "
                             "it, with inertia for its momentum; take momentum=0.9 and orthogonalize=True, or build the "
                             "layer with memory=False")
        return replace(storage, inertia=self.follow < FOLLOW_ALL)

    @property
    def running_mean(self) -> RunningMean | None:  # type: ignore[override]
        """Of votes: how it is kept, if there is to be one."""
        if self.momentum:
            return Momentum(float(self.momentum))
        return LowRank(self.momentum_rank) if self.momentum_rank else None

    @property
    def follow(self) -> int:
        """The chance of a level to follow, in 1/256, and never none."""
        own = 0.0 if self.momentum else INERTIA
        inertia = own if self.inertia is None else self.inertia
        return max(1, round((1 - inertia) * FOLLOW_ALL))

    def threshold_for(self, storage: Storage) -> float | None:
        """The soft threshold of a weight, in rms; None: the one that suits each move. A level gone the wrong way costs as
        much as the grid is coarse, so the default grows with the spacing of what moves: levels, or where bits are to spare
        fractions of them."""
        if self.threshold == AUTO:
            return None
        if self.threshold is not None:
            return float(self.threshold)
        if storage.memory_bits:
            return 0.0
        if self.momentum_rank:
            return RANK_THRESHOLD
        return min(THRESHOLD_SPACINGS * SPACING[storage.bits + storage.spare_bits], MOST_THRESHOLD)

    def job(self, weight: WeightStep) -> RoundingJob:
        """What the operations need to move one weight."""
        storage, threshold = weight.storage, self.threshold_for(weight.storage)
        inputs = weight.fan_in or weight.votes.shape[1]
        levels = levels_per_step(weight.scale, storage.bits, inputs, weight.branches)
        if self.momentum:
            levels *= MOMENTUM_LR
        elif not storage.memory_bits:
            levels *= PACKED_LR * (RANK_LR if self.momentum_rank else 1.0)
        runs = self._keeps_second_moment(storage)
        return RoundingJob(weight.stored, weight.votes, storage, weight.key,
                           lr_scale(levels, storage.resolution, threshold or 0.0), weight.bound, threshold, self.follow,
                           weight.second_moment if runs else None, rescale_step=runs and not storage.memory_bits,
                           rows=None if weight.part is None else weight.part.rows,
                           warmup=WARMUP if self.warmup is None else self.warmup)

    def step(self, weights: Sequence[WeightStep], lr: float | Tensor) -> list[StepResult]:
        jobs = [self.job(weight) for weight in weights]
        whole = [number for number, weight in enumerate(weights) if weight.part is None]
        moved = dict(zip(whole, ops.round_many([jobs[number] for number in whole], lr), strict=True)) if whole else {}
        parts = [number for number in range(len(weights)) if number not in moved]
        moved |= zip(parts, _round_parts([(jobs[number], weights[number].part) for number in parts], lr), strict=True)
        results = [moved[number] for number in range(len(weights))]
        return [StepResult(result.flips, result.second_moment if self._keeps_second_moment(weight.storage) else None)
                for weight, result in zip(weights, results, strict=True)]

    def _keeps_second_moment(self, storage: Storage) -> bool:
        return storage.memory_bits > 0 or self.second_moment == "running"


def _round_parts(some: Sequence[tuple[RoundingJob, Part | None]], lr: float | Tensor) -> Iterator[Rounded]:
    """Move the rows that this rank has of some weights. Of the whole it must know sums of squares only: of its own rows
    and, of all rows, by column."""
    sums = []
    for job, part in some:
        assert part is not None
        own, columns = ops.sums_of_squares(job.votes, job.shift), job.votes.shape[1]
        whole = own.new_zeros(part.rows + columns)
        whole[part.first_row : part.first_row + len(job.votes)] = own[: len(job.votes)]
        whole[part.rows :] = own[len(job.votes) :]
        sums.append(whole)
    if some and some[0][1] is not None:
        some[0][1].add_up(sums)  # of all weights at once
    for (job, _), whole in zip(some, sums, strict=True):
        yield ops.round_some_rows(whole, job, lr)


def levels_per_step(scale: float, bits: int, inputs: int, branches: int = 1) -> float:
    """The rms move of a weight at lr = 1, in levels of its own grid.

    The same lr is meant to serve layers of any width, bits and start. So a move is measured in weights, not in levels:
    0.35 · lr of what a weight is in a layer that preserves variance, 1/sqrt(inputs), however small the layer's own start
    is. And moves that agree with x add up over the inputs while the weights themselves add up at random, so relative to
    its output a layer moves sqrt(inputs) times faster: divide by that, too, beyond 128 inputs. Layers that add to one
    residual stream have their moves added up there, so beyond 12 of them each moves by 12/branches (layers/residual.py).
    """
    size = min(1 / math.sqrt(inputs), LARGEST_GROWTH * scale / SPACING[bits])
    width = min(1.0, math.sqrt(REFERENCE_INPUTS / inputs))
    return SPACING[4] * size / scale * width * min(1.0, REFERENCE_BRANCHES / branches)


def rms_beyond(threshold: float) -> float:
    """The rms of max(|u| - threshold, 0) for Gaussian u of rms 1."""
    beyond = math.erfc(threshold / math.sqrt(2)) / 2
    density = math.exp(-(threshold**2) / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(2 * ((1 + threshold**2) * beyond - threshold * density))


@cache
def lr_scale(levels: float, resolution: int, threshold: float) -> float:
    """What lr is multiplied by: the rms move at lr = 1, in 1/65536 of a stored value, of what exceeds the threshold. A
    float32, so that a lr on the device gives the same bits."""
    levels = levels / rms_beyond(threshold) if threshold else levels
    return torch.tensor(levels * resolution * ONE, dtype=torch.float32).item()
