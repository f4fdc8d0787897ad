"""What a rule is: how the votes on a weight move it.

A rule is a frozen dataclass with three methods. A toy rule fits in one file:

    @dataclass(frozen=True)
    class Always(Rule):
        \"\"\"Every weight takes one level against its votes, in every step.\"\"\"

        def step(self, weights, lr):
            results = []
            for weight in weights:
                old = weight.levels()
                new = weight.write_levels(old - weight.votes.sign())
                results.append(StepResult(flips=(new != old).sum()))
            return results

    gft.GFT(gft.quantized(model), rule=Always())
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gft.philox import NoiseKey
from gft.rules.mean import RunningMean
from gft.settings import Setting, check_number
from gft.storage import Storage


class Part(NamedTuple):
    """Which rows of a weight these are, where ranks share them out, and how to learn of the rest."""

    first_row: int
    rows: int  # of the whole weight
    add_up: Callable[[Sequence[Tensor]], None]  # sums tensors over the ranks, in place: all must call it alike
    take_largest: Callable[[Sequence[Tensor]], None]  # likewise the largest entries


@dataclass(frozen=True, eq=False, slots=True)
class WeightStep:
    """One weight at the moment of a step: all that a rule may know of it."""

    stored: Tensor  # (rows, bytes) uint8 or (rows, columns) int8, to be changed in place
    votes: Tensor  # (rows, columns) int32 or int64
    bound: int  # no |vote| is larger
    storage: Storage
    scale: float  # the forward weight is scale · level; where rows or groups have scales of their own, the rms of them
    key: NoiseKey  # this weight's random numbers in this step
    second_moment: Tensor | None = None  # (rows + columns + 1,) what the rule has returned in the step before
    fan_in: int | None = None  # how many products an output sums; None: as many as there are columns
    branches: int = 1  # how many layers' outputs are added to the residual stream that this one's is added to
    part: Part | None = None  # where `stored` and `votes` are some rows only; key and second_moment are of the whole

    def levels(self) -> Tensor:
        """(rows, columns) int8."""
        return self.storage.levels(self.stored, self.votes.shape[1])

    def write_levels(self, levels: Tensor) -> Tensor:
        """Clip to the grid and store, with nothing remembered; returns the levels as stored."""
        levels = levels.clamp(-self.storage.largest, self.storage.largest).to(torch.int8)
        self.stored.copy_(self.storage.store(levels))
        return levels


class StepResult(NamedTuple):
    """What a rule gives back of one weight."""

    flips: Tensor | None  # int64 scalar: how many levels have changed; None: nothing was to be moved
    second_moment: Tensor | None = None  # kept for the next step, if the rule wants one


@dataclass(frozen=True)
class Rule(Setting):
    """How votes move weights. Subclasses override `step`, and what else they need."""

    lr_meaning: ClassVar[str] = "the learning rate"
    orthogonalize: ClassVar[bool] = False  # are the votes made orthogonal (rules/orthogonalize.py) before the step?
    running_mean: ClassVar[RunningMean | None] = None  # of votes, which joins or replaces them (rules/mean.py) before it
    replays: ClassVar[bool] = False  # on a GPU: does it read lr there and launch the same kernels each step, to be recorded?

    def storage_for(self, storage: Storage) -> Storage:
        """The storage in which this rule trains such a weight; raises where it cannot."""
        return storage

    def check_lr(self, lr: float) -> None:
        """Raise unless the rule can work with this learning rate."""
        check_number("lr", lr, 0.0, 1.0, f"for {type(self).__name__} lr is {self.lr_meaning}")

    def step(self, weights: Sequence[WeightStep], lr: float | Tensor) -> list[StepResult]:
        """Move some weights that share a device, seed and step, in place. lr is a number, or one in a GPU's memory."""
        raise NotImplementedError
