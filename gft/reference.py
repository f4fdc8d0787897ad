"""The method in the paper's symbols, as slow and plain as it can be written: the oracle of the tests.

Everything here works on nested Python lists and integers, one weight at a time, and shares no code with the fast
versions in storage.py, votes.py, rules/, ops/ and philox.py. W is written (out, in) as torch does; the paper writes
(in, out).
"""

from fractions import Fraction
from math import ceil, floor, sqrt
from typing import Any

Matrix = list[list[int]]
Floats = list[list[float]]


def sign(a: float) -> int:
    """-1, 0 or 1; 0 for what is not a number or not finite, which casts no vote."""
    if a != a or a in (float("inf"), float("-inf")):
        return 0
    return (a > 0) - (a < 0)


def clip(a: Any, low: Any, high: Any) -> Any:
    return max(low, min(high, a))


# ---------------------------------------------------------------------------------------------------- random numbers


def philox(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 10) -> tuple[int, int, int, int]:
    """Philox-4x32, from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def noise16(element: int, *, seed: int, step: int, stream: int, call: int = 0, rounds: int = 10) -> int:
    """The 16-bit number of one element."""
    words = philox((element // 8, call, step, stream), (seed % 2**32, seed // 2**32), rounds)
    word = words[element % 8 // 2]
    return word // 2**16 if element % 2 else word % 2**16


def noise8(token: int, feature: int, features: int, *, seed: int, step: int, stream: int, call: int = 0) -> int:
    """The 8-bit number of one element of x or grad_output: two tokens share a 16-bit one."""
    both = noise16(token // 2 * features + feature, seed=seed, step=step, stream=stream, call=call, rounds=7)
    return both // 2**8 if token % 2 else both % 2**8


# ---------------------------------------------------------------------------------------------------- storage


def pack(levels: list[int], bits: int) -> list[int]:
    """One row of levels -> its bytes."""
    width = 2 if bits == 2 else 4 if bits <= 4 else 8
    per_byte = 8 // width
    largest = 2 ** (bits - 1) - 1
    rows = [levels[start : start + per_byte] for start in range(0, len(levels), per_byte)]
    return [sum((level + largest) << (width * place) for place, level in enumerate(row)) for row in rows]


# ---------------------------------------------------------------------------------------------------- votes


def votes(x: Floats, delta: Floats) -> Matrix:
    """`beta[o][i] = sum over b of sign(delta[b][o] · x[b][i])` (Section 4.2), the text's formula without a mask."""
    return [[sum(sign(d[o]) * sign(one[i]) for one, d in zip(x, delta, strict=True)) for i in range(len(x[0]))]
            for o in range(len(delta[0]))]


def votes_literal(x: Floats, delta: Floats, w: Matrix) -> Matrix:
    """Algorithm 1, line 9: a sample counts only where delta · c < 0, with the contribution c = x · w."""
    beta = [[0] * len(x[0]) for _ in delta[0]]
    for one, d in zip(x, delta, strict=True):
        for o in range(len(d)):
            for i in range(len(one)):
                c = sign(one[i]) * w[o][i]
                if sign(d[o]) * c < 0:
                    beta[o][i] += sign(d[o]) * sign(one[i])
    return beta


def votes_by_sequence(x: list[Floats], delta: list[Floats]) -> Matrix:
    """A sample is a sequence (docs/paper.md): beta = sum over sequences of sign(sum over its tokens of delta · x)."""
    beta = [[0] * len(x[0][0]) for _ in delta[0][0]]
    for one, d in zip(x, delta, strict=True):
        for o in range(len(beta)):
            for i in range(len(beta[0])):
                beta[o][i] += sign(sum(d[t][o] * one[t][i] for t in range(len(one))))
    return beta


def quantize(a: float, rms: float, noise: int, *, largest: int, reach: float) -> int:
    """Stochastic rounding of a onto -largest..largest, where largest stands for reach · rms; kept to 1/2^16 before."""
    if a != a or a in (float("inf"), float("-inf")):
        return 0
    fixed = max(-largest * 2.0**16, min(largest * 2.0**16, a * largest / (reach * rms) * 2**16))
    return stochastic_round(Fraction(int(fixed), 2**16), noise)


def stochastic_round(a: Fraction, noise: int) -> int:
    """floor(a + noise / 2^16): the mean over all noise is a, for every a that is a multiple of 1/2^16."""
    return (a + Fraction(noise, 2**16)).__floor__()


# ---------------------------------------------------------------------------------------------------- 8-bit products


def fp8_numbers() -> list[float]:
    """What float8_e4m3 holds from 0 up to 448: 3 bits behind the point, exponents from -6 to 8, and what lies below."""
    below = [place / 8 * 2.0**-6 for place in range(8)]
    return below + [(1 + place / 8) * 2.0**exponent for exponent in range(-6, 9) for place in range(8)][:-1]


def round_token(x: list[float], compute: str) -> tuple[list[float], float]:
    """The nearest numbers of "int8" or "fp8" where the largest of a token is the largest of these, and what 1 of them is."""
    largest = 127.0 if compute == "int8" else 448.0
    most = max([abs(a) for a in x] + [1e-30])
    if compute == "int8":
        return [float(floor(a / most * largest + 0.5)) for a in x], most / largest
    numbers = fp8_numbers()
    nearest = [min(numbers, key=lambda number: abs(number - abs(a) / most * largest)) for a in x]
    return [number if a > 0 else -number for number, a in zip(nearest, x, strict=True)], most / largest


# ---------------------------------------------------------------------------------------------------- steps


def topk(w: Matrix, beta: Matrix, noise: Matrix, *, k: float, p_min: float, largest: int) -> Matrix:
    """Algorithm 1, lines 15-22, with DynamicProbability (Algorithm 3) on |beta|.

    Weights tied with the last of K are in K too. p is compared in steps of 1/2^16.
    """
    sizes = sorted((abs(b) for row in beta for b in row), reverse=True)
    count = round(k * len(sizes))
    if count == 0:
        return [list(row) for row in w]
    b_max, b_min = sizes[0], sizes[count - 1]
    new = [list(row) for row in w]
    for o, row in enumerate(beta):
        for i, b in enumerate(row):
            if abs(b) < b_min or b == 0:
                continue
            p = 2**16 * (abs(b) - b_min) // (b_max - b_min) if b_max > b_min else 2**16
            p = clip(p, ceil(p_min * 2**16), 2**16)
            if noise[o][i] < p:
                new[o][i] = clip(w[o][i] - sign(b), -largest, largest)
    return new


def mean_squares(beta: Matrix) -> list[float]:
    """Of beta: each row's, each column's, and of all."""
    rows, columns = len(beta), len(beta[0])
    row = [sum(b * b for b in line) / columns for line in beta]
    column = [sum(line[i] ** 2 for line in beta) / rows for i in range(columns)]
    return [*row, *column, sum(row) / rows]


def orthogonalized(beta: Matrix) -> Floats:
    """beta / |beta| + O / |O|, where O is beta with all its singular values near 1 (Muon's five rounds)."""
    x = of_length_one(beta)
    orthogonal = x
    for _ in range(5):
        gram = product(orthogonal, transposed(orthogonal))
        cubed = product(gram, orthogonal)
        fifth = product(gram, cubed)
        orthogonal = [[3.4445 * s - 4.7750 * s3 + 2.0315 * s5 for s, s3, s5 in zip(*lines, strict=True)]
                      for lines in zip(orthogonal, cubed, fifth, strict=True)]
    return [[a + o for a, o in zip(*lines, strict=True)] for lines in zip(x, of_length_one(orthogonal), strict=True)]


def with_momentum(betas: list[Matrix]) -> list[Floats]:
    """U + M / |M| after each step: U is beta with rows and columns of equal size, of length one, and M the mean of all U so
    far, of which the newest counts a tenth. That is momentum of full rank."""
    mean, results = None, []
    for beta in betas:
        rows, squares = len(beta), mean_squares(beta)
        unit = of_length_one([[b / sqrt(squares[o] * squares[rows + i]) if b else 0.0 for i, b in enumerate(line)]
                              for o, line in enumerate(beta)])
        mean = [[0.9 * m + 0.1 * u for m, u in zip(*lines, strict=True)]
                for lines in zip(mean or [[0.0] * len(beta[0])] * rows, unit, strict=True)]
        both = zip(unit, of_length_one(mean), strict=True)
        results.append([[u + m for u, m in zip(*lines, strict=True)] for lines in both])
    return results


def nesterov(betas: list[Matrix], momentum: float) -> list[Floats]:
    """momentum · M + (1 - momentum) · beta after each step, M being the running mean of all betas so far."""
    mean, results = [[0.0] * len(line) for line in betas[0]], []
    for beta in betas:
        mean = _mixed(mean, beta, momentum)
        results.append(_mixed(mean, beta, momentum))
    return results


def _mixed(one: Floats, other: Matrix, share: float) -> Floats:
    return [[share * a + (1 - share) * b for a, b in zip(*lines, strict=True)] for lines in zip(one, other, strict=True)]


def of_length_one(matrix: Matrix | Floats) -> Floats:
    length = sqrt(sum(number * number for line in matrix for number in line)) or 1.0
    return [[number / length for number in line] for line in matrix]


def product(a: Floats, b: Floats) -> Floats:
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in transposed(b)] for row in a]


def transposed(matrix: Floats) -> Floats:
    return [list(column) for column in zip(*matrix, strict=True)]


def running_mean_squares(betas: list[Matrix]) -> list[float]:
    """Those of the steps 0, 1, 2, … mixed: step t counts for 1/2^min(floor(log2(t + 1)), 7). What was 0 so far takes the
    newest in full."""
    mixed = mean_squares(betas[0])
    for t, beta in enumerate(betas[1:], 1):
        share = 1.0
        while share > 1 / 128 and t + 1 >= 2 / share:
            share /= 2
        mixed = [old + (new - old) * share if old else new for old, new in zip(mixed, mean_squares(beta), strict=True)]
    return mixed


def rounding_moves(beta: Matrix, lr: float, squares: list[float] | None = None, rescale_step: bool = False) -> Floats:
    """lr · u in float64, with u = beta / sqrt(R · C / M) clipped to ±4. `squares`: R, C and M; beta's own if not given. With
    `rescale_step` u is also multiplied by sqrt(M / beta's own M), so that steps with large votes move no further."""
    rows = len(beta)
    squares = mean_squares(beta) if squares is None else squares
    row, column, mean = squares[:rows], squares[rows:-1], squares[-1]
    factor = sqrt(mean / mean_squares(beta)[-1]) if rescale_step else 1.0
    u = [[b / sqrt(row[o] * column[i] / mean) if b else 0.0 for i, b in enumerate(line)] for o, line in enumerate(beta)]
    return [[lr * max(-4.0, min(4.0, a * factor)) for a in line] for line in u]


def rounding(values: Matrix, beta: Matrix, noise: Matrix, *, lr: float, bits: int, memory: bool | str,
             follow: int = 256, threshold: float = 0.0) -> Matrix:
    """Stored values after a step: w <- clip(stochastic_round(w - lr · soft_threshold(u)), -I, I).

    With memory and levels that wait (follow below 256), `remembered` says what becomes of a stored value; without waiting
    it is w in 1/2^(memory bits) of a level. With spare bits w is counted in 1/2^(spare bits) of a level and may be anything
    that rounds to one. `lr` here is the move at u = 1 where the threshold is 0; `threshold` is in rms.
    """
    largest, width = 2 ** (bits - 1) - 1, 2 if bits == 2 and memory != "half" else 4 if bits <= 4 else 8
    memory_bits, spare_bits = (8 - bits, 0) if memory is True and bits <= 6 else (0, 0 if memory is True else width - bits)
    waits = memory_bits > 0 and follow < 256
    resolution = 2 ** (memory_bits - 1) if waits else 2 ** (memory_bits + spare_bits)
    moves = [[stochastic_round(Fraction(int(soft_threshold(move, lr * threshold) * resolution * 2**16), 2**16), n)
              for move, n in zip(*lines, strict=True)] for lines in zip(rounding_moves(beta, lr), noise, strict=True)]
    if not waits:
        edge = largest * 2**memory_bits
        lowest, highest = (-edge, edge) if not spare_bits else values_of_levels(largest, spare_bits)
        return [[clip(w - move, lowest, highest) for w, move in zip(*lines, strict=True)]
                for lines in zip(values, moves, strict=True)]
    return [[remembered(value, move, n % 256 < follow, memory_bits, largest)
             for value, move, n in zip(*lines, strict=True)] for lines in zip(values, moves, noise, strict=True)]


def share_of_warmup(step: int, warmup: int) -> float:
    """By which lr is multiplied in step 0, 1, 2, …"""
    return min(1.0, (step + 1) / warmup)


def values_of_levels(largest: int, spare_bits: int) -> tuple[int, int]:
    """The least and the largest w for which floor(w / 2^spare_bits + 1/2) is a level from -largest to largest."""
    some = [w for w in range(-300, 300) if -largest <= (Fraction(w, 2**spare_bits) + Fraction(1, 2)).__floor__() <= largest]
    return some[0], some[-1]


def soft_threshold(move: float, threshold: float) -> float:
    """What of a move exceeds the threshold."""
    return sign(move) * max(abs(move) - threshold, 0.0)


def remembered(value: int, move: int, follows: bool, memory_bits: int, largest: int) -> int:
    """A stored value after a move: read level and z out of it, move z, let the level follow or not, write both back."""
    one = Fraction(2 ** (memory_bits - 1))  # a level, in the units of z
    level = (Fraction(value, 2**memory_bits) + Fraction(1, 2)).__floor__()
    z = level * one + (value - level * 2**memory_bits) - move
    z = clip(clip(z, -largest * one, largest * one), (level - 1) * one, (level + 1) * one - 1)
    if follows:
        level = round(z / one)  # a tie goes to the even one
    return int(level * 2**memory_bits + z - level * one)
