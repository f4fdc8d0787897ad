"""A step of the optimizer as a CUDA graph, by itself.

A step launches a few kernels for all weights of a shape, but Python looks at every layer to name them, which takes the host
longer than the GPU. From one step to the next nothing changes but where the votes lie, which a table tells (ops/places.py).
So the launches are recorded once and replayed, without a word by the user. Nothing of forward and backward is in the graph
(capture.py records those, too).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gft.ops.places import ALIGNED, Places, told_by
from gft.votes import VoteAccumulator

REMEMBERED = 4  # kinds of steps, and graphs: batches may differ by turns
REPAID = 10  # replays that make up for a recording
MOST_IN_VAIN = 8  # recordings that were not: where every step is another, they are taken without a graph


@dataclass
class Recorded:
    graph: torch.cuda.CUDAGraph
    places: Places
    replays: int = 0


class StepGraph:
    """The recorded launches of one optimizer's step."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Recorded] = {}  # by what they have built in, the one that was used last at the end
        self._seen: dict[Hashable, Places] = {}  # likewise, of the last steps
        self._in_vain = 0  # recordings that have not paid off yet
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # where all graphs have their scratch: none has anything there between replays
        self._rates: dict[int, tuple[float, Tensor]] = {}  # lr of each group, as a number and as the GPU has it

    def rate(self, group: Mapping[str, Any], device: torch.device) -> float | Tensor:
        """A group's lr for a step on this device: on a GPU in its memory, where a graph finds it, written if it changes."""
        lr, last = group["lr"], self._rates.get(id(group))
        if isinstance(lr, Tensor) and lr.is_cuda and device.type == "cuda":
            return lr
        if device.type != "cuda" or not group["rule"].replays:
            return float(lr)
        if last is None or last[1].device != device:
            last = self._rates[id(group)] = float(lr), torch.tensor(float(lr), device=device)
        elif last[0] != lr:
            last = self._rates[id(group)] = float(lr), last[1].fill_(float(lr))
        return last[1]

    def take(self, step: Callable[[], None], accumulators: Sequence[VoteAccumulator],
             groups: Sequence[Mapping[str, Any]],
             means: Sequence[Tensor] = ()) -> None:  # running means of votes, which are renewed in place
        """Take a step: replay it if all is as it was recorded, record it if all is as it was in one of the last steps."""
        now = built_in(accumulators, groups, means)
        if now is None or (self._in_vain >= MOST_IN_VAIN and now not in self._graphs):
            step()
            return
        for group in groups:  # written here and not in a graph, which would write it again and again
            self.rate(group, group["params"][0].device)
        held = [one.votes for one in accumulators if one.votes is not None]
        recorded, places = self._graphs.pop(now, None), self._seen.pop(now, None)
        if recorded is None and places is None:
            places = Places(held)
            del held
            with told_by(places):  # the kernels that read the table are compiled here, which they cannot be in a recording
                step()
            if places.whole:
                _keep(self._seen, now, places)
            return
        places = places if recorded is None else recorded.places
        assert places is not None
        places.write(held)
        if recorded is None:
            with told_by(places):
                recorded = Recorded(self._record(step, groups[0]["params"][0].device), places)
            self._in_vain += 1
        _keep(self._graphs, now, recorded)
        recorded.graph.replay()
        del held  # not before: recording has dropped the votes, and nobody may get their memory yet
        recorded.replays += 1
        if recorded.replays == REPAID:
            self._in_vain -= 1
        layers = [one.layer() for one in accumulators]
        torch.autograd.graph.increment_version([layer.qweight for layer in layers if layer is not None])  # as in a step
        for one in accumulators:
            one.discard()

    def _record(self, step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            if self._stream is None or self._stream.device != device:
                self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream())
            # Not by torch.cuda.graph, which empties the allocator's cache.
            with torch.cuda.stream(self._stream):
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        return graph


def _keep(some: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    some[key] = value
    if len(some) > REMEMBERED:
        del some[next(iter(some))]


def built_in(accumulators: Sequence[VoteAccumulator], groups: Sequence[Mapping[str, Any]],
             means: Sequence[Tensor]) -> Hashable:
    """All that a recorded step takes for granted: settings, how votes were cast, how large they can be, and where everything
    lies but them. None where a step cannot be recorded."""
    device, found = None, []
    for one in accumulators:
        layer, votes = one.layer(), one.votes
        if (layer is None or votes is None or not votes.is_cuda or one.scatter is not None or one.world > 1
                or one.in_backward or not isinstance(one.step, Tensor)):
            return None
        device = votes.device if device is None else device
        if votes.device != device or votes.data_ptr() % ALIGNED or not votes.is_contiguous():
            return None
        found.append((votes.dtype, one.bound.bit_length(), one.backwards, len(one.mean_squares),
                      layer.qweight.data_ptr(), layer.storage, layer.scale_number(), layer.branches, one.vote, one.seed,
                      *(0 if kept is None else kept.data_ptr() for kept in (one.x_rms, one.grad_rms, one.second_moment))))
    if not found or torch.cuda.is_current_stream_capturing():
        return None
    for group in groups:
        if isinstance(group["lr"], Tensor) or not group["rule"].replays:
            return None
        found.append((group["rule"], group["vote"], group["seed"], len(group["params"])))
    return (*found, *(mean.data_ptr() for mean in means))
