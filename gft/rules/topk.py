"""TopK, the paper's rule: the weights with the largest votes take one level, with chance (paper, Alg. 1 and 3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from gft import ops
from gft.ops.rounding import ONE
from gft.ops.topk import TopKPlan
from gft.rules.rule import Rule, StepResult, WeightStep
from gft.settings import check_number


@dataclass(frozen=True)
class TopK(Rule):
    """Move the k·|W| weights with the largest |votes| one level; lr is k. The paper's rule.

    p_min: Least chance of a chosen weight to move. At 0 the weakest candidates never move; at 1 every candidate moves each
        step and training never settles.
    """

    p_min: float = 0.001
    lr_meaning: ClassVar[str] = "k, the fraction of weights that may move"

    def __post_init__(self) -> None:
        check_number("p_min", self.p_min, 0.0, 1.0, "it is a chance")

    def step(self, weights: Sequence[WeightStep], lr: float | Tensor) -> list[StepResult]:
        return [self._step(weight, lr) for weight in weights]

    def _step(self, weight: WeightStep, k: float | Tensor) -> StepResult:
        plan = self._plan(weight, k)
        if plan is None:
            return StepResult(None)
        plan = replace(plan, p_min=least_chance(self.p_min))
        return StepResult(ops.topk_weights(weight.stored, weight.votes, weight.storage, plan, weight.key))


    def _plan(self, weight: WeightStep, k: float | Tensor) -> TopKPlan | None:
        part = weight.part
        if part is None:
            # A look at the largest vote would make the host wait for a GPU; a bound on it costs a few passes more instead.
            return ops.topk_plan(weight.votes, k, weight.bound if weight.stored.is_cuda else None)
        # Ranks have some rows each: a small sum over them for each bit of the bound.
        elements = part.rows * weight.votes.shape[1]
        return ops.topk_plan_of_rows(weight.votes, k, elements, weight.bound, lambda counts: part.add_up([counts]))


def least_chance(p_min: float) -> int:
    """p_min in 1/65536, rounded up: a chance above 0 stays above 0."""
    return math.ceil(p_min * ONE)
