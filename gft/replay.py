"""A step of the optimizer as a CUDA graph, by itself.

A step launches a few kernels for all weights of a shape, but Python looks at every layer to name them, which takes the host
longer than the GPU. In a training loop whose batches are alike, torch's allocator puts each layer's votes where they lay the
step before. Then the launches are the same ones: they are recorded once and replayed, without a word by the user. Where
something else has used the memory, an evaluation say, votes may come to lie elsewhere, and the step is recorded anew.
Nothing of forward and backward is in the graph (capture.py records those, too).
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gft.votes import VoteAccumulator

REMEMBERED = 4  # steps, and graphs: votes may lie in two places by turns
REPAID = 10  # replays that make up for a recording
MOST_IN_VAIN = 8  # recordings that were not: where votes keep on wandering, steps are taken without a graph


@dataclass
class Recorded:
    graph: torch.cuda.CUDAGraph
    replays: int = 0


class StepGraph:
    """The recorded launches of one optimizer's step."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Recorded] = {}  # by what they have built in, the one that was used last at the end
        self._seen: deque[Hashable] = deque(maxlen=REMEMBERED)  # likewise, of the last steps
        self._in_vain = 0  # recordings that have not paid off yet
        self._stream: torch.cuda.Stream | None = None
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
             groups: Sequence[Mapping[str, Any]]) -> None:
        """Take a step: replay it if all is as it was recorded, record it if all is as it was in one of the last steps."""
        now = built_in(accumulators, groups)
        if now is not None:  # written here and not in a graph, which would write it again and again
            for group in groups:
                self.rate(group, group["params"][0].device)
        recorded = self._graphs.pop(now, None)
        held = [one.votes for one in accumulators]  # recording drops them, and nobody may get their memory yet
        if recorded is None and now in self._seen and now is not None and self._in_vain < MOST_IN_VAIN:
            recorded = Recorded(self._record(step, groups[0]["params"][0].device))
            self._in_vain += 1
        if recorded is None:
            del held
            self._seen.append(now)
            step()
            return
        self._graphs[now] = recorded
        if len(self._graphs) > REMEMBERED:
            del self._graphs[next(iter(self._graphs))]
        recorded.graph.replay()
        del held
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
            # Not by torch.cuda.graph, which empties the allocator's cache: votes would lie elsewhere ever after.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        return graph


def built_in(accumulators: Sequence[VoteAccumulator], groups: Sequence[Mapping[str, Any]]) -> Hashable:
    """All that a recorded step takes for granted: settings, how votes were cast, and where everything lies. None where a
    step cannot be recorded."""
    device, found = None, []
    for one in accumulators:
        layer, votes = one.layer(), one.votes
        if (layer is None or votes is None or not votes.is_cuda or one.scatter is not None or one.world > 1
                or one.in_backward or not isinstance(one.step, Tensor)):
            return None
        device = votes.device if device is None else device
        if votes.device != device:
            return None
        found.append((votes.data_ptr(), votes.dtype, one.tokens, one.samples, one.backwards, len(one.mean_squares),
                      layer.qweight.data_ptr(), layer.storage, layer.scale_number(), one.vote, one.seed,
                      *(0 if kept is None else kept.data_ptr() for kept in (one.x_rms, one.grad_rms, one.second_moment))))
    if not found or torch.cuda.is_current_stream_capturing():
        return None
    for group in groups:
        if isinstance(group["lr"], Tensor) or not group["rule"].replays:
            return None
        found.append((group["rule"], group["vote"], group["seed"], len(group["params"])))
    return tuple(found)
