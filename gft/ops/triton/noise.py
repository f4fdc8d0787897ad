"""philox.noise16 inside a kernel: whole counters at a time where that is possible."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.errors import UsageError
from gft.philox import NoiseKey


@triton.jit
def noise16(element, seed, step, noise_stream, call, ROUNDS: tl.constexpr = 10):
    """philox.noise16 of each element: the half-word (element % 8) of counter element // 8."""
    # Each element draws the whole counter and keeps an eighth of it.
    w0, w1, w2, w3 = _philox(element // 8, seed, step, noise_stream, call, ROUNDS)
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
def _philox(counter, seed, step, noise_stream, call, ROUNDS: tl.constexpr):
    """philox.philox: four words a counter. tl.philox gives the same, but takes its products in two instructions each."""
    c0, zero = counter.to(tl.uint32), counter.to(tl.uint32) * 0
    c1, c2, c3 = zero + call.to(tl.uint32), zero + tl.load(step).to(tl.uint32), zero + noise_stream.to(tl.uint32)
    key = seed.to(tl.uint64)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high_0, low_0 = _high_and_low(c0, 0xD2511F53)
        high_1, low_1 = _high_and_low(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise16_by_eights(counter, seed, step, noise_stream, call, ROUNDS: tl.constexpr = 10):
    """(...) counters -> (..., 2, 2, 2) noise: all eight half-words of each, counted by the last three axes."""
    w0, w1, w2, w3 = _philox(counter, seed, step, noise_stream, call, ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.join(words & 0xFFFF, words >> 16).to(tl.int32)


@triton.jit
def load_eights(first, mask=None):
    """(n,) pointers -> (n, 8): what lies there and the seven behind it, all in the thread that draws their counter. Where
    one load of 16 bytes is not enough, Triton would give a thread four of the eight, and pass the rest round."""
    mask = None if mask is None else mask[:, None]
    if first.dtype.element_ty == tl.bfloat16:  # two in a word, each one instruction away from float32
        pair = tl.load(first.to(tl.pointer_type(tl.uint32), bitcast=True)[:, None] + tl.arange(0, 4)[None, :], mask=mask)
        low, high = (pair << 16).to(tl.float32, bitcast=True), (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
        eight = tl.join(low, high)
    elif first.dtype.element_ty.primitive_bitwidth <= 16:
        eight = tl.load(first[:, None] + tl.arange(0, 8)[None, :], mask=mask)
    else:
        half = first[:, None] + tl.arange(0, 4)[None, :]
        eight = tl.permute(tl.join(tl.load(half, mask=mask), tl.load(half + 4, mask=mask)), (0, 2, 1))
    return tl.reshape(eight, (first.shape[0], 8))


COUNTERS = 128  # of noise, that a program draws

# Never specialised on their values: they change from step to step, and 1 would become a constant without a type. The step
# itself is read on the device, where a captured CUDA graph can count it.
KEY = ["seed", "noise_stream", "call"]  # not "stream": a launch has an option of that name


def width(key: NoiseKey) -> tuple[int, int, int]:
    """Which of seed, stream and call are 64-bit numbers to a kernel: a part of a launch's key."""
    return key.seed >> 31 and 1 + (key.seed >> 63), key.stream >> 31, key.call >> 31


def on_device(number: float | Tensor, like: Tensor) -> Tensor:
    """One number in the memory of a tensor's device, for a kernel to read."""
    if isinstance(number, Tensor) and number.dim() == 0 and number.device == like.device:
        return number
    if isinstance(number, Tensor) and number.numel() != 1:
        raise UsageError(f"a step, lr or cap on the device must be one number but has the shape {tuple(number.shape)}")
    return number.to(like.device) if isinstance(number, Tensor) else torch.tensor(number, device=like.device)


@triton.jit(do_not_specialize=[*KEY, "first"])
def _draw_kernel(numbers, count, first, seed, step, noise_stream, call, COUNTERS: tl.constexpr):
    """Numbers `first · 8` and on."""
    counter = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    noise = noise16_by_eights((first + counter).to(tl.uint32), seed, step, noise_stream, call)
    place = counter[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(numbers + place, tl.reshape(noise, (COUNTERS, 8)), mask=place < count)


def draw_noise(numbers: Tensor, key: NoiseKey) -> Tensor:
    """Fill a tensor with random numbers (noise.draw_noise)."""
    count = numbers.numel()
    fits = 0 < count <= 2**35 - key.first and key.first % 8 == 0
    if not fits or numbers.dtype is not torch.int32 or not numbers.is_contiguous():
        return NotImplemented
    _draw_kernel[(triton.cdiv(count, 8 * COUNTERS),)](numbers, count, key.first // 8, key.seed, on_device(key.step, numbers),
                                                      key.stream, key.call, COUNTERS)
    return numbers
