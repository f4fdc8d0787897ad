"""A training step as one CUDA graph.

A small network on a fast GPU waits for the host: nanoGPT's step launches some thousand kernels, and Python takes longer to
name them than the GPU to run them. A CUDA graph records them once and replays them in one call. Everything that changes
from step to step must then lie in the GPU's memory: the batch, the rates, the count of steps that seeds the random
numbers (GFT._advance) and all running values.

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        return loss

    step = gft.Captured(step, optimizer)      # on a CPU it stays as it is
    for x, y in batches:
        loss = step(x, y); scheduler.step()
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gft.errors import UsageError
from gft.hybrid import Hybrid
from gft.optim import GFT, GPU_STEPS_BETWEEN_REPORTS

Step = Callable[..., Tensor]  # a batch -> loss; takes one optimizer step
WARM_UP = 3  # steps of a kind of batch taken one by one first: they choose algorithms and make the state later ones renew
MOST_RECORDINGS = 8  # for changed settings; then steps are taken without a graph


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that a Hybrid joins; any other is its own only part."""
    return optimizer.optimizers if isinstance(optimizer, Hybrid) else (optimizer,)


def on_the_host(optimizer: Optimizer) -> Optimizer | None:
    """The part of an optimizer that keeps some of its state on the host, where a graph cannot reach it, if there is one. GFT
    keeps none there, torch's optimizers none if they were made with capturable=True."""
    return next((part for part in parts_of(optimizer) if not isinstance(part, GFT)
                 and not all(group.get("capturable", False) for group in part.param_groups)), None)


def waits_for_others(optimizer: Optimizer) -> bool:
    """Does a step take in the votes of other processes? Its host must then look at their counts, which no graph can."""
    return any(isinstance(part, GFT) and part.ranks.world > 1 for part in parts_of(optimizer))


def kind_of(args: Sequence[Any], named: Mapping[str, Any]) -> Hashable:
    """What a graph is recorded for: batches whose tensors have these shapes, types and devices, of which the same ones are
    one tensor (as the labels of a language model may be its inputs), and whose other parts are equal."""
    parts, first = [*args, *(named[name] for name in sorted(named))], {}
    kinds: list[Hashable] = [len(args), *sorted(named)]
    for number, part in enumerate(parts):
        if isinstance(part, Tensor):
            kinds.append((part.shape, part.dtype, part.device, first.setdefault(id(part), number)))
        elif part is None or isinstance(part, (bool, int, float, str)):
            kinds.append((type(part), part))
        else:
            raise UsageError(f"a captured step is called with tensors, numbers, strings or None, not with a "
                             f"{type(part).__name__}; pass what is in it by itself, as in step(**batch)")
    return tuple(kinds)


def copies(args: Sequence[Any], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch in memory of its own; one tensor where it was one. torch.compile looks at that, and at how tensors lie."""
    own: dict[int, Tensor] = {}

    def of(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        if id(part) not in own:
            own[id(part)] = part.clone()
        return own[id(part)]

    return tuple(map(of, args)), {name: of(part) for name, part in named.items()}


class Captured:
    """`step` recorded when a kind of batch has come three times, then replayed.

    step: takes the tensors of a batch, by place or by name, and one step of `optimizer`; returns the loss. What it returns
        later lies in the same memory each time: read it, or clone it, before the next call. No Python in it runs again, so
        it should depend on nothing but the batch and the optimizer's settings. Numbers, strings and None in a batch are
        built in: with others it is a batch of another kind.
    optimizer: schedulers go on setting "lr" in its `param_groups`; each call copies it to the GPU. When another setting
        changes, or a state_dict is loaded, the step is recorded anew.

    A batch of another shape or type, as the last of an epoch may be, is taken without the graph; on a CPU all are.
    """

    def __init__(self, step: Step, optimizer: Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._device = weights[0].device if weights and all(weight.is_cuda for weight in weights) else None
        if self._device is not None and (part := on_the_host(optimizer)) is not None:
            raise UsageError(f"{type(part).__name__} counts its steps on the host, where a CUDA graph cannot reach them; "
                             "make it with capturable=True, or take the steps without gft.Captured")
        if self._device is not None and waits_for_others(optimizer):
            raise UsageError("a step of several processes cannot be replayed, since the host looks at what each counted; "
                             "take the steps without gft.Captured")
        self._step, self._optimizer = step, optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kind: Hashable = None  # of the batches that are replayed
        self._seen: dict[Hashable, int] = {}
        self._recordings = self._replays = 0
        # A graph is recorded, and its kernels are made ready, off the default stream.
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)
        # A loaded state_dict puts new tensors in the place of those that a graph would still write to. Weakly, lest the
        # optimizer keep a graph, and its memory, for as long as it lives.
        forget = weakref.WeakMethod(self._forget)
        for part in parts_of(optimizer):
            hook = part.register_load_state_dict_post_hook(lambda _: (alive := forget()) and alive())
            weakref.finalize(self, hook.remove)

    def _forget(self) -> None:
        """Record anew when the next batches have come."""
        self._graph, self._kind = None, None
        self._seen.clear()

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        if self._stream is None:
            return self._step(*args, **named)
        kind = kind_of(args, named)
        if self._graph is not None and self._settings() != self._recorded_settings:
            # One step by itself first: what a new rule does to the weights is done once, not in each replay.
            self._graph, self._seen[self._kind] = None, WARM_UP - 1
        if self._graph is None and self._kind in (None, kind) and self._seen.get(kind, 0) >= WARM_UP:
            self._record(args, named, kind)
        if self._graph is None or kind != self._kind:
            return self._warm_up(args, named, kind)
        return self._replay(args, named)

    def _warm_up(self, args: Sequence[Any], named: Mapping[str, Any], kind: Hashable) -> Tensor:
        self._seen[kind] = self._seen.get(kind, 0) + 1
        assert self._stream is not None
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            # All as it will be in the graph, on copies and by rates on the device: what is compiled and built, is so here.
            with torch.cuda.stream(self._stream), self._rates_on_device():
                own, own_named = copies(args, named)
                loss = self._step(*own, **own_named)
            torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    @contextmanager
    def _rates_on_device(self) -> Iterator[list[Tensor]]:
        """For one step each group's "lr" is a number in the GPU's memory."""
        groups = self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        rates = [torch.tensor(float(number), device=self._device) for number in numbers]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        try:
            yield rates
        finally:
            for group, rate, number in zip(groups, rates, numbers, strict=True):
                if group["lr"] is rate:  # else the step itself has set another
                    group["lr"] = number

    def _replay(self, args: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
        assert self._graph is not None
        with torch.cuda.device(self._device):
            own, own_named = self._batch
            pairs = [*zip(own, args, strict=True), *((part, named[name]) for name, part in own_named.items())]
            for part, new in {id(part): (part, new) for part, new in pairs}.values():  # each once
                if isinstance(part, Tensor):
                    part.copy_(new)
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                rate.fill_(group["lr"])
            self._graph.replay()
        self._replays += 1
        if self._replays % GPU_STEPS_BETWEEN_REPORTS == 0:  # no Python inside the graph could
            for part in parts_of(self._optimizer):
                if isinstance(part, GFT):
                    part.report_not_finite()
        return self._loss

    def _settings(self) -> list[Any]:
        """What is built into a graph: all settings but lr, and the scales of the layers, which products take as numbers."""
        groups = [{key: value for key, value in group.items() if key not in ("params", "lr", "step", "initial_lr")}
                  for group in self._optimizer.param_groups]
        layers = [layer for part in parts_of(self._optimizer) if isinstance(part, GFT) for layer in part.layers()]
        return [groups, [(layer.scale.data_ptr(), layer.scale._version) for layer in layers]]

    def _record(self, args: Sequence[Any], named: Mapping[str, Any], kind: Hashable) -> None:
        if self._recordings >= MOST_RECORDINGS:
            if self._recordings == MOST_RECORDINGS:
                self._recordings += 1
                warnings.warn("settings of the optimizer other than lr change so often that recording the step anew costs "
                              "more than it saves; it is taken without a CUDA graph from now on", stacklevel=3)
            return
        graph = torch.cuda.CUDAGraph()
        self._batch = own, own_named = copies(args, named)
        self._recorded_settings = self._settings()
        # What is left of an earlier graph frees its memory when it is collected, which no recording survives.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            # What other threads ask of the GPU meanwhile, as one that pins memory for a DataLoader does, is none of its
            # business ("thread_local").
            with (torch.cuda.device(self._device), self._rates_on_device() as self._rates,
                  torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")):
                self._loss = self._step(*own, **own_named).detach()
            self._graph, self._kind = graph, kind
            self._recordings += 1
        finally:
            if collects:
                gc.enable()
