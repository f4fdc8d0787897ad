"""What topk chooses by: the k-th largest |vote|, by histograms of its bits from the highest down."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gft.ops import checks
from gft.ops.triton.votes import PROGRAMS

DIGIT = 8  # bits a histogram tells apart
AT_ONCE = 4096


@triton.jit(do_not_specialize=["count", "shift"])
def _histogram_kernel(votes, bins, state, count, shift, DIGIT: tl.constexpr, AT_ONCE: tl.constexpr):
    """How many |votes| have each next digit, of those whose digits so far are the ones found."""
    BINS: tl.constexpr = 1 << DIGIT
    found = tl.load(state)
    total = tl.zeros((2 * BINS,), tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * AT_ONCE, count, tl.num_programs(0).to(tl.int64) * AT_ONCE):
        element = start + tl.arange(0, AT_ONCE)
        size = tl.abs(tl.load(votes + element, mask=element < count, other=0).to(tl.int64))
        digits = size >> shift
        alike = (element < count) & ((digits >> DIGIT) == (found >> shift >> DIGIT))
        # What is not alike goes to the upper half, which nobody reads.
        total += tl.histogram(tl.where(alike, digits & (BINS - 1), BINS).to(tl.int32), 2 * BINS)
    place = tl.arange(0, 2 * BINS)
    tl.atomic_add(bins + place, total.to(tl.int64), mask=place < BINS, sem="relaxed")


@triton.jit(do_not_specialize=["shift", "most"])
def _next_digit_kernel(bins, state, shift, most, DIGIT: tl.constexpr):
    """state: (found, how many of those alike it are still to be counted)."""
    BINS: tl.constexpr = 1 << DIGIT
    place = tl.arange(0, BINS)
    reached = tl.cumsum(tl.load(bins + place), 0, reverse=True)  # by this digit or a larger one
    found, missing = tl.load(state), tl.load(state + 1)
    digit = tl.minimum(tl.maximum(tl.sum((reached >= missing).to(tl.int64)) - 1, 0), most)  # all reach a count of 0
    larger = tl.sum(tl.where(place == digit + 1, reached, 0))
    tl.store(state, found + (digit << shift))
    tl.store(state + 1, missing - larger)


def kth_largest(votes: Tensor, bound: int, count: int | Tensor) -> Tensor:
    """Find the k-th largest |vote| (topk.kth_largest). The GPU is not waited for."""
    if not checks.are_votes(votes):
        return NotImplemented
    votes, bits = votes.contiguous(), max(bound.bit_length(), 1)
    state = torch.zeros(2, dtype=torch.int64, device=votes.device)
    state[1] = count
    with torch.cuda.device_of(votes):
        for shift in reversed(range(0, bits, DIGIT)):
            bins = torch.zeros(1 << DIGIT, dtype=torch.int64, device=votes.device)
            _histogram_kernel[(min(PROGRAMS, triton.cdiv(votes.numel(), AT_ONCE)),)](
                votes, bins, state, votes.numel(), shift, DIGIT=DIGIT, AT_ONCE=AT_ONCE)
            most = min(bound >> shift, (1 << DIGIT) - 1).bit_length()
            _next_digit_kernel[(1,)](bins, state, shift, (1 << most) - 1, DIGIT=DIGIT, num_warps=1)
    return state[0]
