"""The step's own kernels: the update of a matrix, and the product that makes votes."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import gft
from gft.lab.bench.rows import REPEATS, Row, captured, repeat, seconds
from gft.philox import NoiseKey
from gft.rules import WeightStep
from gft.votes import count_votes


def update(device: torch.device, small: bool = False, sizes: Sequence[int] = (4096, 16384)) -> Iterator[Row]:
    """A matrix's whole update, against a copy of as many bytes: its votes are read for their squares and for the move, its
    levels read and written."""
    for size in (40,) if small else sizes:
        for bits, memory in ((2, False), (4, False), (4, True)):
            layer = gft.QuantLinear(size, size, bits, memory=memory, device=device)
            votes = torch.randint(-99, 100, (size, size), dtype=torch.int32, device=device)
            step = torch.zeros((), dtype=torch.int64, device=device) if device.type == "cuda" else 0
            weight = WeightStep(layer.qweight.detach(), votes, 127**2, layer.storage, layer.scale_number(),
                                NoiseKey(1, step, 0))
            moved = 2 * votes.numel() * 4 + 2 * layer.qweight.numel()
            source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)

            def ours(weight: WeightStep = weight) -> None:
                gft.Rounding().step([weight], 0.1)

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
        x, grad = (torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device).t() for _ in range(2))
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        both = [partial(repeat, captured(one, device)) for one in (partial(count_votes, x, grad, 127),
                                                                             partial(torch.matmul, a.t(), b))]
        mine, peer = (took / REPEATS for took in seconds(*both, device=device))
        operations = 2 * size**3 / 1e12
        yield Row("votes", f"{size}³", operations / mine, operations / peer, "Top/s", f"{str(dtype)[6:]} product",
                  peer / mine, "at least 1.5", peer >= 1.5 * mine)
