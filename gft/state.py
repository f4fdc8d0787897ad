"""What GFT keeps of each weight from step to step, on its way into a state_dict and back.

    running scales     rms of x and grad_output, second moments of votes: floats, whole on every rank      votes.py
    a running mean     of votes, where the rule keeps one; its rows are shared out as the weight's are     rules/mean.py
    flips, number      how often levels have changed; the weight's place in the random streams

torch.distributed.checkpoint reads into tensors that are there, so a state_dict has room for all that there can be (`ROOM`,
-1 in floats) and `read_state` tells room from numbers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gft.errors import UsageError, shortened
from gft.layers import QuantLayer
from gft.rules import Rule
from gft.rules.mean import NAMES, ROOM, RunningMean, State
from gft.saved import is_plain, whole_number
from gft.sharding import all_rows, handed_out, is_sharded, like_rows_of, own_rows
from gft.votes import check_running, running_lengths

RUNNING = ("x_rms", "grad_rms", "second_moment")  # what of an accumulator the state_dict keeps


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def read_state(saved: Mapping[str, Any], layer: QuantLayer, rule: Rule) -> dict[str, Any]:
    """The saved state of a layer's weight, looked at number by number. What of it kernels and steps will use is copied, in
    memory of its own and one number after the other."""
    state, shape = dict(saved), (layer.rows, layer.columns)
    for name, length in running_lengths(layer.inputs, shape, layer.outputs).items():
        if (scale := state.pop(name, None)) is None:
            continue
        check_running(name, scale.abs() if is_room(scale) else scale, length, shape)
        if not is_room(scale):
            state[name] = scale.detach().clone(memory_format=torch.contiguous_format)
    mean = taken_mean(state)
    if mean and rule.running_mean is not None:
        rule.running_mean.check(mean, layer.rows, layer.columns)
        state |= laid_out(mean, layer.qweight, rule.running_mean)
    for name in ("flips", "last_flips"):
        if name in state:
            flips = state[name]
            if not (isinstance(flips, Tensor) and is_plain(flips) and flips.dtype is torch.int64 and flips.dim() == 0):
                raise UsageError(f"the optimizer's state has {name} that are {shortened(flips)} where one int64 belongs; "
                                 "load a state_dict that is not damaged")
            state[name] = flips.clone()
    if "number" in state:
        whole_number(state["number"], "the number of a layer in the optimizer's state", 2**30)
    return state


def with_room(state: Mapping[str, Any], layer: QuantLayer, rule: Rule) -> dict[str, Any]:
    """A weight's state, with room for what a checkpoint may hold of it."""
    lengths = running_lengths(layer.inputs, (layer.rows, layer.columns), layer.outputs)
    device = layer.qweight.device
    room: dict[str, Any] = {name: torch.full((length,), -1.0, device=device) for name, length in lengths.items()}
    state = dict(state)
    kept = rule.running_mean
    if kept is None or not kept.fits(state, layer.rows, layer.columns):
        for name in NAMES:
            state.pop(name, None)  # of a rule that the group has no more
    if kept is not None:
        kinds = kept.tensors(len(own_rows(layer.qweight)), layer.columns)
        empty = {name: torch.full(kind.shape, ROOM[kind.dtype], dtype=kind.dtype, device=device)
                 for name, kind in kinds.items()}
        room |= shared_as(empty, layer.qweight, kept)
    room |= {name: torch.zeros((), dtype=torch.int64, device=device) for name in ("flips", "last_flips")}
    return room | state


def is_room(value: Any) -> bool:
    """Is it what `with_room` puts where there is nothing?"""
    plain = isinstance(value, Tensor) and is_plain(value) and value.numel() > 0
    return plain and bool((own_rows(value) == ROOM.get(value.dtype, -1)).all())


# ---------------------------------------------------------------------------------------------------- running means


def taken_mean(state: dict[str, Any]) -> dict[str, Any]:
    """The running mean of votes that a state has, taken out of it; nothing if there is only room for one."""
    found = {name: state.pop(name) for name in NAMES if name in state}
    return {} if any(map(is_room, found.values())) else found


def laid_out(mean: Mapping[str, Tensor], weight: Tensor, kept: RunningMean) -> State:
    """A copy of a mean, of whose rows each rank has those that it has of the weight, however it came."""
    copies = {}
    for name, one in mean.items():
        if is_sharded(one):
            own = own_rows(one) if is_sharded(weight) else all_rows(one)
        else:
            own = handed_out(one, weight) if name in kept.by_rows else one
        copies[name] = own.detach().clone(memory_format=torch.contiguous_format)
    return shared_as(copies, weight, kept)


def shared_as(own: State, weight: Tensor, kept: RunningMean) -> State:
    """A mean of which this rank has some rows as the part of a whole that it is, for torch.distributed.checkpoint."""
    return {name: like_rows_of(one, weight) if name in kept.by_rows else one for name, one in own.items()}
