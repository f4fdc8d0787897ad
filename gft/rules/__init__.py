"""How votes move weights: Rounding (ours, the default), TopK (the paper's), and what a rule of your own needs (rule.py)."""

from gft.rules.rounding import Rounding
from gft.rules.rule import Part, Rule, StepResult, WeightStep
from gft.rules.topk import TopK

__all__ = ["Part", "Rounding", "Rule", "StepResult", "TopK", "WeightStep"]
