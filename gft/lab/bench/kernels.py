"""The step's own kernels: the update of a matrix, and the product that makes votes."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gft
from gft.lab.bench.rows import REPEATS, Row, captured, repeat, seconds
from gft.optimizer import move
from gft.vote import tally


def update(device: torch.device, small: bool = False, sizes: Sequence[int] = (4096, 16384)) -> Iterator[Row]:
    """A matrix's whole update, against a copy of as many bytes: its votes are read for their squares and for the move, its
    levels read and written."""
    for size in (40,) if small else sizes:
        for bits, memory in ((2, False), (4, False), (4, True)):
            layer = gft.QuantLinear(size, size, bits, memory=memory, device=device)
            gft.GFT(gft.quantized(layer), seed=1)
            ballot: Any = layer.ballot
            ballot.votes = torch.randint(-99, 100, (size, size), dtype=torch.int32, device=device)
            ballot.tokens = 1
            if device.type == "cuda":
                ballot.step = torch.zeros((), dtype=torch.int64, device=device)  # as it is after the first step
            moved = 2 * ballot.votes.numel() * 4 + 2 * layer.weight.numel()
            source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            weight = layer.weight.detach()
            weight.grid, weight.read_scale = layer.grid, layer.scale_number  # type: ignore[attr-defined]

            def ours(weight: Tensor = weight, ballot: Any = ballot) -> None:
                move(weight, ballot, 0, lr=0.1, rule="rounding", p_min=0.0, inertia=0.9, quorum=1.6, sizes="step")

            def peer(source: Tensor = source, target: Tensor = target) -> None:
                target.copy_(source)

            both = [partial(repeat, captured(one, device)) for one in (ours, peer)]
            mine, copy = (REPEATS * moved / took / 1e9 for took in seconds(*both, device=device))
            form = "with memory" if memory else "packed"
            yield Row("update", f"{size}×{size}, {bits} bit, {form}", mine, copy, "GB/s", "a copy", mine / copy,
                      "at least 0.8", mine >= 0.8 * copy)


def votes(device: torch.device, small: bool = False, sizes: Sequence[int] = (4096,)) -> Iterator[Row]:
    """The exact int8 product of votes against the float product that a weight gradient would be (bf16 on a GPU)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for size in (24,) if small else sizes:
        # As the kernel leaves them: token by token side by side.
        x, delta = (torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device).t() for _ in range(2))
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        both = [partial(repeat, captured(one, device)) for one in (partial(tally, x, delta, 127),
                                                                             partial(torch.matmul, a.t(), b))]
        mine, peer = (took / REPEATS for took in seconds(*both, device=device))
        operations = 2 * size**3 / 1e12
        yield Row("votes", f"{size}³", operations / mine, operations / peer, "Top/s", f"{str(dtype)[6:]} product",
                  peer / mine, "at least 1.5", peer >= 1.5 * mine)
