"""Muon (Jordan et al. 2024): momentum whose singular values are all made equal, for the matrices of a network.

    m <- momentum · m + (1 - momentum) · g            g' = (1 - momentum) · g + momentum · m      (Nesterov)
    W <- (1 - lr · decay) · W - lr · 0.2 · sqrt(max(out, in)) · orthogonal(g')

By the factor a step is as large as one of AdamW, whose lr and weight decay then serve (Liu et al. 2025, "Muon is scalable
for LLM training"). It is torch.optim.Muon with adjust_lr_fn="match_rms_adamw", to which a test compares it; that one reads
lr on the host and takes one matrix at a time, so no CUDA graph can hold its step, and times would be unfair to it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gft.rules.matrices import alike
from gft.rules.orthogonalize import orthogonal

MOMENTUM = 0.95
LIKE_ADAMW = 0.2  # the usual rms of a step of AdamW at lr 1
TINY = 1e-7


class Muon(Optimizer):
    """Muon for matrices. lr: as AdamW's. At 0 nothing moves; several times AdamW's best, training diverges. State: m."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.1, momentum: float = MOMENTUM) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "capturable": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for numbers in alike(weights):  # which share their products
                self._move([weights[number] for number in numbers], group)
        return loss

    def _move(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        moves = []
        for weight in weights:
            gradient, state = weight.grad, self.state[weight]
            assert gradient is not None
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(weight)
            moves.append(gradient.lerp(state["momentum"].lerp_(gradient, 1 - group["momentum"]), group["momentum"]))
        moved = torch.stack(moves)
        moved = orthogonal(moved / torch.linalg.vector_norm(moved, dim=(-2, -1), keepdim=True).clamp_min(TINY))
        size = LIKE_ADAMW * max(weights[0].shape) ** 0.5
        for weight, one in zip(weights, moved, strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * size * one)
