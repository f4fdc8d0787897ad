"""Votes: an integer estimate of a weight's gradient, from small integers and their exact product (paper, Section 4.1-4.2).

    votes[o, i] = sum_b  q(grad_output[b, o]) · q(x[b, i])       one integer a weight; the weight moves against its sign

`q` is the only choice:

    Sign     -1, 0, 1: the sign alone. The paper's rule, free of any gradient's size.
    Ternary  -1, 0, 1: stochastic, so that the mean of q is x / (2.5 rms of its feature)
    Int4     -7..7:     stochastic rounding, 7 stands for 4 rms
    Int8     -127..127: stochastic rounding, 127 stands for 16 rms: in attention most of grad_output lies beyond 4

The rms is one running value per feature, renewed once a step, so all micro-batches of a step vote on one scale and their
votes add up as integers, in any order. Stochastic rounding makes the last three unbiased (up to clipping).

A `VoteAccumulator` belongs to a layer and holds its votes between two steps of the optimizer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gft import ops
from gft.errors import UsageError
from gft.ops import Quantized
from gft.philox import NoiseKey
from gft.settings import Setting, check_choice

RMS_DECAY = 0.9  # of the running mean square, a step
INT32_BOUND = 2**31  # votes that may reach it are counted in int64
SMALLEST_RMS = 1e-30  # of a feature that was always 0: its first value other than 0 counts in full


# ---------------------------------------------------------------------------------------------------- how votes are cast


@dataclass(frozen=True)
class Vote(Setting):
    """How x and grad_output are quantized before they are multiplied."""

    bits: ClassVar[int]  # what backward keeps per element of x
    largest: ClassVar[int]  # the largest |q|
    reach: ClassVar[float]  # how many rms that stands for; 0: q has no scale

    @property
    def unit(self) -> float:
        """What one rms is, in 1/65536 of q."""
        return self.largest / self.reach * 65536.0

    @property
    def has_scale(self) -> bool:
        return self.reach > 0

    def within(self, sequence: int) -> "Vote":
        """The quantizer of the tokens where `sequence` of them make one sample."""
        return self


@dataclass(frozen=True)
class Int8(Vote):
    """8-bit stochastic rounding, 127 for 16 rms: as good as exact x and grad_output. The default."""

    bits, largest, reach = 8, 127, 16.0


@dataclass(frozen=True)
class Int4(Vote):
    """4-bit stochastic rounding, 7 for 4 rms: half of the activation memory for a little accuracy."""

    bits, largest, reach = 4, 7, 4.0


@dataclass(frozen=True)
class Ternary(Vote):
    """-1, 0 or 1 with the right mean: a quarter of the activation memory, noisier votes."""

    bits, largest, reach = 2, 1, 2.5


@dataclass(frozen=True)
class Sign(Vote):
    """The sign alone, as in the paper: every sample counts the same, however small its error.

    per: "token": every row of x is a sample. "sequence": the tokens of a sequence (the positions of an image) are summed
        first, and the sign of the sum is one vote.
    literal_mask: True counts only what line 9 of Algorithm 1 prints, where the vote and the weight have opposite signs; the
        weights can then only grow. Kept for study.
    """

    per: str = "token"
    literal_mask: bool = False
    bits, largest, reach = 2, 1, 0.0

    def __post_init__(self) -> None:
        check_choice("per", self.per, ("token", "sequence"))
        check_choice("literal_mask", self.literal_mask, (False, True))

    def within(self, sequence: int) -> Vote:
        # Inside a sequence sizes count, so its tokens stay int8 until the sign of their sum.
        return Int8() if self.per == "sequence" and sequence > 1 else self


def fixed_point_factors(vote: Vote, rms: Tensor) -> Tensor:
    """What one unit of each feature is, in 1/65536 of q."""
    return rms.clamp_min(SMALLEST_RMS).reciprocal() * vote.unit


# ---------------------------------------------------------------------------------------------------- counting


# What votes are cast on: x; the patches of images; or images whose patches are not made, or along one dimension alone.
Seen = Tensor | ops.RowPatches | ops.Unfolded


def count_votes(x: Seen,  # (n, in) int8
                grad_output: Tensor,  # (n, out) int8
                largest: int,
                into: Tensor | None = None,
                means: Sequence[ops.MeanSquare] = ()) -> Tensor:  # (out, in) int32, or int64 where int32 could overflow
    """grad_output^T · x, exact for any number of tokens; if given, added to `into`, whose type must hold the sum. Of groups,
    (groups, n, …): all of them, one above the other. Mean squares are taken in passing."""
    dtype = torch.int64 if grad_output.shape[-2] * largest**2 >= INT32_BOUND else torch.int32
    if isinstance(x, Tensor) and x.dim() == 2:
        if into is None and dtype is torch.int64:
            into = x.new_zeros(grad_output.shape[1], x.shape[1], dtype=dtype)
        return ops.votes_product(grad_output, x, into, means)
    if isinstance(x, ops.RowPatches):
        if into is None:
            columns = x.made.shape[1] * x.window.kernel[0]
            into = grad_output.new_zeros(grad_output.shape[1], columns, dtype=dtype)
        return ops.row_votes(grad_output, x.made, x.window, into, means)
    for one in means:
        ops.take_mean(*one)
    if isinstance(x, ops.Unfolded):
        if into is None:
            into = grad_output.new_zeros(grad_output.shape[1], x.window.places, dtype=dtype)
        return ops.depthwise_votes(grad_output, x.images, x.window, into)
    votes = ops.grouped_votes_product(grad_output, x, dtype).flatten(0, 1)
    return votes if into is None else into.add_(votes)


def apply_literal_mask(votes: Tensor,  # (out, in): sum of s = q(grad_output) q(x)
                       counts: Tensor,  # (out, in): sum of |s|
                       levels: Tensor) -> Tensor:  # (out, in)
    """Line 9 of Algorithm 1 as printed: a sample counts only where delta · x · w < 0, that is where s · w < 0.

    So a positive weight gets only negative votes and a negative one only positive votes, which both make it grow; a weight
    at 0 gets none and never moves. The text's own formula has no mask.
    """
    positive, negative = (counts + votes) // 2, (counts - votes) // 2
    return torch.where(levels < 0, positive, torch.where(levels > 0, -negative, 0))


# Quantized grad_output (n, out) -> (rows of the weight, x (n, in) int8, grad_output (n, those rows) int8), piece by piece.
# Or for groups of rows, each with an x of its own: (all rows, x (groups, n, in), grad_output (groups, n, rows of a group)).
# Or where each of many groups is one channel: (all rows, images and how the kernel moves over them, grad_output (n, out)).
Pieces = Callable[[Tensor], Iterable[tuple[slice, Seen, Tensor]]]


class Along(NamedTuple):
    """What votes are asked of the weight itself: slope · sum(gradient · weight), by which a layer's gain learns."""

    weight: Tensor  # (out, in) float
    slope: float


class _Prepared(NamedTuple):
    """How x or grad_output was rounded beside a weight the last time, and what that rests on."""

    weight: ops.StoredWeight
    vote: Vote
    shape: torch.Size
    dtype: torch.dtype
    not_finite: Tensor | None
    run: ops.Preparer


class VoteAccumulator:
    """The votes on one weight between two steps, and the running scales they are cast on. Owned by the layer.

    Random streams: 3·number for the step, +1 for x, +2 for grad_output.
    """

    def __init__(self, vote: Vote, seed: int, number: int) -> None:
        self.vote, self.seed = vote, seed
        self.number = number  # which of the model's layers, for the random streams
        self.step: int | Tensor = 0
        self.rank, self.world = 0, 1  # of this process among those whose votes are summed (distributed.py)
        self.layer: Callable[[], Any] = lambda: None  # weak references: whose votes these are,
        self.optimizer: Callable[[], Any] = lambda: None  # and who moves the weight
        # Where ranks share out the rows: sums votes over them (sharding.py); with a key, a byte each on the wire.
        self.scatter: Callable[[Tensor, NoiseKey | None], Tensor] | None = None
        self.wire = "int32"
        self.in_backward = False  # does it move the weight after each backward pass?
        self.transposed = False  # are the rows of the weight features of x, the columns those of grad_output?
        self.prepared_for: Any = None  # the rule the weight is stored for; None when its bytes have just been loaded

        # Kept from step to step, in the optimizer's state_dict.
        self.x_rms: Tensor | None = None  # (in,) float32, running; None until the first batch
        self.grad_rms: Tensor | None = None  # (out,)
        self.second_moment: Tensor | None = None  # (out + in + 1,) of the votes: by row, by column, of all

        # Since the last step.
        self.votes: Tensor | None = None  # (out, in) int32 or int64
        self.tokens = 0  # rows of the product
        self.samples = 0  # tokens or, where these have one vote together, sequences
        self.backwards = 0  # backward passes through the layer
        self.pending = 0  # forward passes in training whose backward has not come yet
        self.shared_out = 0  # backward passes whose votes went to the ranks whose rows they are on: the same on all ranks
        self.recomputed = 0  # those of them that backward itself has run, for activation checkpointing
        self.mean_squares: dict[str, Tensor] = {}  # sums over the backward passes, by the name of the scale
        self._rooms: dict[str, Tensor] = {}  # where they lie, the same each step
        self._begun: set[str] = set()  # scales that began with these passes: they go, too, if these are forgotten
        self.new_second_moment: Tensor | None = None
        self.flips: Tensor | None = None  # how many levels the moves have changed (int64, on the device)
        self.not_finite: Tensor | None = None  # how many values of grad_output were NaN or inf, ever (likewise)
        self._factors: dict[tuple[str, Vote], Tensor] = {}  # fixed_point_factors by scale and quantizer
        self._prepared: dict[str, _Prepared] = {}  # by scale

    # ------------------------------------------------------------------ random numbers

    def key(self, purpose: int, call: int, first: int = 0) -> NoiseKey:
        return NoiseKey(self.seed, self.step, 3 * self.number + purpose, call, first)

    def call(self, use: int) -> int:
        """Tells the noise of uses (micro-batches, or one layer used several times) and of ranks apart."""
        return use * self.world + self.rank

    def next_use(self, training: bool) -> int:
        """The number of this forward pass. Passes whose backward is still to come are counted, so that a layer that is used
        several times in one forward draws new noise each time. A recomputation inside backward (activation checkpointing)
        comes just before the backward passes it serves; an evaluation never comes back."""
        if not training:
            return self.backwards
        if torch._C._current_graph_task_id() != -1:
            self.recomputed += 1
            return self.backwards + self.recomputed - 1
        self.pending += 1
        return self.backwards + self.pending - 1

    # ------------------------------------------------------------------ what votes can be

    @property
    def bound(self) -> int:
        """No |vote| can be larger."""
        return self.bound_of(self.tokens, self.samples)

    def bound_of(self, tokens: int, samples: int) -> int:
        """What no |vote| of so many can exceed."""
        return samples if isinstance(self.vote, Sign) else tokens * self.vote.largest**2

    @property
    def wide(self) -> bool:
        """Could a sum on the way to a vote overflow int32?"""
        return self.tokens * self.vote.largest**2 >= INT32_BOUND

    # ------------------------------------------------------------------ casting

    def quantize_x(self, x: Tensor, sequence: int, training: bool,
                   weight: ops.StoredWeight | None = None) -> tuple[Tensor | None, Quantized]:
        """Round x, (n, in) float, to small integers; a weight is read out beside it. `sequence`: tokens that make one
        sample."""
        vote, key = self.vote.within(sequence), self.key(1, self.call(self.next_use(training)))
        return self._quantized("x_rms", vote, x, key, weight, None)

    def quantize_grad(self, grad_output: Tensor, sequence: int,
                      weight: ops.StoredWeight | None = None) -> tuple[Tensor | None, Quantized]:
        """Round grad_output, (n, out) float, likewise; what is not finite is counted."""
        vote, key = self.vote.within(sequence), self.key(2, self.call(self.backwards))
        if self.not_finite is None or self.not_finite.device != grad_output.device:
            self.not_finite = torch.zeros((), dtype=torch.int64, device=grad_output.device)
        return self._quantized("grad_rms", vote, grad_output, key, weight, self.not_finite)

    def _quantized(self, which: str, vote: Vote, values: Tensor, key: NoiseKey, weight: ops.StoredWeight | None,
                   not_finite: Tensor | None) -> tuple[Tensor | None, Quantized]:
        """Round values, and read a weight out, as the last time if it is the same one."""
        prepared = self._prepared.get(which)
        if (prepared is not None and prepared.weight is weight and prepared.vote is vote and prepared.shape == values.shape
                and prepared.dtype is values.dtype and prepared.not_finite is not_finite):
            return prepared.run(values, key)
        factors = self._factors_of(which, vote, values)
        if weight is None:
            return None, ops.quantize(values, factors, vote.largest, key, not_finite)
        if factors is None or getattr(self, which) is None:  # factors that are not kept
            return ops.read_and_quantize(weight, values, factors, vote.largest, key, not_finite)
        run = ops.preparer(weight, values, factors, vote.largest, not_finite)
        self._prepared[which] = _Prepared(weight, vote, values.shape, values.dtype, not_finite, run)
        return run(values, key)

    def cast(self, pieces: Pieces, x: Quantized, grad_output: Quantized,
             shape: tuple[int, int],  # (out, in)
             sequence: int,
             along: Along | None = None) -> Tensor | None:
        """Add the votes of one backward pass. `pieces` pairs the quantized grad_output with the x each row of it is for.

        With `along` and a quantizer that has a scale, returns an unbiased estimate of what it asks for, (1,).
        """
        q, tokens = grad_output.q, grad_output.q.shape[0]
        means = self._note("x_rms", x.squares, x.q.shape[0]), self._note("grad_rms", grad_output.squares, tokens)
        waiting = [mean for mean in means if mean is not None]
        self.backwards += 1
        self.pending, self.recomputed = max(self.pending - 1, 0), max(self.recomputed - 1, 0)
        self.tokens += tokens
        wide = self.wide if self.scatter is None else tokens * self.vote.largest**2 >= INT32_BOUND
        total = self.votes if self.scatter is None else None  # shared-out votes are counted a backward pass at a time
        if total is not None and wide:
            total = total.to(torch.int64)
        projection = None
        adds_up = along is None and not self._one_vote_a_sequence(sequence)  # no piece's votes need be known by themselves
        for rows, x_piece, grad_piece in pieces(q):
            if not rows.start:  # once, however many groups of rows there are
                self.samples += grad_piece.shape[-2] // (sequence if self._one_vote_a_sequence(sequence) else 1)
            if total is not None and adds_up:
                count_votes(x_piece, grad_piece, self.vote.largest, total[rows], waiting)
                waiting = []
                continue
            votes, counts = self._count(x_piece, grad_piece, sequence, waiting)
            waiting = []
            if counts is not None and along is not None:
                votes = apply_literal_mask(votes, counts, along.weight[rows])
            if along is not None and self.vote.has_scale:
                part = self._along(votes, rows, along, x_piece, shape)
                projection = part if projection is None else projection + part
            if total is None and votes.shape == shape:
                total = votes.to(torch.int64) if wide else votes
                continue
            if total is None:
                total = torch.zeros(shape, dtype=torch.int64 if wide else torch.int32, device=votes.device)
            total[rows] += votes
        for mean in waiting:  # of a product without pieces
            ops.take_mean(*mean)
        if self.scatter is None:
            self.votes = total
        elif total is not None:
            self._share_out(total, tokens)
        return projection

    def _along(self, votes: Tensor, rows: slice, along: Along, x_piece: Seen,
               shape: tuple[int, int]) -> Tensor:
        """What `along` asks for of some rows' votes."""
        of_rows, of_columns = (self._factors_of(which, self.vote) for which in ("grad_rms", "x_rms"))
        assert of_rows is not None
        assert of_columns is not None
        if self.transposed:
            of_rows, of_columns = of_columns, of_rows
        if votes.shape == shape == (len(of_rows), len(of_columns)):  # a linear layer
            return ops.along_levels(votes, along.weight, of_rows, of_columns, along.slope)
        groups = 1
        if isinstance(x_piece, ops.Unfolded):
            groups = x_piece.groups
        elif isinstance(x_piece, Tensor) and x_piece.dim() == 3:
            groups = len(x_piece)
        first, size, parts = rows.start or 0, len(votes) // groups, []
        for group in range(groups):
            of_group, here = slice(first + group * size, first + (group + 1) * size), slice(group * size, None)
            some = votes[here][:size]
            columns = _repeated(of_columns, of_group, some.shape, shape[0])
            parts.append(ops.along_levels(some, along.weight[of_group], of_rows[of_group], columns, along.slope))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def abstain(self, shape: tuple[int, int], device: torch.device) -> None:
        """Cast no votes in a backward pass without tokens; where ranks share out the rows, the others wait for them."""
        if self.scatter is not None:
            self._share_out(torch.zeros(shape, dtype=torch.int32, device=device), 0)
            self.move_in_backward()

    def _share_out(self, votes: Tensor, tokens: int) -> None:
        """Hand the votes of one backward pass to the ranks whose rows they are on, and take theirs in."""
        assert self.scatter is not None
        most = (INT32_BOUND - 1) // self.world
        if tokens * self.vote.largest**2 > most:
            votes = votes.clamp_(-most, most)
        # Beyond all calls of a step's own noise, which has the same stream.
        key = self.key(0, (1 << 31) + self.call(self.shared_out)) if self.wire == "int8" else None
        votes = self.scatter(votes.to(torch.int32), key)
        if self.votes is not None:
            total = self.votes.to(torch.int64).add_(votes)
            votes = total.clamp_(1 - INT32_BOUND, INT32_BOUND - 1).to(torch.int32)
        self.votes = votes
        self.shared_out += 1

    def _one_vote_a_sequence(self, sequence: int) -> bool:
        return isinstance(self.vote, Sign) and self.vote.per == "sequence" and sequence > 1

    @property
    def reads_weight(self) -> bool:
        """Do votes depend on the weight they are cast on?"""
        return isinstance(self.vote, Sign) and self.vote.literal_mask

    def _count(self, x: Seen, grad_output: Tensor, sequence: int,
               means: Sequence[ops.MeanSquare]) -> tuple[Tensor, Tensor | None]:
        """Votes, and for the literal mask how many of them there were. Mean squares are taken in passing, where they can."""
        if not isinstance(self.vote, Sign):
            return count_votes(x, grad_output, self.vote.largest, None, means), None
        for one in means:
            ops.take_mean(*one)
        if isinstance(x, ops.Unfolded):
            if self.vote.per == "token" and not self.vote.literal_mask:
                return count_votes(x, grad_output, self.vote.largest), None
            x, grad_output = x.by_group(grad_output)
        if isinstance(x, ops.RowPatches):
            x = x.whole()
        if x.dim() == 3 and (self.vote.per == "sequence" or self.vote.literal_mask):
            parts = [self._count(one_x, one_grad, sequence, ()) for one_x, one_grad in zip(x, grad_output, strict=True)]
            counts = [count for _, count in parts if count is not None]
            return torch.cat([votes for votes, _ in parts]), torch.cat(counts) if counts else None
        masked = self.vote.literal_mask
        if self._one_vote_a_sequence(sequence):
            if masked:
                return ops.sequence_votes_and_counts(grad_output, x, sequence)
            return ops.sequence_votes(grad_output, x, sequence), None
        largest = self.vote.largest
        return count_votes(x, grad_output, largest), count_votes(x.abs(), grad_output.abs(), largest) if masked else None

    def _factors_of(self, which: str, vote: Vote, values: Tensor | None = None) -> Tensor | None:
        """The factors of a running rms, made once and renewed with it; at first, of `values` themselves."""
        if not vote.has_scale:
            return None
        rms = getattr(self, which)
        if rms is None:
            assert values is not None
            return fixed_point_factors(vote, ops.mean_square(values).sqrt())
        if (which, vote) not in self._factors:
            self._factors[which, vote] = fixed_point_factors(vote, rms)
        return self._factors[which, vote]

    def _note(self, which: str, squares: Tensor | None, tokens: int) -> ops.MeanSquare | None:
        """Sums of squares that are to be taken the mean of, and added to the step's."""
        if squares is None:
            return None
        if which not in self._rooms or self._rooms[which].device != squares.device:
            self._rooms[which] = squares.new_empty(squares.shape[1])
        mean = ops.MeanSquare(squares, tokens, self._rooms[which], which in self.mean_squares)
        self.mean_squares[which] = self._rooms[which]
        if getattr(self, which) is None:  # the first batch: its own scale is needed at once
            ops.take_mean(*mean)
            setattr(self, which, self._rooms[which].sqrt())
            self._begun.add(which)
            return None
        return mean

    # ------------------------------------------------------------------ between steps

    def move_in_backward(self) -> None:
        """Let the optimizer move the weight at once, if it wants to."""
        optimizer = self.optimizer() if self.in_backward else None
        if optimizer is not None:
            optimizer.move_in_backward(self)

    def set_scale(self, which: str, rms: Tensor | None) -> None:
        """Start a running rms anew."""
        setattr(self, which, rms)
        self._prepared.pop(which, None)
        self._factors = {key: factors for key, factors in self._factors.items() if key[0] != which}

    def drop_votes(self) -> None:
        """Drop the votes, which have moved the weight; the count of backward passes and tokens goes on."""
        self.votes = None

    def discard(self) -> None:
        """Forget the votes cast since the last step. A first batch that is forgotten leaves no scale behind: where a loss
        scaler skips it because it overflowed, all of them would be 0."""
        for which in self._begun:
            self.set_scale(which, None)
        self._begun.clear()
        self.drop_votes()
        self.tokens = self.samples = self.backwards = self.shared_out = self.pending = self.recomputed = 0
        self.mean_squares.clear()

    def check_state(self, inputs: int, shape: tuple[int, int], outputs: int | None = None) -> None:
        """Raise unless the running scales fit a weight of this shape. Here they enter: kernels that read them, a GPU's
        above all, look at no numbers."""
        for name, length in running_lengths(inputs, shape, outputs).items():
            if (scale := getattr(self, name)) is not None:
                check_running(name, scale, length, shape)


def running_lengths(inputs: int, shape: tuple[int, int], outputs: int | None = None) -> dict[str, int]:
    """How many numbers each running scale of a weight has."""
    rows, columns = shape
    return {"x_rms": inputs, "grad_rms": rows if outputs is None else outputs, "second_moment": rows + columns + 1}


def check_running(name: str, scale: Any, length: int, shape: tuple[int, int]) -> None:
    """Raise unless a running scale has that many numbers that it can have, for a weight of this shape."""
    plain = isinstance(scale, Tensor) and scale.layout is torch.strided and not scale.is_meta
    if not plain or scale.dtype is not torch.float32 or tuple(scale.shape) != (length,):
        found = f"{scale.dtype} of shape {tuple(scale.shape)}" if isinstance(scale, Tensor) else type(scale).__name__
        raise UsageError(f"the optimizer's state has a {name} that is {found}, where a weight of shape {shape} needs "
                         f"float32 of shape ({length},); load the state_dict of an optimizer over this model")
    if not bool(((scale >= 0) & torch.isfinite(scale)).all()):
        raise UsageError(f"the optimizer's state has a {name} with negative or not finite numbers; load a state_dict that "
                         "is not damaged")


def _repeated(factors: Tensor, rows: slice, shape: torch.Size, all_rows: int) -> Tensor:  # (columns,)
    """Factors of channels by column, for some rows of the weight: of the channels that the rows' group sees (all but in a
    grouped convolution), each as often as a channel has columns. `shape`: of these rows' votes."""
    in_group = max(shape[0], 1)
    channels = factors.view(max(all_rows // in_group, 1), -1)[(rows.start or 0) // in_group]
    per_channel = shape[1] // len(channels)
    return channels if per_channel == 1 else channels.repeat_interleave(per_channel)


def renew(accumulators: Sequence[VoteAccumulator]) -> None:
    """Finish a step: renew all running scales, in place, and start the next count."""
    # Of x and grad_output and of all layers in one launch or two, where there are launches.
    noted = [(one, which) for one in accumulators for which in one.mean_squares]
    if noted:
        running = [getattr(one, which) for one, which in noted]
        new = [one.mean_squares[which] / one.backwards if one.backwards > 1 else one.mean_squares[which]
               for one, which in noted]
        mixed = torch._foreach_lerp(new, torch._foreach_mul(running, running), RMS_DECAY)  # type: ignore[arg-type]
        torch._foreach_copy_(running, torch._foreach_sqrt(mixed))
    kept = [(factors, getattr(one, which), vote.unit) for one, which in noted
            for (name, vote), factors in one._factors.items() if name == which]
    if kept:  # fixed_point_factors
        factors, running, units = (list(each) for each in zip(*kept, strict=True))
        inverse = torch._foreach_reciprocal(torch._foreach_clamp_min(running, SMALLEST_RMS))
        torch._foreach_copy_(factors, torch._foreach_mul(inverse, units))
    running, new = [], []
    for one in accumulators:
        if one.new_second_moment is not None:
            if one.second_moment is None:
                one.second_moment = torch.empty_like(one.new_second_moment)
            running.append(one.second_moment)
            new.append(one.new_second_moment)
            one.new_second_moment = None
    if running:
        torch._foreach_copy_(running, new)
    for one in accumulators:
        one._begun.clear()
        one.discard()
