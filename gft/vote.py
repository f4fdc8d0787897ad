"""Votes: how activations x and errors delta become small integers, and their exact product (paper, Section 4.1-4.2).

    beta[o, i] = sum_b  q(delta[b, o]) · q(x[b, i])            one integer a weight; w moves against its sign

`q` is the only choice:

    sign     -1, 0, 1: the sign alone. The paper's rule, free of any gradient's size.
    ternary  -1, 0, 1: stochastic, so that the mean of q is x / (2.5 rms of its feature)
    int4     -7..7:     stochastic rounding, 7 stands for 4 rms
    int8     -127..127: stochastic rounding, 127 stands for 16 rms: in attention most of delta lies beyond 4

The rms is one running value per feature, renewed once a step, so all micro-batches of a step speak on one scale and
their votes add up as integers, in any order. Stochastic rounding makes the last three unbiased (up to clipping).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from gft import kernels
from gft.philox import noise16


class Stream(TypedDict):
    """Which random numbers: noise16's arguments."""

    seed: int
    step: int | Tensor  # on a GPU after the first step: a number in its memory, which a captured graph can count
    stream: int
    call: int


class Code(NamedTuple):
    bits: int  # what the backward pass keeps per element of x
    largest: int  # the largest |q|
    reach: float  # how many rms that stands for

    @property
    def unit(self) -> float:
        """What one rms is worth, in 1/65536 of q."""
        return self.largest / self.reach * 65536.0


CODES = {
    "sign": Code(bits=2, largest=1, reach=0.0),
    "ternary": Code(bits=2, largest=1, reach=2.5),
    "int4": Code(bits=4, largest=7, reach=4.0),
    "int8": Code(bits=8, largest=127, reach=16.0),
}
SAMPLES = ("token", "sequence")
MASKS = ("none", "literal")
LARGEST_SQUARED = 1e15  # beyond it a value counts as this much in the rms: its square must fit float32
RMS_DECAY = 0.9  # of the running mean square, a step
SEQUENCES_SCRATCH = 1 << 26  # votes of single sequences held at once
INT32_CEILING = 2**31  # votes that may reach it are counted in int64
SMALLEST_RMS = 1e-30  # of a feature that was always 0: its first value other than 0 counts in full


# ---------------------------------------------------------------------------------------------------- x, delta -> q


def quantize(values: Tensor,  # (n, features) float
             vote: str,
             rms: Tensor | None = None,  # (features,) float32, for all but sign
             noise: Tensor | None = None) -> Tensor:  # values.numel() numbers 0..65535 -> int8 like values
    """q(values). What is NaN or inf casts no vote: q = 0."""
    code = CODES[vote]
    if vote == "sign":
        return torch.where(torch.isfinite(values), values.sign(), 0).to(torch.int8)
    values = values.float()
    values = torch.where(torch.isfinite(values), values, 0)
    assert rms is not None
    assert noise is not None
    top = code.largest * 65536
    # Fixed point with 16 fraction bits: one rounding of one product, then integers only (no add a GPU could fuse).
    fixed = (values * fixed_point_factor(code, rms)).clamp_(-top, top).to(torch.int32)
    return fixed.add_(noise.view_as(fixed)).bitwise_right_shift_(16).to(torch.int8)


def fixed_point_factor(code: Code, rms: Tensor) -> Tensor:
    """What one unit of each feature is worth, in 1/65536 of q."""
    return rms.clamp_min(SMALLEST_RMS).reciprocal() * code.unit


def mean_square(values: Tensor) -> Tensor:  # (n, features) -> (features,) float32
    """Mean square of each feature over what is finite."""
    values = torch.where(torch.isfinite(values), values, 0).float().clamp_(-LARGEST_SQUARED, LARGEST_SQUARED)
    return values.square_().mean(0)


class Quantized(NamedTuple):
    """What one pass over x or delta gives."""

    q: Tensor  # (n, features) int8
    square: Tensor | None  # (features,) float32: the mean square of each feature; None for signs, which have no scale


def quantize_by_stream(values: Tensor,  # (n, features) float
                       vote: str,
                       rms: Tensor | None,  # (features,); None: that of `values` itself
                       stream: Stream,
                       factors: Tensor | None = None,  # fixed_point_factor of rms, if it is there already
                       counted: Tensor | None = None) -> Quantized:  # scalar, to which is added what is NaN or inf
    """`quantize` with the noise of a stream, and what else is asked of the values; in one kernel where there is one."""
    kernel, code = kernels.twin_of(values), CODES[vote]
    if kernel is not None and (vote != "sign" or values.is_cuda):
        if factors is None and vote != "sign":
            factors = fixed_point_factor(code, mean_square(values).sqrt() if rms is None else rms)
        q, square = kernel.quantize(values, factors, counted, largest=code.largest, largest_squared=LARGEST_SQUARED,
                                    **stream)
        return Quantized(q, None if vote == "sign" else square)
    if counted is not None:
        counted += (~torch.isfinite(values)).sum()
    if vote == "sign":
        return Quantized(quantize(values, vote), None)
    square = mean_square(values)
    rms = square.sqrt() if rms is None else rms
    return Quantized(quantize(values, vote, rms, noise16(values.numel(), **stream, device=values.device)), square)


# ---------------------------------------------------------------------------------------------------- the product


def _int32_product(delta: Tensor, x: Tensor) -> Tensor:
    """delta^T · x by a kernel. On a GPU without Triton by cuBLAS, which wants sizes in multiples of 8 and more than 16 rows:
    pad with zeros."""
    kernel = kernels.twin_of(x)
    if kernel is not None:
        return kernel.votes_product(delta, x)
    tokens, out, features = x.shape[0], delta.shape[1], x.shape[1]

    def padded_transpose(q: Tensor, least: int) -> Tensor:
        rows, columns = max(-(-q.shape[1] // 8) * 8, least), -(-tokens // 8) * 8
        if (rows, columns) == (q.shape[1], tokens):
            return q.t().contiguous()  # as the kernel left it, if it did
        padded = q.new_zeros(rows, columns)
        padded[: q.shape[1], :tokens] = q.t()
        return padded

    return torch._int_mm(padded_transpose(delta, 24), padded_transpose(x, 8).t())[:out, :features]


def tally(x: Tensor,  # (n, in) int8
          delta: Tensor,  # (n, out) int8
          largest: int) -> Tensor:  # (out, in) int32, or int64 where int32 could overflow
    """The votes: delta^T · x, exact for any number of tokens.

    Kernels sum in int32. A float32 product of small integers is exact while its sums stay below 2^24, and on a CPU without
    kernels it is many times faster than torch's integer one.
    """
    tokens = x.shape[0]
    on_cuda = x.device.type == "cuda"
    in_int32 = on_cuda or kernels.twin_of(x) is not None
    at_once = (2**31 - 1 if in_int32 else 2**24) // largest**2
    if on_cuda:
        at_once = at_once // 8 * 8
    dtype = torch.int64 if tokens * largest**2 >= INT32_CEILING else torch.int32
    votes: Tensor | None = None
    for start in range(0, tokens, at_once):
        some_x, some_delta = x[start : start + at_once], delta[start : start + at_once]
        with torch.autocast(x.device.type, enabled=False):  # backward may run inside one, and bf16 sums are not exact
            part = _int32_product(some_delta, some_x) if in_int32 else some_delta.float().t() @ some_x.float()
        votes = part.to(dtype) if votes is None else votes.add_(part.to(dtype))
    return x.new_zeros(delta.shape[1], x.shape[1], dtype=dtype) if votes is None else votes


def apply_literal_mask(votes: Tensor,  # (out, in): sum of s = q(delta) q(x)
                       sizes: Tensor,  # (out, in): sum of |s|
                       levels: Tensor) -> Tensor:  # (out, in)
    """Line 9 of Algorithm 1 as printed: a sample counts only where delta · x · w < 0, that is where s · w < 0.

    So a positive weight hears only negative voices and a negative one only positive voices, which both make it grow;
    a weight at 0 hears none and never moves. Kept for study; the text's own formula has no mask.
    """
    positive, negative = (sizes + votes) // 2, (sizes - votes) // 2
    return torch.where(levels < 0, positive, torch.where(levels > 0, -negative, 0))


# ---------------------------------------------------------------------------------------------------- one layer's ballot

# Quantized delta (voters, out) -> (rows of the weight, x (n, in) int8, delta (n, those rows) int8), piece by piece.
Pieces = Callable[[Tensor], Iterable[tuple[slice, Tensor, Tensor]]]


@dataclass(eq=False)
class Ballot:
    """Where one layer's votes are cast and counted between two steps. The optimizer hands one to each weight.

    Purposes of the random streams: 3·layer for the step, +1 for x, +2 for delta.
    """

    vote: str
    sample: str
    mask: str
    seed: int
    layer: int  # which of the optimizer's weights this is
    step: int | Tensor = 0
    rank: int = 0  # of this process among
    world: int = 1  # those whose votes are summed (distributed.py)
    x_rms: Tensor | None = None  # (in,) running; None until the first batch
    delta_rms: Tensor | None = None  # (out,)
    votes: Tensor | None = None  # (out, in) int32 or int64
    revised_ceiling: int | None = None  # of votes that are not what was counted any more
    tokens: int = 0  # rows of the vote product since the last step
    voices: int = 0  # samples that spoke: tokens, or sequences
    batches: int = 0  # backward passes since the last step
    squares: dict[str, Tensor] = field(default_factory=dict)  # sums of mean squares since the last step
    factors: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # fixed_point_factor by rms and kind of vote
    on_votes: Callable[[Tensor], None] | None = None  # called with the weight after each backward pass
    votes_square: Tensor | None = None  # (out + in + 1,) running mean squares of the votes: by row, by column, of all
    fresh_votes_square: Tensor | None = None  # the same as this step has renewed them
    not_finite: Tensor | None = None  # how many values of delta were NaN or inf, ever (a count on the device)
    flips: Tensor | None = None  # how many levels the moves since the last step have changed (likewise)

    @property
    def code(self) -> Code:
        return CODES[self.vote]

    def stream(self, purpose: int, call: int) -> Stream:
        return {"seed": self.seed, "step": self.step, "stream": 3 * self.layer + purpose, "call": call}

    @property
    def call(self) -> int:
        """Tells the noise of micro-batches and ranks apart. Counted in backward, since checkpointing runs forward twice
        and an evaluation with grad enabled never comes back."""
        return self.batches * self.world + self.rank

    @property
    def ceiling(self) -> int:
        """No |vote| can be larger."""
        if self.revised_ceiling is not None:
            return self.revised_ceiling
        return self.voices if self.vote == "sign" else self.tokens * self.code.largest**2

    @property
    def wide(self) -> bool:
        """Could a sum on the way to a vote overflow int32?"""
        return self.tokens * self.code.largest**2 >= INT32_CEILING

    def speaks_per_sequence(self, sequence: int) -> bool:
        """One voice a sequence, sign(sum over its tokens), instead of one a token."""
        return self.vote == "sign" and self.sample == "sequence" and sequence > 1

    def vote_for(self, sequence: int) -> str:
        """How x and delta are quantized: within a sequence sizes count, so both stay int8 until its sum's sign."""
        return "int8" if self.speaks_per_sequence(sequence) else self.vote

    def quantize_x(self, x: Tensor, sequence: int, call: int) -> Quantized:
        """x is (n, in) float. `sequence`: tokens that make one sample."""
        vote = self.vote_for(sequence)
        return quantize_by_stream(x, vote, self.x_rms, self.stream(1, call), self._factors("x_rms", vote))

    def cast(self, pieces: Pieces, x_square: Tensor | None,
             delta: Tensor,  # (voters, out) float
             shape: tuple[int, int],  # (out, in)
             sequence: int,
             levels: Tensor | None = None) -> None:  # (out, in), for the literal mask
        """Add the votes of one backward pass. `pieces` pairs the quantized delta with the x each row of it voted on."""
        vote = self.vote_for(sequence)
        if self.not_finite is None or self.not_finite.device != delta.device:
            self.not_finite = torch.zeros((), dtype=torch.int64, device=delta.device)
        q, delta_square = quantize_by_stream(delta, vote, self.delta_rms, self.stream(2, self.call),
                                             self._factors("delta_rms", vote), self.not_finite)
        self._remember("x_rms", x_square)
        self._remember("delta_rms", delta_square)
        self.batches += 1
        self.tokens += delta.shape[0]
        self.voices += delta.shape[0] // (sequence if self.speaks_per_sequence(sequence) else 1)
        if self.votes is not None and self.wide:
            self.votes = self.votes.to(torch.int64)
        for rows, x_piece, delta_piece in pieces(q):
            votes, sizes = self._count(x_piece, delta_piece, sequence)
            if sizes is not None and levels is not None:
                votes = apply_literal_mask(votes, sizes, levels[rows])
            if self.votes is None and votes.shape == shape:
                self.votes = votes.to(torch.int64) if self.wide else votes
                continue
            if self.votes is None:
                self.votes = torch.zeros(shape, dtype=torch.int64 if self.wide else torch.int32, device=votes.device)
            self.votes[rows] += votes

    def _count(self, x: Tensor, delta: Tensor, sequence: int) -> tuple[Tensor, Tensor | None]:
        """Votes, and for the literal mask the sum of their sizes."""
        if self.speaks_per_sequence(sequence):
            kernel = kernels.twin_of(x) if x.is_cuda and self.mask == "none" else None
            if kernel is not None:
                return kernel.sequence_votes(delta, x, sequence), None
            votes, sizes = _sequence_tally(x, delta, sequence)
            return votes, sizes if self.mask == "literal" else None
        votes = tally(x, delta, self.code.largest)
        return votes, tally(x.abs(), delta.abs(), self.code.largest) if self.mask == "literal" else None

    def _factors(self, which: str, vote: str) -> Tensor | None:
        """The factors of a running rms, made once and renewed with it."""
        rms = getattr(self, which)
        if rms is None or vote == "sign":
            return None
        if (which, vote) not in self.factors:
            self.factors[which, vote] = fixed_point_factor(CODES[vote], rms)
        return self.factors[which, vote]

    def _remember(self, which: str, square: Tensor | None) -> None:
        if square is not None:
            if getattr(self, which) is None:
                setattr(self, which, square.sqrt())
            self.squares[which] = self.squares[which] + square if which in self.squares else square

    def set_scale(self, which: str, rms: Tensor | None) -> None:
        """Start a running rms anew."""
        setattr(self, which, rms)
        self.factors = {key: factors for key, factors in self.factors.items() if key[0] != which}

    def revise(self, votes: Tensor, ceiling: int) -> None:
        """Let other votes, none beyond `ceiling`, move the weight in place of those that were cast."""
        self.votes, self.revised_ceiling = votes, ceiling

    def drop_votes(self) -> None:
        """They have moved the weight; the count of batches and tokens goes on."""
        self.votes, self.revised_ceiling = None, None

    def discard(self) -> None:
        """Forget the votes cast since the last step."""
        self.drop_votes()
        self.tokens, self.voices, self.batches = 0, 0, 0
        self.squares.clear()


def renew(ballots: Sequence[Ballot]) -> None:
    """The step is done: renew the running rms of all ballots, in place, and start their next count."""
    # Of x and delta and of all layers in one launch or two, where there are launches.
    speaking = [(ballot, which) for ballot in ballots for which in ballot.squares]
    if speaking:
        running = [getattr(ballot, which) for ballot, which in speaking]
        fresh = [ballot.squares[which] / ballot.batches if ballot.batches > 1 else ballot.squares[which]
                 for ballot, which in speaking]
        mixed = torch._foreach_lerp(fresh, torch._foreach_mul(running, running), RMS_DECAY)  # type: ignore[arg-type]
        torch._foreach_copy_(running, torch._foreach_sqrt(mixed))
    kept = [(factors, getattr(ballot, which), CODES[vote].unit) for ballot, which in speaking
            for (name, vote), factors in ballot.factors.items() if name == which]
    if kept:  # fixed_point_factor
        factors, running, units = (list(each) for each in zip(*kept, strict=True))
        inverse = torch._foreach_reciprocal(torch._foreach_clamp_min(running, SMALLEST_RMS))
        torch._foreach_copy_(factors, torch._foreach_mul(inverse, units))
    running, fresh = [], []
    for ballot in ballots:
        if ballot.fresh_votes_square is not None:
            if ballot.votes_square is None:
                ballot.votes_square = torch.empty_like(ballot.fresh_votes_square)
            running.append(ballot.votes_square)
            fresh.append(ballot.fresh_votes_square)
            ballot.fresh_votes_square = None
    if running:
        torch._foreach_copy_(running, fresh)
    for ballot in ballots:
        ballot.discard()


def _sequence_tally(x: Tensor, delta: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    """Sum over sequences of s = sign(sum over the tokens of one sequence of delta · x), and of |s|."""
    out, features = delta.shape[1], x.shape[1]
    votes = torch.zeros(out, features, dtype=torch.int32, device=x.device)
    sizes = torch.zeros_like(votes)
    at_once = max(1, SEQUENCES_SCRATCH // max(out * features, 1)) * sequence
    for some_x, some_delta in zip(x.split(at_once), delta.split(at_once), strict=True):
        voices = _sequence_sums(some_x, some_delta, sequence).sign().to(torch.int8)
        votes += voices.sum(0, dtype=torch.int32)
        sizes += voices.abs().sum(0, dtype=torch.int32)
    return votes, sizes


def _sequence_sums(x: Tensor, delta: Tensor, sequence: int) -> Tensor:  # (sequences, out, in)
    """The exact votes of each sequence by itself."""
    largest = CODES["int8"].largest
    if sequence * largest**2 >= 2**24:  # more than a float32 sum holds
        pairs = zip(x.split(sequence), delta.split(sequence), strict=True)
        return torch.stack([tally(one_x, one_delta, largest) for one_x, one_delta in pairs])
    with torch.autocast(x.device.type, enabled=False):  # int8 fits TF32's mantissa, too
        return torch.bmm(delta.reshape(-1, sequence, delta.shape[1]).float().transpose(1, 2),
                         x.reshape(-1, sequence, x.shape[1]).float())
