"""A step of the optimizer as a CUDA graph, by itself.

A step launches a few kernels for all weights of a shape, but Python looks at every layer to name them, which takes the host
longer than the GPU. In a training loop whose batches are alike, torch's allocator puts each layer's votes where they lay the
step before. Then the launches are the same ones: they are recorded once and replayed, without a word by the user. Nothing of
forward and backward is in the graph (capture.py records those, too).
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gft.votes import VoteAccumulator

MOST_RECORDINGS = 8  # where votes keep on wandering, steps are taken without a graph
REMEMBERED = 4  # steps: votes may lie in two places by turns


class StepGraph:
    """The recorded launches of one optimizer's step."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}  # by what they have built in
        self._seen: deque[Hashable] = deque(maxlen=REMEMBERED)  # likewise, of the last steps
        self._recordings = 0
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
        graph = self._graphs.get(now)
        if graph is None and now in self._seen and now is not None and self._recordings < MOST_RECORDINGS:
            graph = self._graphs[now] = self._record(step, accumulators)
        elif graph is None:
            self._seen.append(now)
            step()
            return
        graph.replay()
        layers = [one.layer() for one in accumulators]
        torch.autograd.graph.increment_version([layer.qweight for layer in layers if layer is not None])  # as in a step
        for one in accumulators:
            one.discard()

    def _record(self, step: Callable[[], None], accumulators: Sequence[VoteAccumulator]) -> torch.cuda.CUDAGraph:
        votes = [one.votes for one in accumulators]  # whose memory nobody else may get before the replay
        device = votes[0].device  # type: ignore[union-attr]
        graph, self._recordings = torch.cuda.CUDAGraph(), self._recordings + 1
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
        del votes
        return graph


def built_in(accumulators: Sequence[VoteAccumulator], groups: Sequence[Mapping[str, Any]]) -> Hashable:
    """All that a recorded step takes for granted: settings, how votes were cast, and where everything lies. None where a
    step cannot be recorded."""
    device, found = None, []
    for one in accumulators:
        layer, votes, second_moment = one.layer(), one.votes, one.second_moment
        if (layer is None or votes is None or not votes.is_cuda or one.scatter is not None or one.world > 1
                or one.in_backward or not isinstance(one.step, Tensor)):
            return None
        device = votes.device if device is None else device
        if votes.device != device:
            return None
        found.append((votes.data_ptr(), votes.dtype, one.tokens, one.samples, one.backwards, len(one.mean_squares),
                      layer.qweight.data_ptr(), layer.storage, layer.scale_number(), one.vote, one.seed,
                      0 if second_moment is None else second_moment.data_ptr()))
    if not found or torch.cuda.is_current_stream_capturing():
        return None
    for group in groups:
        if isinstance(group["lr"], Tensor) or not group["rule"].replays:
            return None
        found.append((group["rule"], group["vote"], group["seed"], len(group["params"])))
    return tuple(found)
