"""philox.noise16 inside a kernel: whole counters at a time where that is possible."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def noise16(element, seed, step, stream, call):
    """philox.noise16 of each element: the half-word (element % 8) of counter element // 8."""
    # Each element draws the whole counter and keeps an eighth of it.
    w0, w1, w2, w3 = _philox(element // 8, seed, step, stream, call)
    lane = (element % 8).to(tl.int32)
    place = lane // 2
    word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
    return tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16).to(tl.int32)


@triton.jit
def _high_and_low(word, multiplier: tl.constexpr):
    """The two halves of a 32 × 32 -> 64-bit product, which is one instruction."""
    product = word.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(counter, seed, step, stream, call):
    """philox.philox: four words a counter. tl.philox gives the same, but takes its products in two instructions each."""
    c0, zero = counter.to(tl.uint32), counter.to(tl.uint32) * 0
    c1, c2, c3 = zero + call.to(tl.uint32), zero + tl.load(step).to(tl.uint32), zero + stream.to(tl.uint32)
    key = seed.to(tl.uint64)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high_0, low_0 = _high_and_low(c0, 0xD2511F53)
        high_1, low_1 = _high_and_low(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise16_by_eights(counter, seed, step, stream, call):
    """(rows, n) counters -> (rows, 8n) noise: all eight half-words of each, side by side."""
    w0, w1, w2, w3 = _philox(counter, seed, step, stream, call)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (rows, n, 2, 2), whose last two axes count 0, 1, 2, 3
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (counter.shape[0], counter.shape[1] * 8)).to(tl.int32)


# Never specialised on their values: they change from step to step, and 1 would become a constant without a type. The step
# itself is read on the device, where a captured CUDA graph can count it.
STREAM = ["seed", "stream", "call"]


def on_device(number: float | Tensor, like: Tensor) -> Tensor:
    return number.to(like.device) if isinstance(number, Tensor) else torch.tensor(number, device=like.device)
