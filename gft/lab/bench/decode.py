"""Generating: a packed model beside its bf16 twin, token by token, and the product that takes most of its time.

Both models write greedily, with keys and values kept (GPT.cached). On a GPU a token is one CUDA graph, so that what is timed
is the GPU's work, not the host's launches. The cache has one shape and each token attends to all of it, masked, so a token
costs the same wherever in the text it stands: that of a full context.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gft
from gft.lab.bench.rows import REPEATS, Row, captured, repeat, seconds
from gft.lab.models import GPT

BITS = (2, 4)
BATCHES = (1, 16)
TOKENS = 32  # written in one timing
# A matrix that was read a moment ago is still in the GPU's cache, where generating would never find it: matrices of so many
# bytes in all are multiplied by in turn.
BEYOND_CACHE = 256 << 20


def decode(device: torch.device, small: bool = False) -> Iterator[Row]:
    """The product's speed against a copy's and against a bf16 product; tokens a second against the bf16 twin."""
    for shape in ((40, 64), (64, 40)) if small else ((16384, 4096), (4096, 16384)):
        yield from products(device, *shape, in_all=2 if small else BEYOND_CACHE)
    sizes = {"context": 16, "width": 32, "depth": 2, "heads": 2} if small else \
            {"context": 512, "width": 4096, "depth": 8, "heads": 32}
    for bits in BITS:
        model, twin = twins(device, bits, **sizes)
        for batch in BATCHES:
            tokens = min(TOKENS, sizes["context"])
            both = (partial(write, Greedy(one, batch, device), tokens) for one in (model, twin))
            mine, peer = (batch * tokens / took for took in seconds(*both, device=device))
            yield Row("decode", f"GPT {sizes['depth']}×{sizes['width']}, {bits} bit, batch {batch}", mine, peer, "tokens/s",
                      f"its {_name(_dtype(device))} twin", mine / peer, "more than 1", mine > peer)


def products(device: torch.device, rows: int, columns: int, in_all: int = BEYOND_CACHE) -> Iterator[Row]:
    """One packed matrix times one row, and times sixteen."""
    dtype = _dtype(device)
    source = torch.zeros(max(in_all, 1 << 10), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    floats = [torch.randn(rows, columns, dtype=dtype, device=device) for _ in range(_matrices(in_all, rows * columns * 2))]
    for bits in BITS:
        stored = rows * columns * bits // 8
        layers = [gft.QuantLinear(columns, rows, bits, memory=False, device=device).eval()
                  for _ in range(_matrices(in_all, stored))]
        for batch in BATCHES:
            x = torch.randn(batch, columns, dtype=dtype, device=device)
            ours = captured(partial(_through, layers, x), device)
            peer = captured(partial(_times, floats, x), device)
            mine, float_time, copying = seconds(partial(repeat, ours), partial(repeat, peer),
                                                partial(repeat, partial(target.copy_, source)), device=device)
            mine, float_time = mine / REPEATS / len(layers), float_time / REPEATS / len(floats)
            case = f"{rows}×{columns}, {bits} bit, batch {batch}"
            yield Row("decode", f"product {case}", mine * 1e6, float_time * 1e6, "µs", f"{_name(dtype)} product",
                      mine / float_time, "less than 1", mine < float_time)
            if batch == 1:
                speed, limit = stored / mine / 1e9, 2 * source.numel() * REPEATS / copying / 1e9
                yield Row("decode", f"reading {case}", speed, limit, "GB/s", "a copy", speed / limit, "at least 0.7",
                          speed >= 0.7 * limit)


def twins(device: torch.device, bits: int, **sizes: int) -> tuple[GPT, GPT]:
    """A GPT with packed blocks, and a float one with the same values. Built on the device: on the host the float32 start
    of a large one would take longer than all that is measured."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(256, **sizes).eval()
    gft.quantize_(model, bits, lambda module, name: name.startswith("blocks."), memory=False, gain=False)
    twin = gft.dequantize_(copy.deepcopy(model))
    assert isinstance(twin, GPT)
    return model.to(_dtype(device)), twin.to(_dtype(device))


# ---------------------------------------------------------------------------------------------------- what is timed


class Greedy:
    """`step()` writes a token more in each text of a batch."""

    def __init__(self, model: GPT, batch: int, device: torch.device) -> None:
        self.model, self.cache = model, model.cache(batch)
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.step = captured(self._step, device)

    def _step(self) -> None:
        self.tokens.copy_(self.model.cached(self.tokens, self.cache)[:, -1].argmax(-1, keepdim=True))


def write(writer: Greedy, tokens: int) -> None:
    """A text from its beginning."""
    writer.cache.length.zero_()
    for _ in range(tokens):
        writer.step()


@torch.no_grad()
def _through(layers: Sequence[nn.Module], x: Tensor) -> None:
    for layer in layers:
        layer(x)


@torch.no_grad()
def _times(matrices: Sequence[Tensor], x: Tensor) -> None:
    for matrix in matrices:
        F.linear(x, matrix)


def _matrices(in_all: int, size: int) -> int:
    return max(1, -(-in_all // size))


def _dtype(device: torch.device) -> torch.dtype:
    """A CPU is slow in bf16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
