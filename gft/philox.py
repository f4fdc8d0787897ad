"""Random numbers that are a function of (seed, step, layer, element): Philox-4x32-10 (Salmon et al., SC 2011).

A counter-based generator has no state to save, move or share: the number for element 17 of layer 3 at step 900 is the
same on the CPU, on a GPU and in Triton, whatever was drawn before it, and torch's own generators are never touched.

    counter = (element // 8, call, step, stream)      key = the two halves of seed
    four 32-bit words -> eight 16-bit numbers for elements 8·c .. 8·c+7, low half of a word first

16 bits are enough to choose between two neighbouring levels: chances are resolved to 1/65536.

x and grad_output, of which there is far more, get by with less (`noise8`): seven rounds, the fewest that pass all tests of
the paper, and 8 bits each. bfloat16 has no more, and what they are rounded to is 1/8 of their rms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gft.errors import UsageError

ROUNDS = 10  # for the moves of weights
VOTE_ROUNDS = 7  # for x and grad_output
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
LOW = 0xFFFFFFFF
PER_COUNTER = 8

# On the CPU some hundred elementwise passes are only cheap while their operands stay in the cache.
CPU_COUNTERS_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class NoiseKey:
    """Which random numbers: with the element's index, all that a number depends on.

    step: a number or, on a GPU, one in its memory (int64), which a captured CUDA graph can count up.
    stream: which layer, and what for (votes.py). call: which use of the layer in this step, and on which rank.
    first: which element of the whole the first one is, where ranks share out the rows of a weight (sharding.py).
    """

    seed: int
    step: int | Tensor
    stream: int
    call: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        known = 0 if isinstance(self.step, Tensor) else self.step  # to look would make the host wait
        if not (0 <= self.seed < 2**64 and 0 <= known < 2**32 and 0 <= self.stream < 2**32 and 0 <= self.call < 2**32):
            raise UsageError(f"seed={self.seed}, step={self.step}, stream={self.stream}, call={self.call}: seed takes 64 "
                             "bits, the rest 32")


def philox(counter: tuple[Tensor, Tensor | int, Tensor, Tensor | int],
           key: tuple[int, int],
           rounds: int = ROUNDS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32 on int64 tensors that hold 32-bit words.

    A 32 x 32 -> 64-bit product wraps round in int64, but its bits are right: the high word is (p >> 32) & LOW.
    """
    c0, c2 = counter[0], counter[2]
    c1, c3 = (word if isinstance(word, Tensor) else torch.full_like(c0, word) for word in (counter[1], counter[3]))
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        # In place, and c1 and c3 keep bits above the 32nd for now: this loop is what a step on the CPU waits for.
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(LOW)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(LOW)
        c1, c3 = p1, p0
        k0, k1 = (k0 + WEYL_0) & LOW, (k1 + WEYL_1) & LOW
    return c0, c1 & LOW, c2, c3 & LOW


def _noise_of_counters(first: int, count: int, key: NoiseKey, device: torch.device, rounds: int) -> Tensor:
    c0 = torch.arange(first, first + count, dtype=torch.int64, device=device)
    # c2 takes part in a product, so it must be a tensor: Python integers would not wrap.
    c2 = torch.zeros_like(c0) + key.step
    w0, w1, w2, w3 = philox((c0, key.call, c2, key.stream), (key.seed & LOW, key.seed >> 32), rounds)
    # Two words side by side in an int64 are four 16-bit numbers in the order we want them (on a little-endian machine).
    pairs = torch.stack((w0.bitwise_or_(w1 << 32), w2.bitwise_or_(w3 << 32)), dim=1)
    return pairs.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF).view(-1)


def noise16(count: int,  # how many numbers
            key: NoiseKey,
            offset: int = 0,  # element the first number belongs to
            device: torch.device | str = "cpu",
            rounds: int = ROUNDS) -> Tensor:  # (count,) int32 in 0..65535
    """The 16-bit numbers of elements offset .. offset+count-1."""
    device, offset = torch.device(device), key.first + offset
    first = offset // PER_COUNTER
    last = -(-(offset + count) // PER_COUNTER)
    if last > 2**32:
        raise UsageError(f"{offset + count} elements in one tensor: random numbers are counted up to 2^35; split the tensor")
    at_once = CPU_COUNTERS_AT_ONCE if device.type == "cpu" else last - first or 1
    pieces = [_noise_of_counters(start, min(at_once, last - start), key, device, rounds)
              for start in range(first, last, at_once)]
    if not pieces:
        return torch.empty(0, dtype=torch.int32, device=device)
    numbers = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    lead = offset - first * PER_COUNTER
    return numbers[lead : lead + count]


def noise8(rows: int, columns: int, key: NoiseKey, device: torch.device | str = "cpu") -> Tensor:  # int32 in 0..255
    """Noise for x or grad_output, (tokens, features): two tokens share a 16-bit number, the first has its low byte."""
    pairs = noise16(-(-rows // 2) * columns, key, device=device, rounds=VOTE_ROUNDS).view(-1, 1, columns)
    return torch.cat((pairs & 0xFF, pairs >> 8), 1).view(-1, columns)[:rows]
