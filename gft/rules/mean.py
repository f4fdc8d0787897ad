"""What the optimizer remembers of the votes of all steps, where a rule asks for it: a running mean of them.

There are two ways to keep one: whole, in a byte a weight (momentum.py), or as its largest directions (lowrank.py). Each
is a frozen dataclass that knows which tensors it keeps of a weight of some shape. They lie in `optimizer.state`, under the
names of `tensors`, and are renewed in place, as a captured CUDA graph needs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gft.errors import UsageError, shortened
from gft.philox import NoiseKey
from gft.saved import is_plain

MEAN, SCALE = "momentum", "momentum_scale"  # the tensors of a mean, by their names in `optimizer.state`
NAMES = (MEAN, SCALE)
State = dict[str, Tensor]
Join = Callable[[Sequence[Tensor]], None]

# What no tensor of a running mean holds: it says that there is none yet (state.py).
ROOM = {torch.float32: -1.0, torch.int8: -128}


class Kind(NamedTuple):
    """What a tensor of a running mean is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class RunningMean:
    """How a running mean of votes is kept. Subclasses override what raises here."""

    exact: ClassVar[bool] = False  # does every device renew it to the same bits?
    by_rows: ClassVar[frozenset[str]] = frozenset()  # tensors with a row for each of the weight's, for ranks to share

    @property
    def setting(self) -> str:
        """What of the rule asks for it, as a user wrote it."""
        raise NotImplementedError

    def tensors(self, rows: int, columns: int) -> dict[str, Kind]:
        """What is kept of a weight, by name."""
        raise NotImplementedError

    def start(self, rows: int, columns: int, device: torch.device) -> State:
        """No votes yet."""
        raise NotImplementedError

    def renew(self, votes: Sequence[Tensor],  # each (out, in), of any integer type
              means: Sequence[State],  # of the same layers, in place
              keys: Sequence[NoiseKey],
              take_largest: Join | None = None) -> list[Tensor]:  # each (out, in) int32, none beyond matrices.BOUND
        """Take votes into the mean of each layer; what moves its weights. take_largest: where these are some rows, of ranks
        that share them out (`Part`)."""
        raise NotImplementedError

    def fits(self, state: Mapping[str, Any], rows: int, columns: int) -> bool:
        """Has this state, which has been looked at, a mean that is kept in this way?"""
        kinds = self.tensors(rows, columns)
        return all(name in state and Kind(tuple(state[name].shape), state[name].dtype) == kind
                   for name, kind in kinds.items())

    def check(self, state: Mapping[str, Any], rows: int, columns: int) -> None:
        """Raise unless what there is of a saved mean can be one."""
        for name, kind in self.tensors(rows, columns).items():
            found = state.get(name)
            if not (isinstance(found, Tensor) and is_plain(found) and Kind(tuple(found.shape), found.dtype) == kind):
                said = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else shortened(found)
                raise UsageError(f"the optimizer's state has a {name} of votes that is {said}, where {self.setting} needs "
                                 f"{kind.dtype} of shape {kind.shape}; load a state_dict that is not damaged")
            if kind.dtype.is_floating_point and not bool(torch.isfinite(found).all()):
                raise UsageError(f"the optimizer's state has a {name} of votes with numbers that are not finite; load a "
                                 "state_dict that is not damaged")
