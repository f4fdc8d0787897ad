"""Whole training steps: forward, backward and update of the paper's networks, beside AdamW's."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gft
from gft.capture import WARM_UP
from gft.lab.bench.rows import Row, seconds
from gft.lab.models import DNN, GPT, ViT


@dataclass(frozen=True)
class Work:
    """A network and what it is fed."""

    name: str
    build: Callable[[], nn.Module]
    filter_fn: Callable[[nn.Module, str], bool]
    batch: Callable[[torch.device], tuple[Tensor, Tensor]]
    bar: float  # of the time of AdamW in bf16


def _labels(*shape: int, classes: int = 10) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.randint(classes, shape, device=device)


def works(small: bool = False) -> list[Work]:
    """The paper's networks; `small` ones of the same kind for a try."""
    width, shallow = (64, 2) if small else (4096, 5)

    def dnn(batch: int) -> Work:
        return Work(f"DNN {shallow}×{width}, batch {batch}", lambda: DNN(784, 10, width, shallow), lambda module, name: True,
                    lambda device: (torch.randn(batch, 784, device=device), _labels(batch)(device)), 1.0)

    context, wide = (16, 32) if small else (256, 384)
    sequences, images = (2, 2) if small else (128, 256)
    characters = _labels(sequences, context, classes=65)
    return [
        dnn(256), *([] if small else [dnn(8192)]),
        Work("nanoGPT, Hybrid-2", lambda: GPT(65, context, wide, 2 if small else 6, 2 if small else 6),
             lambda module, name: name.startswith("blocks."),
             lambda device: (characters(device), characters(device)), 1.1),
        Work("ViT 28×28, Hybrid-2",
             lambda: ViT((1, 28, 28), 10, 4, 32 if small else 512, 2 if small else 12, 2 if small else 8),
             lambda module, name: name.startswith("blocks."),
             lambda device: (torch.randn(images, 1, 28, 28, device=device), _labels(images)(device)), 1.1),
    ]


def trainer(work: Work, device: torch.device, bits: int | None, precision: str, compiled: bool, *, memory: bool = True,
            in_backward: bool = False) -> Callable[[], object]:
    """A function that takes one training step; bits=None is AdamW on the float network."""
    torch.manual_seed(0)
    with device:  # a wide network takes long to draw on the CPU
        model = work.build()
    parts: list[torch.optim.Optimizer] = []
    if bits is not None:
        gft.quantize_(model, bits, work.filter_fn, memory=memory, bias=False)
        parts.append(gft.GFT(gft.quantized(model), in_backward=in_backward))
    if gft.dense(model):
        parts.append(torch.optim.AdamW(gft.dense(model), fused=True, capturable=device.type == "cuda"))
    optimizer = gft.Hybrid(*parts)
    run = torch.compile(model) if compiled else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext():
            logits = run(x)
        loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        return loss

    batch = work.batch(device)
    captured = gft.Captured(step, optimizer)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # float32 means float32 here, whatever the process asked for
    try:
        for _ in range(WARM_UP + 1 if device.type == "cuda" else 0):  # compiles, and records the graph
            captured(*batch)
    finally:
        torch.set_float32_matmul_precision(before)
    return lambda: captured(*batch)


def step(device: torch.device, small: bool = False, bits: int = 2, compiled: bool | None = None) -> Iterator[Row]:
    """Forward, backward and update. On a GPU in bf16, compiled and replayed as a CUDA graph, all of it for the peers too:
    AdamW in bf16 and in float32 (as torch takes it by default, without TF32). On a CPU in float32 and eager, and the DNN
    alone, since a transformer's step takes minutes there."""
    on_gpu = device.type == "cuda"
    compiled = on_gpu if compiled is None else compiled
    for work in works(small)[: None if on_gpu or small else 1]:
        mine = trainer(work, device, bits, "bf16" if on_gpu else "fp32", compiled)
        peers = [("bf16", work.bar)] if on_gpu else [("fp32", 1.0)]
        if on_gpu and work.name.startswith("DNN"):
            peers.append(("fp32", 0.6))
        steps = [trainer(work, device, None, precision, compiled) for precision, _ in peers]
        ours, *theirs = seconds(mine, *steps, device=device)
        how = (", compiled" if compiled else "") + (", replayed" if on_gpu else "")
        for (precision, bar), peer in zip(peers, theirs, strict=True):
            yield Row("step", f"{work.name}, {bits} bit", ours * 1e3, peer * 1e3, "ms", f"fused AdamW {precision}{how}",
                      ours / peer, f"at most {bar:g}", ours <= bar * peer)
