"""How large a network one card can train: a GPT of 100e9 packed 2-bit weights, by real steps on a real text.

    width 16384, 32 blocks of 12 · width² weights: 103e9 weights, 0.25 B each, 25.8 GB

No float copy of the network ever exists: it is laid out on the meta device, and each matrix is drawn some rows at a time on
the device where it stays. Each block's forward pass runs again in backward (activation checkpointing), and each layer moves
inside backward, so that one layer's votes and one layer's float levels are all the scratch there is.
"""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint

import gft
from gft.initialize import scale_for
from gft.lab import data as datasets
from gft.lab.bench.rows import Row, allocated, forget_peak, peak, say, seconds, stored, wait
from gft.lab.models import GPT
from gft.layers import quantized_layers
from gft.optim import LR
from gft.votes import count_votes

DRAWN_AT_ONCE = 1 << 26  # levels drawn at once: 256 MB of floats
HEAD = 128  # features of an attention head
WARM_UP = 5  # steps in which the rates rise: votes of an untrained network agree more than later ones
REFERENCE_WIDTH = 128  # at which the head's rate is the other dense parts'
SECONDS_IN_ALL = 150.0
GB = 1e9


@dataclass(frozen=True)
class Size:
    """A network, what it is fed, for how long, and at which rates (docs/lab-notes/2026-11-19.md)."""

    width: int
    depth: int
    sequences: int = 4
    context: int = 256
    steps: int = 20
    bits: int = 2
    lr: float = LR  # gft.GFT's default
    dense_lr: float = 5e-5

    @property
    def parameters(self) -> int:
        """On the grid."""
        return 12 * self.width**2 * self.depth

    @property
    def largest_matrix(self) -> int:
        return 4 * self.width**2

    @property
    def tokens(self) -> int:
        """A step."""
        return self.sequences * self.context


SMALL = Size(width=64, depth=2, context=32, dense_lr=3e-4)


def size_for(billions: float, width: int = 16384, **rest: Any) -> Size:
    """The least depth at which the blocks hold so many weights."""
    return Size(width, math.ceil(billions * 1e9 / (12 * width**2)), **rest)


# ---------------------------------------------------------------------------------------------------- building


class Again(nn.Module):
    """A block that keeps nothing but its input and runs forward again in backward. Votes are cast in backward alone, so they
    are cast once."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        # Nothing in it draws from torch's generator, so there is no state of it to keep.
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]


@torch.no_grad()
def draw_(layer: gft.QuantLinear, gain: float) -> None:
    """Levels of a Gaussian of deviation gain / sqrt(inputs), as `gft.quantize_` would take them from one."""
    std = gain / math.sqrt(layer.in_features)
    scale = float(scale_for(torch.tensor(std), layer.in_features, layer.bits))
    at_once = max(1, DRAWN_AT_ONCE // layer.in_features)
    for start in range(0, layer.out_features, at_once):
        rows = layer.qweight[start : start + at_once]
        drawn = torch.randn(len(rows), layer.in_features, device=rows.device)
        rows.copy_(layer.storage.store_nearest(drawn * (std / scale)))
    layer.scale.fill_(scale)


def build(size: Size, vocabulary: int, device: torch.device) -> GPT:
    """A GPT whose blocks are packed integers, drawn where they stay."""
    with torch.device("meta"):
        model = GPT(vocabulary, size.context, size.width, size.depth, max(1, size.width // HEAD))
    for name, linear in [(name, module) for name, module in model.blocks.named_modules() if isinstance(module, nn.Linear)]:
        layer = skip_init(gft.QuantLinear, linear.in_features, linear.out_features, size.bits, memory=False, device=device)
        assert isinstance(layer, gft.QuantLinear)
        # What is added to the residual stream starts smaller, the more layers add to it.
        draw_(layer, (2 * size.depth) ** -0.5 if name.endswith((".out", ".down")) else 1.0)
        parent, _, child = name.rpartition(".")
        setattr(model.blocks.get_submodule(parent), child, layer)
    for module in model.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()  # type: ignore[operator]
            if not isinstance(module, nn.LayerNorm):
                # The head of any width starts with logits a quarter apart.
                nn.init.normal_(module.weight, std=0.25 / math.sqrt(size.width) if module is model.head else 0.02)  # type: ignore[arg-type]
    model.blocks = nn.ModuleList(Again(block) for block in model.blocks)
    return model


def optimizers(model: GPT, size: Size, seed: int = 0) -> gft.Hybrid:
    """GFT inside backward for the integers, AdamW for the rest. A step of the head adds up over the width, so its rate falls
    with it; GFT's own rate sees to that by itself."""
    head = model.head.weight
    others = [parameter for parameter in gft.dense(model) if parameter is not head]
    groups = [{"params": others}, {"params": [head], "lr": size.dense_lr * REFERENCE_WIDTH / size.width}]
    return gft.Hybrid(gft.GFT(gft.quantized(model), lr=size.lr, seed=seed, in_backward=True),
                      torch.optim.AdamW(groups, lr=size.dense_lr, fused=True))


# ---------------------------------------------------------------------------------------------------- training


@dataclass
class Trained:
    """What some training steps came to."""

    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    activations: int = 0  # bytes held between forward and backward, the most of any step
    peak: int = 0  # bytes in all


def train(model: GPT, optimizer: gft.Hybrid, size: Size, device: torch.device, seed: int = 0) -> Trained:
    """Some steps on the verses, printed as they go."""
    text = datasets.load("verses", size.context).to(device)
    trained, rates = Trained(), [group["lr"] for group in optimizer.param_groups]
    for number, (x, y) in enumerate(islice(text.batches(size.sequences, seed), size.steps)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (number + 1) / WARM_UP)
        wait(device)
        start, before = time.perf_counter(), allocated(device)
        with torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext():
            logits = model(x)
        loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten())
        trained.activations = max(trained.activations, allocated(device) - before)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        trained.losses.append(float(loss.detach()))
        wait(device)
        trained.times.append(time.perf_counter() - start)
        trained.peak = peak(device)
        say(f"  step {len(trained.losses)} of {size.steps}: loss {trained.losses[-1]:.3f}, {trained.times[-1]:.2f} s"
             + (f", peak {trained.peak / GB:.1f} GB" if trained.peak else ""))
    return trained


# What a step moves of one weight: its packed level made float for forward, for forward again and for grad_input; its votes
# written, and read for their squares and for the move; its level read and written.
BYTES_MOVED = 3 * (0.25 + 2) + 3 * 4 + 2 * 0.25


def least_seconds(size: Size, device: torch.device) -> float:
    """The arithmetic of one step, at the rates this device shows on its own: three float products and one of int8 for each
    weight and token, and what is moved of each weight."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    x = torch.randn(size.tokens, size.width, dtype=dtype, device=device)
    matrix = torch.randn(size.width, 4 * size.width, dtype=dtype, device=device)
    small_x = torch.randint(-127, 128, (size.width, size.tokens), dtype=torch.int8, device=device).t()
    small_grad = torch.randint(-127, 128, (4 * size.width, size.tokens), dtype=torch.int8, device=device).t()
    copied = torch.empty_like(matrix)
    product, counted, copy = seconds(lambda: x @ matrix, lambda: count_votes(small_x, small_grad, 127),
                                     lambda: copied.copy_(matrix), device=device, rounds=3)
    operations = 2 * size.tokens * size.largest_matrix
    bytes_a_second = 2 * matrix.numel() * matrix.element_size() / copy
    say(f"  this device: {operations / product / 1e12:.4g} Tflop/s, int8 {operations / counted / 1e12:.4g} Top/s, "
         f"{bytes_a_second / 1e9:.4g} GB/s")
    return size.parameters * ((3 * product + counted) / size.largest_matrix + BYTES_MOVED / bytes_a_second)


def scale(device: torch.device, small: bool = False, billions: float = 100.0, width: int = 16384, seed: int = 0,
          **changes: Any) -> Iterator[Row]:
    """Train `billions` of packed 2-bit weights: memory, time, and whether the loss falls. `changes`: of the Size."""
    begun = time.perf_counter()
    size = replace(SMALL, **changes) if small else size_for(billions, width, **changes)
    asked = size.parameters if small else billions * 1e9
    say(f"  width {size.width}, {size.depth} blocks, {size.parameters:,} weights of {size.bits} bits, "
         f"{size.tokens} tokens a step")
    least = least_seconds(size, device)
    forget_peak(device)
    others = allocated(device)
    torch.manual_seed(seed)
    model = build(size, datasets.load("verses", size.context).classes, device)  # type: ignore[union-attr]
    optimizer = optimizers(model, size, seed)
    wait(device)
    forget_peak(device)  # what was drawn, too
    say(f"  built in {time.perf_counter() - begun:.1f} s")
    trained = train(model, optimizer, size, device, seed)
    in_all = time.perf_counter() - begun

    parameters = sum(layer.rows * layer.columns for layer in quantized_layers(model).values())
    yield Row("scale", "quantized parameters", parameters / 1e9, asked / 1e9, "e9", "asked for", parameters / asked,
              "at least 1", parameters >= asked)
    last = statistics.fmean(trained.losses[-max(1, size.steps // 4):])
    gft_part = optimizer.optimizers[0]
    assert isinstance(gft_part, gft.GFT)
    moves = gft_part.flips() / parameters
    first = trained.losses[0]
    yield Row("scale", f"loss, last quarter of {size.steps} steps, {moves:.3g} moves a weight", last, first, "nats",
              "the first step", last / first, "at most 0.9", last <= 0.9 * first)
    yield from _memory_rows(model, optimizer, size, trained, others, device)
    taken = statistics.median(trained.times[1:] or trained.times)  # the first step compiles
    yield Row("scale", "time a step", taken, least, "s", "its arithmetic at measured rates", taken / least, "at most 3",
              taken <= 3 * least)
    yield Row("scale", "time in all, building included", in_all, SECONDS_IN_ALL, "s", "allowed", in_all / SECONDS_IN_ALL,
              "at most 1", in_all <= SECONDS_IN_ALL)


def _memory_rows(model: GPT, optimizer: gft.Hybrid, size: Size, trained: Trained, others: int,
                 device: torch.device) -> Iterator[Row]:
    """Weights and dense parts by their storages; the rest as a GPU's allocator counted it."""

    def row(what: str, held: float, peer: float, peer_is: str, bar: float) -> Row:
        return Row("scale", f"memory: {what}", held / GB, peer / GB, "GB", peer_is, held / peer, f"at most {bar:g}",
                   held <= bar * peer)

    dense = gft.dense(model)
    in_training = stored([[parameter, parameter.grad, optimizer.state[parameter]] for parameter in dense])
    weights = stored(gft.quantized(model))
    numbers = sum(parameter.numel() for parameter in dense)
    yield row("packed weights", weights, size.parameters * size.bits / 8, f"{size.bits} bits each", 1.0)
    yield row("dense parts, gradients and AdamW", in_training, 16 * numbers, "16 B each", 1.01)
    if device.type == "cuda":
        held = trained.peak - others
        yield row("activations between forward and backward", trained.activations, size.depth * size.tokens * size.width * 4,
                  "the stream once a block", 1.2)
        yield row("scratch", held - weights - in_training - trained.activations, 6 * size.largest_matrix,
                  "one matrix's bf16 levels and int32 votes", 1.5)
        yield row("peak", held, torch.cuda.get_device_properties(device).total_memory, "the card", 1.0)
