"""A training step as one CUDA graph.

A small network on a fast GPU waits for the host: nanoGPT's step launches some thousand kernels, and Python takes longer to
name them than the GPU to run them. A CUDA graph records them once and replays them in one call. Everything that changes
from step to step must then lie in the GPU's memory: the batch, the rates, the count of steps that seeds the random
numbers (optimizer._advance) and all running values.

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        return loss

    step = gft.Captured(step, optimizer)      # on a CPU it stays as it is
    for x, y in batches:
        loss = step(x, y); scheduler.step()
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from gft.optimizer import GFT, Hybrid

Step = Callable[[Tensor, Tensor], Tensor]  # (x, y) -> loss; takes one optimizer step
WARM_UP = 3  # steps taken one by one first: they choose algorithms and make the state that later ones renew


def _parts(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    return optimizer.optimizers if isinstance(optimizer, Hybrid) else (optimizer,)


def on_the_host(optimizer: Optimizer) -> Optimizer | None:
    """The part of an optimizer that keeps some of its state on the host, where a graph cannot reach it, if there is one. GFT
    keeps none there, torch's optimizers none if they were made with capturable=True."""
    return next((part for part in _parts(optimizer) if not isinstance(part, GFT)
                 and not all(group.get("capturable", False) for group in part.param_groups)), None)


def waits_for_others(optimizer: Optimizer) -> bool:
    """Does a step take in the votes of other processes? Its host must then look at their counts, which no graph can."""
    return any(isinstance(part, GFT) and part.ranks.world > 1 for part in _parts(optimizer))


class Captured:
    """`step` recorded after its first three calls, then replayed.

    step: takes x and y, the tensors of a batch, and one step of `optimizer`; returns the loss. What it returns later lies
        in the same memory each time: read it, or clone it, before the next call. No Python in it runs again, so it should
        depend on nothing but x, y and the optimizer's rates.
    optimizer: schedulers go on setting numbers in its `param_groups`; each call copies them to the GPU.

    A batch of another shape, as the last of an epoch may be, is taken without the graph; on a CPU all are.
    """

    _graph: torch.cuda.CUDAGraph | None

    def __init__(self, step: Step, optimizer: Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._on_gpu = all(weight.is_cuda for weight in weights)
        if self._on_gpu and (part := on_the_host(optimizer)) is not None:
            raise ValueError(f"{type(part).__name__} counts its steps on the host, where a CUDA graph cannot reach them; "
                             "make it with capturable=True, or take the steps without gft.Captured")
        if self._on_gpu and waits_for_others(optimizer):
            raise ValueError("a step of several processes cannot be replayed, since the host looks at what each counted; "
                             "take the steps without gft.Captured")
        self._step, self._optimizer = step, optimizer
        self._calls, self._graph = 0, None
        # A graph is recorded, and its kernels are made ready, off the default stream.
        self._stream = torch.cuda.Stream() if self._on_gpu else None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self._stream is None:
            return self._step(x, y)
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
