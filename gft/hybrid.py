"""Hybrid: several optimizers as one, for schedulers, trainers and loops that take a single optimizer."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gft.errors import UsageError, UsageTypeError
from gft.layers import layer_of
from gft.optim import GFT
from gft.saved import check_optimizer, mapping


class Hybrid(Optimizer):
    """Joins gft.GFT, which trains the integer weights, with any torch optimizers for the rest.

    Its `param_groups` are the groups of its parts, the same dicts in the same order, so a scheduler set on it drives
    every part's "lr". A scheduler that cycles momentum (OneCycleLR, CyclicLR) drives that of the parts that have one, be it
    called "momentum" or the first of "betas"; gft.GFT has none, and its rule's inertia stays as it is.
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise UsageError("Hybrid joins optimizers; give at least one")
        owners: dict[int, Optimizer] = {}
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise UsageTypeError(f"Hybrid joins torch optimizers, not {type(optimizer).__name__}; give them one by one")
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise UsageError(f"{type(optimizer).__name__} computes the loss several times in a step, and each would "
                                 "cast votes; give the float parameters to AdamW or its kin")
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if layer_of(parameter) is not None and not isinstance(optimizer, GFT):
                    raise UsageError(f"{type(optimizer).__name__} was given a quantized weight, which only gft.GFT can "
                                     "train; give it gft.dense(model) instead of model.parameters()")
                if owners.setdefault(id(parameter), optimizer) is not optimizer:
                    raise UsageError(f"{type(owners[id(parameter)]).__name__} and {type(optimizer).__name__} share a "
                                     "parameter; give each parameter to one optimizer")
        # What an Optimizer has beyond its groups (hooks, the profiled step) is set up by its unpickling path.
        self.__setstate__({"defaults": _momentum_of(optimizers), "optimizers": optimizers})

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Quantized weights go to the GFT part, others to the first part that is not one."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        param_group = {**param_group, "params": params}
        first = params[0][1] if isinstance(params[0], tuple) else params[0]
        wants_gft = layer_of(first) is not None
        for optimizer in self.optimizers:
            if isinstance(optimizer, GFT) == wants_gft:
                return optimizer.add_param_group(param_group)
        raise UsageError(f"no part of this Hybrid takes {'quantized' if wants_gft else 'dense'} parameters")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients and the votes of all parts."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step of each part, in their order. If GFT refuses a setting, none has moved."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:  # before any part has moved
            if isinstance(optimizer, GFT):
                optimizer.check()
        for optimizer in self.optimizers:
            _take_momentum(optimizer)
            optimizer.step()
        return loss

    def release(self) -> None:
        """Give the integer weights free for another optimizer, or for gft.pack_. The GFT part moves nothing any more."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, GFT):
                optimizer.release()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The state_dict of each part, in their order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Take over what `state_dict` gave. Nothing is changed if a part refuses its own."""
        self.check_state_dict(state_dict)
        for optimizer, part in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(part)

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise unless each part can take over its own; changes nothing."""
        parts = mapping(state_dict, "the optimizer's state_dict").get("optimizers")
        if not isinstance(parts, (list, tuple)) or len(parts) != len(self.optimizers):
            raise UsageError(f"this state_dict is not of a Hybrid of {len(self.optimizers)} optimizers")
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            check_optimizer(optimizer, part)


def _momentum_of(optimizers: tuple[Optimizer, ...]) -> dict[str, float]:
    """The defaults of a Hybrid, in which a scheduler looks whether there is a momentum to cycle. One name for all parts."""
    for optimizer in optimizers:
        if "momentum" in optimizer.defaults:
            return {"momentum": optimizer.defaults["momentum"]}
        if "betas" in optimizer.defaults:
            return {"momentum": optimizer.defaults["betas"][0]}
    return {}


def _take_momentum(optimizer: Optimizer) -> None:
    """Hand a scheduler's "momentum" on: it is written into the groups of every part, whatever the part calls it."""
    if "momentum" in optimizer.defaults:
        return
    for group in optimizer.param_groups:
        momentum = group.pop("momentum", None)
        if momentum is not None and "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
