"""Choose, chance, step: how votes move weights.

Two rules, each a pure function of integers. `values` are stored weights (grid.py): `unit` lies between the values of two
levels and `limit` = I · unit is the edge of the grid. `noise` is one 16-bit random number a weight.

topk (paper, Alg. 1 and 3; k is a fraction)

    K = the k·|W| weights with the largest |beta|
    p = clip((|beta| - min_K) / (max_K - min_K), p_min, 1)
    w <- clip(w - sign(beta), -I, I)      with chance p, inside K

rounding (ours: every weight moves by the stochastic rounding of its share)

    u = clip(beta / sqrt(R · C / M), -4, 4)      R, C, M: means of beta² by row, by column and of all
    w <- clip(stochastic_round(w - lr/2 · heard(u)), -I, I)                          packed

    z <- clip(stochastic_round(z - lr · u), -I, I)         kept to within one level of w   with memory
    w <- round(z)                                          with chance 1 - inertia, else w stays

Without inertia w is always round(z), so memory need not tell them apart and counts z twice as finely.

z is where the votes have carried the weight, w the level that the network computes with. Each step only some of the
levels follow. Along any direction made of many weights w is then an average of past z that forgets by a share of
1 - inertia a step, and that is momentum: v <- inertia · v + (1 - inertia) · u; w <- w - lr · v gives the same w. It costs
no state: what waits is in the memory already. docs/method.md has the algebra and what it is worth.

With memory R, C and M are means over many steps (`share_of_newest`), as Adam's second moment is: taken from one step's votes
alone they follow its noise, and a row that happens to be quiet is made as loud as the others. Without memory they are the
step's own, or if `own_size` those means, scaled as a whole to the step's own M.

Without memory nothing adds votes up over steps, and most of them are noise: heard(u) = sign(u) · max(|u| - q, 0), scaled to
rms 1, hears only what is beyond a quorum q, and the more so the coarser the grid is (`quorum_of`).

Everything derived from votes is derived in integers, or rounded once in float, so that every device gives the same bits.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gft import kernels
from gft.grid import SPACING, values_to_levels

ONE = 65536  # chance 1, and one stored value, in 16-bit fixed point
FOLLOW_ALL = 256  # chance 1 of a level to follow
CLIP = 4.0  # no weight moves by more than 4 times the rms move
MOST_QUORUM = 3.0  # beyond it next to nothing is heard
WITHOUT_MEMORY = 0.5  # of lr: nothing averages out what the rounding adds


# ---------------------------------------------------------------------------------------------------- topk


class TopK(NamedTuple):
    """What `topk` needs to know of the whole layer: the least and the largest |beta| in K. Scalars on the device."""

    least: Tensor
    largest: Tensor


def kth_largest(sizes: Tensor,  # any shape, integers >= 0
                ceiling: int,
                count: int | Tensor) -> Tensor:  # scalar int64
    """The count-th largest of `sizes`, none of which is above `ceiling`: bit by bit, the largest number that at least
    `count` of them reach. A few passes, no sort, no histogram's collisions, and a GPU is not waited for."""
    found = torch.zeros((), dtype=torch.int64, device=sizes.device)
    for bit in reversed(range(ceiling.bit_length())):
        higher = found + (1 << bit)
        found = torch.where((sizes >= higher).sum() >= count, higher, found)
    return found


def topk_bounds(votes: Tensor, k: float | Tensor, ceiling: int | None = None) -> TopK | None:
    """K's least and largest |beta|; None if K is empty (where k is on the device it is not looked at, and no |beta| reaches
    the least of an empty K). K holds at least round(k · |W|) weights: all weights tied at the threshold are in it (they
    move with chance p_min only), since their order in memory is no reason to prefer any. `ceiling`: what no |beta| exceeds,
    if that is known; else it is looked up."""
    count = (k.double() * votes.numel()).round() if isinstance(k, Tensor) else round(k * votes.numel())
    if not isinstance(count, Tensor) and count == 0:
        return None
    sizes = votes.abs()
    largest = sizes.max().to(torch.int64)
    ceiling = int(largest) if ceiling is None else ceiling
    kernel = kernels.twin_of(votes) if votes.is_cuda else None
    least = kth_largest(sizes, ceiling, count) if kernel is None else kernel.kth_largest(votes, ceiling, count)
    return TopK(torch.where(count > 0, least, largest + 1) if isinstance(count, Tensor) else least, largest)


def chances(votes: Tensor,  # some rows of beta
            bounds: TopK,
            p_min: float) -> Tensor:  # int64, in 1/65536
    """DynamicProbability inside K, 0 outside and where beta is 0. Where all of K is equal every chance is 1."""
    sizes = votes.abs().to(torch.int64)
    span = bounds.largest - bounds.least
    p = torch.where(span > 0, (sizes - bounds.least) * ONE // span.clamp_min(1), ONE)
    p = p.clamp(least_chance(p_min), ONE)
    return torch.where((sizes >= bounds.least) & (sizes > 0), p, 0)


def least_chance(p_min: float) -> int:
    """p_min in 1/65536, rounded up: a chance above 0 stays above 0."""
    return math.ceil(p_min * ONE)


def topk(values: Tensor,  # (rows, in) int8
         votes: Tensor,  # (rows, in)
         noise: Tensor,  # (rows, in)
         bounds: TopK,
         p_min: float,
         unit: int,
         limit: int,  # the largest value
         lowest: int | None = None) -> Tensor:  # -limit if not given -> (rows, in) int8
    """Move the chosen weights one level against their votes."""
    moves = torch.where(noise < chances(votes, bounds, p_min), votes.sign(), 0)
    return (values - moves * unit).clamp(-limit if lowest is None else lowest, limit).to(torch.int8)


# ---------------------------------------------------------------------------------------------------- rounding


class Rounding(NamedTuple):
    """What `rounding` needs to know of the whole layer: the move of a weight is votes · row · column, in 1/65536 of a
    stored value, and never more than `cap`."""

    row: Tensor  # (out, 1) float32
    column: Tensor  # (1, in) float32
    cap: float | Tensor  # on a GPU: there
    quiet: float = 0.0  # the share of `cap` that is taken off every move: weaker votes are not heard


class Squares(NamedTuple):
    """Running mean squares of a layer's votes, and the step that is to renew them."""

    running: Tensor | None  # (out + in + 1,) float32: by row, by column, of all; None at first
    step: int | Tensor
    own_size: bool = False  # rows and columns as they run, but the step as a whole by its own votes


NO_SQUARES = Squares(None, 0)
MOST_HALVINGS = 7  # the newest squares count for no less than 1/2^7: some hundred steps are remembered


def share_of_newest(step: int | Tensor) -> float | Tensor:
    """What the squares of step 0, 1, 2, … count for: 1, 1/2, 1/2, 1/4 (four times), … 1/128. Nearly the mean of all steps
    at first. Powers of two, so that no processor rounds the product."""
    if isinstance(step, Tensor):
        reached = sum((step + 1 >= 1 << halvings).long() for halvings in range(1, MOST_HALVINGS + 1))
        return torch.ldexp(torch.ones((), dtype=torch.float64, device=step.device), -reached)  # type: ignore[operator]
    return 2.0 ** -min((step + 1).bit_length() - 1, MOST_HALVINGS)


def square_shift(ceiling: int, rows: int, columns: int) -> int:
    """Bits to take off |beta| <= ceiling, so that the squares of a row or a column add up in int64."""
    return max(0, -(-(2 * ceiling.bit_length() + max(rows, columns).bit_length() - 63) // 2))


def _squares(votes: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Sums of (beta >> shift)² by row and by column, int64. Integer sums do not depend on their order."""
    squares = (votes >> shift).to(torch.int64).square_()
    return squares.sum(1), squares.sum(0)


def _sum_as_double(numbers: Tensor) -> Tensor:
    """The sum of int64 >= 0, which int64 may not hold: in two halves, each exact, and rounded once."""
    high, low = (numbers >> 32).sum(), (numbers & 0xFFFFFFFF).sum()
    return (high + (low >> 32)).double() * 2.0**32 + (low & 0xFFFFFFFF).double()


REFERENCE_INPUTS = 128  # at which, in a layer that passes variance on, lr is the rms move in levels of a 4-bit grid
LARGEST_GROWTH = 4.0  # a layer that starts smaller moves as if it were so many times its size, at most


def levels_a_step(scale: float, bits: int, inputs: int) -> float:
    """The rms move of a weight at lr = 1, in levels of its own grid.

    The same lr is meant to serve layers of any width, bits and start. So a move is measured in weights, not in levels:
    0.35 · lr of what a weight is in a layer that passes variance on, 1/sqrt(inputs), however small the layer's own start
    is. And moves that agree with x add up over the inputs while the weights themselves add up at random, so relative to
    its output a layer moves sqrt(inputs) times faster: divide by that, too, beyond 128 inputs.
    """
    size = min(1 / math.sqrt(inputs), LARGEST_GROWTH * scale / SPACING[bits])
    return SPACING[4] * size / scale * min(1.0, math.sqrt(REFERENCE_INPUTS / inputs))


def quorum_of(quorum: float, bits: int) -> float:
    """How many rms a vote must exceed where there is no memory. A level gone the wrong way costs as much as the grid is
    coarse, so the quorum grows with its spacing: for quorum 1.6 it is 2 rms at 2 bits and 0.6 at 4."""
    return min(quorum * SPACING[bits], MOST_QUORUM)


def rms_heard(quorum: float) -> float:
    """The rms of max(|u| - quorum, 0) for Gaussian u of rms 1."""
    beyond, density = math.erfc(quorum / math.sqrt(2)) / 2, math.exp(-(quorum**2) / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(2 * ((1 + quorum**2) * beyond - quorum * density))


def worth_of(levels: float, resolution: int, quorum: float) -> float:
    """What lr is multiplied by: the rms move at lr = 1 in 1/65536 of a stored value, of what is heard. Both are float32, so
    that a lr on the device gives the same bits."""
    levels = levels / rms_heard(quorum) if quorum else levels
    return torch.tensor(levels * resolution * ONE, dtype=torch.float32).item()


def quiet_of(quorum: float) -> float:
    """The quorum as a share of the largest move."""
    return quorum / CLIP


def rounding_factors(votes: Tensor,  # (out, in)
                     lr: float | Tensor,  # a number, or one on the device
                     resolution: int,  # of a level
                     levels: float = 1.0,  # the rms move of a weight at lr = 1
                     ceiling: int | None = None,  # what no |beta| exceeds; None: it is looked up
                     quorum: float = 0.0,  # in rms
                     before: Squares = NO_SQUARES) -> tuple[Rounding, Tensor]:  # and the squares as renewed
    """1/sqrt of running row and column mean squares, as the two float factors of every move."""
    worth = worth_of(levels, resolution, quorum)
    if ceiling is None:
        ceiling = int(votes.abs().max()) if votes.numel() else 0
    shift = square_shift(ceiling, *votes.shape)
    kernel = kernels.twin_of(votes)
    if kernel is not None and votes.numel() and votes.dtype in (torch.int32, torch.int64):
        row, column, cap, squares = kernel.rounding_factors(votes, lr, worth, shift, clip=CLIP, most_halvings=MOST_HALVINGS,
                                                            **before._asdict())
    else:
        (row, column, cap, _), squares = _factors(votes, lr, worth, shift, before)
    return Rounding(row, column, cap, quiet_of(quorum)), squares


def _factors(votes: Tensor, lr: float | Tensor, worth: float, shift: int,
             before: Squares = NO_SQUARES) -> tuple[Rounding, Tensor]:
    """The definition of `rounding_factors`."""
    gain = torch.as_tensor(lr, dtype=torch.float32) * worth
    gain = gain if gain.is_cuda else gain.item()
    (row, column), (out, features) = _squares(votes, shift), votes.shape
    total = _sum_as_double(row) / max(out * features, 1)
    fresh = torch.cat([row.double() / max(features, 1), column.double() / max(out, 1), total.view(1)]) * 4.0**shift
    own = fresh[-1].float().double().sqrt()
    if before.running is not None:
        old = before.running.double()
        fresh = torch.where(old > 0, old + (fresh - old) * share_of_newest(before.step), fresh)
    squares = fresh.float()
    # Division and square root in float64 are correctly rounded everywhere; rsqrt is not.
    rms = squares.double().sqrt()
    inverse = torch.where(squares > 0, 1.0 / rms, 0.0)
    overall = squares[-1].double() / torch.where(own > 0, own, 1.0) if before.own_size else rms[-1]
    row_factor = (inverse[:out] * overall * gain).float()
    return Rounding(row_factor[:, None], inverse[out:-1].float()[None, :], CLIP * gain), squares


def rounding(values: Tensor,  # (rows, in) int8
             votes: Tensor,  # (rows, in)
             noise: Tensor,  # (rows, in)
             factors: Rounding,
             limit: int,  # the largest value
             memory_bits: int = 0,
             follow: int = FOLLOW_ALL,
             lowest: int | None = None) -> Tensor:  # -limit if not given -> (rows, in) int8
    """Move every weight by the stochastic rounding of its share: floor(move + noise). With memory the level follows with
    a chance of follow/256; where that is certain, values are z itself."""
    share = votes.float() * factors.row * factors.column
    move = share.clamp_(-factors.cap, factors.cap).to(torch.int32)  # type: ignore[call-overload, arg-type]
    if factors.quiet:  # in integers: no add a GPU could fuse with the product before it
        unheard = (torch.as_tensor(factors.cap, dtype=torch.float32) * factors.quiet).to(torch.int32)
        move = move - torch.minimum(torch.maximum(move, -unheard), unheard)
    move = move.add_(noise).bitwise_right_shift_(16)
    if memory_bits == 0 or follow == FOLLOW_ALL:
        return (values - move).clamp_(-limit if lowest is None else lowest, limit).to(torch.int8)
    half = memory_bits - 1  # 2^half counts one level of z
    level = values_to_levels(values, memory_bits).to(torch.int32)
    centre = level << half
    z = values - (level << memory_bits) + centre - move
    z = torch.minimum(torch.maximum(z.clamp_(-limit >> 1, limit >> 1), centre - (1 << half)), centre + (1 << half) - 1)
    # The noise's low byte has next to no say in the rounding, which its high byte decides.
    if isinstance(factors.cap, Tensor):  # a lr on the device was not looked at; at 0 nothing follows
        follow = follow * (factors.cap > 0)  # type: ignore[assignment]
    follows = (noise & (FOLLOW_ALL - 1)) < follow
    # A tie goes to the even level: always up would lift the mean weight, and by chance it would flicker for ever.
    nearest = z + (1 << half >> 1)
    nearest = (nearest - (nearest >> half & 1)) >> half
    new = torch.where(follows, nearest, level)
    return ((new << half) + z).to(torch.int8)


def follow_of(inertia: float) -> int:
    """The chance of a level to follow, in 1/256, and never none."""
    return max(1, round((1 - inertia) * FOLLOW_ALL))
