"""What was saved, looked at before anything of it is taken over.

A file or a state_dict may be damaged, of another model or program, or made to do harm. So whoever loads one asks here first,
about all of it: what does not fit raises UsageError, in one sentence, while nothing has changed yet. torch itself looks at
little: it takes moments of other shapes over and fails in the next step, and a scheduler takes over any attribute.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gft.errors import UsageError, shortened

DAMAGED = "it is damaged, or of something else than what is to take it over"
SCRATCH = (3, 5, 7, 11, 13, 17, 19, 23)  # sizes of a parameter to learn from what an optimizer keeps


def mapping(value: Any, name: str) -> Mapping[Any, Any]:
    """`value`, if it is a dict or its like."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{name}: a dict belongs here, not {shortened(value)}; {DAMAGED}")
    return value


def sequence(value: Any, name: str) -> Sequence[Any]:
    """`value`, if it is a list or a tuple."""
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"{name}: a list belongs here, not {shortened(value)}; {DAMAGED}")
    return value


def whole_number(value: Any, name: str, most: int) -> int:
    """`value`, if it is an integer from 0 to most."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise UsageError(f"{name}: an integer from 0 to {most} belongs here, not {shortened(value)}; {DAMAGED}")
    return value


def is_number(value: Any) -> bool:
    """Is it a finite number, or a tensor of one?"""
    if isinstance(value, Tensor):
        return is_plain(value) and value.numel() == 1 and not value.is_complex() and math.isfinite(value.item())
    # An integer of a thousand digits is finite, too, but no float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300


def is_plain(tensor: Tensor) -> bool:
    """Has it numbers, one after the other? Not a sparse, a quantized or a meta tensor."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


# ---------------------------------------------------------------------------------------------------- optimizers


def saved_groups(optimizer: Optimizer, state_dict: Any) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """The optimizer's param groups and those of a state_dict, in pairs of as many weights each."""
    state_dict = mapping(state_dict, "the optimizer's state_dict")
    mapping(state_dict.get("state"), "the state in the optimizer's state_dict")
    groups = sequence(state_dict.get("param_groups"), "param_groups in the optimizer's state_dict")
    if len(groups) != len(optimizer.param_groups):
        raise UsageError(f"the state_dict is of an optimizer with {len(groups)} param groups, where this one has "
                         f"{len(optimizer.param_groups)}; build it with the same groups")
    numbers: list[Any] = []
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        params = sequence(mapping(group, "a param group").get("params"), "params of a param group")
        if len(params) != len(own["params"]):
            raise UsageError(f"the state_dict is of an optimizer with a param group of {len(params)} parameters, where this "
                             f"one has {len(own['params'])}; build it with the same groups, over the same model")
        numbers += params
    if not all(type(number) in (int, str) for number in numbers) or len(set(numbers)) < len(numbers):
        raise UsageError(f"params of the optimizer's state_dict are not numbers or names, each of its own; {DAMAGED}")
    return list(zip(optimizer.param_groups, groups, strict=True))


def check_optimizer(optimizer: Optimizer, state_dict: Any) -> None:
    """Raise unless an optimizer can take over a state_dict. gft's own know by themselves; of torch's, settings must be such
    as torch takes, and a parameter's state what a step leaves behind. Of others groups are compared, and shapes with those
    that are there."""
    own_check = getattr(optimizer, "check_state_dict", None)
    if own_check is not None:
        own_check(state_dict)
        return
    kind = type(optimizer)
    for own, saved in saved_groups(optimizer, state_dict):
        for key, value in ((key, value) for key, value in own.items() if key not in ("params", "param_names")):
            if key in saved and not (is_like(saved[key], value) and _finite(saved[key])):
                raise UsageError(f"{key} of {kind.__name__} is {shortened(saved[key])} in the state_dict and "
                                 f"{shortened(value)} here; {DAMAGED}")
            # What newer versions of torch have added is None or a bool, and set by torch itself.
            if key not in saved and isinstance(value, (int, float, tuple)) and type(value) is not bool:
                raise UsageError(f"the state_dict has no {key} of {kind.__name__}; it is of another optimizer")
        expected: dict[Any, Mapping[str, Any] | None] = {}
        for number, parameter in zip(saved["params"], own["params"], strict=True):
            state = mapping(state_dict["state"].get(number, {}), f"the state of a parameter of {kind.__name__}")
            key = parameter.dim(), parameter.dtype, parameter.device
            if state and key not in expected:
                expected[key] = _after_a_step(optimizer, {**own, **saved}, parameter)
            if state:
                _check_state(kind.__name__, state, expected[key], parameter, optimizer.state.get(parameter, {}))


def _after_a_step(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Mapping[str, Any] | None:
    """What torch's optimizer keeps of a parameter, learnt from a step of one that nobody needs; None of other optimizers."""
    kind = type(optimizer)
    if kind not in vars(torch.optim).values() or kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        return None
    taken = inspect.signature(kind).parameters
    settings = {key: value for key, value in group.items() if key in taken and key != "params"}
    scratch = torch.zeros(SCRATCH[: parameter.dim()], dtype=parameter.dtype, device=parameter.device)
    scratch.requires_grad_().grad = torch.zeros_like(scratch)
    try:  # torch raises as it happens to: what of its code can be trusted with such settings is not known before
        other = kind([scratch], **settings)
        other.step()
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"torch's {kind.__name__} cannot work with the settings in the state_dict; {DAMAGED}") from error
    return other.state[scratch]


def _check_state(kind: str, state: Mapping[str, Any], expected: Mapping[str, Any] | None, parameter: Tensor,
                 before: Mapping[str, Any]) -> None:
    """Raise unless a parameter's state has the names, kinds and shapes that its optimizer needs."""
    if expected is not None and state.keys() != expected.keys():
        odd = shortened(next(iter(state.keys() ^ expected.keys())))
        raise UsageError(f"the state of a parameter of {kind} differs by {odd} from what {kind} keeps; {DAMAGED}")
    for name, value in state.items():
        like, size = (before.get(name), None) if expected is None else (expected[name], parameter)
        if isinstance(like, (int, float)) and not is_number(value):
            raise UsageError(f"{name} of {kind} is {shortened(value)} where a number belongs; {DAMAGED}")
        if not isinstance(like, Tensor):
            continue
        if not (isinstance(value, Tensor) and is_plain(value) and value.is_floating_point() == like.is_floating_point()):
            raise UsageError(f"{name} of {kind} is {shortened(value)} where {shortened(like)} belongs; {DAMAGED}")
        shape = like.shape if size is None else _resized(like.shape, size.shape)
        if value.shape != shape:
            raise UsageError(f"{name} of {kind} has the shape {tuple(value.shape)} where {tuple(shape)} belongs; load the "
                             "state_dict of an optimizer over this model")
        if name == "step" and not float(value) >= 0:
            raise UsageError(f"step of {kind} is {float(value)} where a number of steps belongs; {DAMAGED}")


def _resized(shape: torch.Size, size: torch.Size) -> torch.Size:
    """The shape that goes with a parameter of another size: where the scratch's own sizes are, the parameter's."""
    return torch.Size(size[SCRATCH.index(one)] if one in SCRATCH[: len(size)] else one for one in shape)


def _finite(value: Any) -> bool:
    """Are all numbers of a setting finite?"""
    if isinstance(value, (list, tuple)):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def is_like(value: Any, other: Any) -> bool:
    """Can a saved value stand where another stands: a number for a number, a list for one as long, a dict for a dict with
    such values? None says too little to tell."""
    if value is None or other is None:
        return True
    if isinstance(other, bool):
        return isinstance(value, bool)
    if isinstance(other, (int, float)) or (isinstance(other, Tensor) and other.numel() == 1):
        return is_number(value) or isinstance(value, float)  # inf too, as ReduceLROnPlateau's best is at first
    if isinstance(other, Mapping):
        return isinstance(value, Mapping) and all(is_like(value[key], other[key]) for key in other if key in value)
    if isinstance(other, (list, tuple)):
        as_long = isinstance(value, (list, tuple)) and len(value) == len(other)
        return as_long and all(is_like(one, two) for one, two in zip(value, other, strict=True))
    return isinstance(value, type(other))


# ---------------------------------------------------------------------------------------------------- schedules, generators


def check_scheduler(scheduler: Any, state: Any) -> None:
    """Raise unless a schedule can take over a state: torch's would take over whatever attributes there are."""
    own, name = scheduler.state_dict(), type(scheduler).__name__
    for key, value in mapping(state, f"the state of {name}").items():
        if not isinstance(key, str) or (key not in own and hasattr(scheduler, key)):
            raise UsageError(f"the state of {name} has {shortened(key)}, which no schedule saves; {DAMAGED}")
        if not is_like(value, own.get(key)) or (value is None) != (own.get(key, value) is None):
            raise UsageError(f"{key} of {name} is {shortened(value)} in the state and {shortened(own[key])} here; load the "
                             "state of such a schedule over as many param groups")
    missing = [key for key, value in own.items() if key not in state and not key.startswith("_") and value is not None]
    if missing:
        raise UsageError(f"the state of {name} has no {missing[0]}; load that of such a schedule")


def check_generators(state: Any) -> None:
    """Raise unless torch's generators can take over a state: others are asked to, first."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    state = mapping(state, "the state of torch's random generators")
    wanted: list[tuple[torch.device, Any]] = [(torch.device("cpu"), state.get("cpu"))]
    if "cuda" in state:
        each = sequence(state["cuda"], "the state of the GPUs' random generators")
        wanted += [(torch.device("cuda", index), one) for index, one in enumerate(each) if len(each) == devices]
    for device, one in wanted:
        # torch takes bytes, as many as its generator on the device has, and refuses others by RuntimeError.
        if not isinstance(one, Tensor) or one.dtype is not torch.uint8 or one.dim() != 1 or not is_plain(one):
            raise UsageError(f"the state of the random generator on {device} is {shortened(one)} where uint8 of one "
                             f"dimension belongs; {DAMAGED}")
        try:
            torch.Generator(device).set_state(one.cpu())
        except RuntimeError as error:
            raise UsageError(f"the state of the random generator on {device} is not one of this version of torch") from error
