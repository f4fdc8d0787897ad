"""A training step as one CUDA graph.

A small network on a fast GPU waits for the host: nanoGPT's step launches some thousand kernels, and Python takes longer to
name them than the GPU to run them. A CUDA graph records them once and replays them in one call. Everything that changes
from step to step must then lie in the GPU's memory: the batch, the rates, the count of steps that seeds the random
numbers (optimizer._advance) and all running values.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import gft

Step = Callable[[Tensor, Tensor], Tensor]  # (x, y) -> loss; takes one optimizer step
WARM_UP = 3  # steps taken one by one first: they choose algorithms and make the state that later ones renew


def can_capture(optimizer: gft.Hybrid, device: torch.device) -> bool:
    """GFT and AdamW keep all state on the GPU; other optimizers may not."""
    return device.type == "cuda" and all(isinstance(part, (gft.GFT, torch.optim.AdamW)) for part in optimizer.optimizers)


class Captured:
    """`step` recorded after its first calls, then replayed. A batch of another shape, as the last of an epoch may be, is
    taken without the graph.

    Schedulers go on setting numbers in `optimizer.param_groups`; each call copies them to the GPU.
    """

    _graph: torch.cuda.CUDAGraph | None

    def __init__(self, step: Step, optimizer: gft.Hybrid) -> None:
        self._step, self._optimizer = step, optimizer
        self._calls, self._graph = 0, None
        self._stream = torch.cuda.Stream()  # a graph is recorded, and its kernels made ready, off the default stream

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self._calls += 1
        if self._calls <= WARM_UP:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                loss = self._step(x, y)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if self._graph is None:
            self._record(x, y)
        assert self._graph is not None
        if x.shape != self._x.shape:
            return self._step(x, y)
        self._x.copy_(x)
        self._y.copy_(y)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            rate.fill_(group["lr"])
        self._graph.replay()
        return self._loss

    def _record(self, x: Tensor, y: Tensor) -> None:
        graph, groups = torch.cuda.CUDAGraph(), self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        self._x, self._y = x.clone(), y.clone()
        self._rates = [torch.tensor(float(number), device=x.device) for number in numbers]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._loss = self._step(self._x, self._y).detach()
            self._graph = graph
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
