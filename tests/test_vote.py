"""vote.py: x and delta become small integers, and their product is exact."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gft import reference, vote
from gft.philox import noise16
from gft.vote import CODES, Ballot

STOCHASTIC = ("ternary", "int4", "int8")
# (tokens, out, in)
sizes = pytest.mark.parametrize("size", [(1, 1, 9), (7, 5, 13), (33, 17, 8)], ids="{0[0]}tokens-{0[1]}x{0[2]}".format)


def ballot_of(kind: str = "int8", sample: str = "token", mask: str = "none", **rest) -> Ballot:
    return Ballot(vote=kind, sample=sample, mask=mask, seed=77, layer=5, step=3, **rest)


def cast(ballot: Ballot, x: torch.Tensor, delta: torch.Tensor, sequence: int = 1,
         levels: torch.Tensor | None = None) -> None:
    """One forward and backward pass of a linear layer, as the layer does it."""
    call = ballot.call
    q, square = ballot.quantize_x(x, sequence, call)
    if levels is None:
        levels = torch.zeros(delta.shape[1], x.shape[1], dtype=torch.int8)
    ballot.cast(lambda q_delta: [(slice(None), q, q_delta)], square, delta, (delta.shape[1], x.shape[1]), sequence, levels)


def with_odd_values(shape: tuple[int, int]) -> torch.Tensor:
    """Gaussian numbers with a tenth each of 0, NaN and ±inf among them."""
    values = torch.randn(shape)
    where = torch.rand(shape)
    for index, odd in enumerate((0.0, math.nan, math.inf, -math.inf)):
        values[(where > 0.1 * index) & (where < 0.1 * (index + 1))] = odd
    return values


# ---------------------------------------------------------------------------------------------------- sign


@sizes
def test_sign_votes_equal_the_reference(size):
    tokens, out, features = size
    x, delta = with_odd_values((tokens, features)), with_odd_values((tokens, out))
    ballot = ballot_of("sign")
    cast(ballot, x, delta)
    assert ballot.votes.tolist() == reference.votes(x.tolist(), delta.tolist())


@given(st.lists(st.tuples(*[st.floats(width=32)] * 5), min_size=1, max_size=6))
def test_sign_votes_equal_the_reference_for_any_floats(rows):
    x, delta = torch.tensor(rows)[:, :3], torch.tensor(rows)[:, 3:]
    ballot = ballot_of("sign")
    cast(ballot, x, delta)
    assert ballot.votes.tolist() == reference.votes(x.tolist(), delta.tolist())


@sizes
def test_literal_mask_equals_the_reference(size):
    tokens, out, features = size
    x, delta = with_odd_values((tokens, features)), with_odd_values((tokens, out))
    levels = torch.randint(-3, 4, (out, features), dtype=torch.int8)
    ballot = ballot_of("sign", mask="literal")
    cast(ballot, x, delta, levels=levels)
    assert ballot.votes.tolist() == reference.votes_literal(x.tolist(), delta.tolist(), levels.tolist())


def test_literal_mask_only_lets_weights_grow():
    x, delta, levels = torch.randn(40, 30), torch.randn(40, 20), torch.randint(-1, 2, (20, 30), dtype=torch.int8)
    ballot = ballot_of("int4", mask="literal")
    cast(ballot, x, delta, levels=levels)
    assert (ballot.votes.sign() * levels <= 0).all()  # w moves against its votes, so away from 0
    assert not ballot.votes[levels == 0].any()
    assert ballot.votes.any()


def test_sign_votes_of_four_micro_batches_equal_those_of_one_batch():
    x, delta = torch.randn(20, 13), torch.randn(20, 9)
    whole, parts = ballot_of("sign"), ballot_of("sign")
    cast(whole, x, delta)
    for index in (2, 0, 3, 1):
        cast(parts, x[5 * index : 5 * index + 5], delta[5 * index : 5 * index + 5])
    assert torch.equal(whole.votes, parts.votes)
    assert whole.tokens == parts.tokens == 20
    assert parts.batches == 4


# ---------------------------------------------------------------------------------------------------- stochastic


@pytest.mark.parametrize(("kind", "per_rms"), [("ternary", 1 / 2.5), ("int4", 7 / 4), ("int8", 127 / 16)])
def test_quantize_is_unbiased_over_all_noise(kind, per_rms):
    rms = torch.tensor([0.5, 2.0, 3e-6, 1e4, 1.0])
    values = rms * torch.tensor([0.3, -1.7, 0.001, 2.2, -0.6])
    every_noise = torch.arange(65536, dtype=torch.int32)[:, None].expand(-1, 5)

    q = vote.quantize(values.expand(65536, 5), kind, rms, every_noise.contiguous())

    expected = values / rms * per_rms
    # Fixed point cuts off at most 1/65536; float32 carries 7 digits.
    assert torch.allclose(q.double().mean(0), expected.double(), rtol=1e-6, atol=1.01 / 65536)
    assert (q.double() - expected).abs().max() < 1


def test_quantize_rounds_as_the_reference_does():
    values, noise = 2 * torch.randn(7, 31), noise16(7 * 31, seed=1, step=2, stream=3)
    values[:, 0], noise[::31] = 0.6 / (127 / 16 * 65536), 65535  # less than one step of the fixed point: cut off, not up
    fixed = values * (127 / 16 * 65536)  # one float32 product, cut off: what follows is exact
    expected = [reference.stochastic_round(Fraction(int(a), 65536), n)
                for a, n in zip(fixed.flatten().tolist(), noise.tolist(), strict=True)]
    q = vote.quantize(values, "int8", torch.ones(31), noise)
    assert q.flatten().tolist() == [max(-127, min(127, e)) for e in expected]


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_quantize_clips_at_the_largest_code(kind):
    largest = CODES[kind].largest
    values = torch.tensor([[1e6, -1e6, 3e38, 17.0, -17.0, 0.0]])
    for noise in (0, 65535):
        q = vote.quantize(values, kind, torch.ones(6), torch.full((6,), noise, dtype=torch.int32))
        assert q.tolist() == [[largest, -largest, largest, largest, -largest, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CODES)
def test_quantize_gives_no_voice_to_nan_and_inf(kind, dtype):
    values = torch.tensor([[math.nan, math.inf, -math.inf, 1.5]], dtype=dtype)
    q = vote.quantize(values, kind, torch.ones(4), torch.full((4,), 65535, dtype=torch.int32))
    assert q[0, :3].tolist() == [0, 0, 0]
    assert int(q[0, 3]) > 0
    assert q.dtype == torch.int8


def test_quantize_lets_the_first_value_of_a_silent_feature_count_in_full():
    q = vote.quantize(torch.tensor([[1e-4, 0.0]]), "int8", torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert q.tolist() == [[127, 0]]


@pytest.mark.parametrize(("kind", "least"), [("ternary", 0.9), ("int4", 0.99), ("int8", 0.999)])
def test_stochastic_votes_point_along_the_normalised_gradient(kind, least):
    x = torch.randn(800, 31)
    delta = x @ torch.randn(31, 23)
    x, delta = x * torch.logspace(-2, 2, 31), delta * torch.logspace(1, -3, 23)
    ballot = ballot_of(kind)
    cast(ballot, x, delta)
    wanted = (delta / delta.square().mean(0).sqrt()).T @ (x / x.square().mean(0).sqrt())
    cosine = torch.nn.functional.cosine_similarity(ballot.votes.float().flatten(), wanted.flatten(), dim=0)
    assert cosine > least


def test_running_rms_is_renewed_once_a_step():
    ballot = ballot_of("int4")
    first = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(2)]
    cast(ballot, *first[0])
    start = ballot.x_rms.clone(), ballot.delta_rms.clone()
    assert torch.allclose(start[0], first[0][0].square().mean(0).sqrt())
    cast(ballot, *first[1])
    assert torch.equal(ballot.x_rms, start[0])  # one scale for all micro-batches of a step

    vote.renew([ballot])

    for index, (rms, old) in enumerate(zip((ballot.x_rms, ballot.delta_rms), start, strict=True)):
        square = torch.stack([batch[index].square().mean(0) for batch in first]).mean(0)
        assert torch.allclose(rms, (0.9 * old.square() + 0.1 * square).sqrt())
    assert (ballot.votes, ballot.tokens, ballot.batches) == (None, 0, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25], ids=str)
def test_running_rms_stays_finite_whatever_delta_holds(bad):
    ballot = ballot_of("int8")
    delta = torch.randn(6, 3)
    delta[2, 1] = bad
    cast(ballot, torch.randn(6, 4), delta)
    vote.renew([ballot])
    assert ballot.delta_rms.isfinite().all()
    assert ballot.x_rms.isfinite().all()


def test_votes_neither_read_nor_move_the_global_generator(rng_untouched):
    x, delta = torch.randn(12, 7), torch.randn(12, 5)
    first, again = ballot_of("int8"), ballot_of("int8")
    cast(first, x, delta)
    torch.manual_seed(1)
    with rng_untouched():
        cast(again, x, delta)
    assert torch.equal(first.votes, again.votes)


# ---------------------------------------------------------------------------------------------------- the product


@pytest.mark.parametrize("tokens", [1, 63, 1040, 1041, 2500], ids="{}tokens".format)
@pytest.mark.parametrize("fill", ["random", "all 127"])
def test_tally_is_exact(tokens, fill):
    x, delta = torch.randint(-127, 128, (tokens, 13)), torch.randint(-127, 128, (tokens, 7))
    if fill == "all 127":
        x.fill_(127)
        delta.fill_(-127)
    votes = vote.tally(x.to(torch.int8), delta.to(torch.int8), 127)
    assert votes.dtype == torch.int32
    assert torch.equal(votes.to(torch.int64), delta.T @ x)


def test_tally_counts_in_int64_where_int32_would_overflow():
    tokens = 133_200  # · 127² > 2^31
    x, delta = torch.full((tokens, 2), 127, dtype=torch.int8), torch.full((tokens, 3), -127, dtype=torch.int8)
    votes = vote.tally(x, delta, 127)
    assert votes.tolist() == [[-tokens * 127**2] * 2] * 3


def test_ballot_goes_over_to_int64_before_many_micro_batches_overflow():
    ballot = ballot_of("int8", votes=torch.full((3, 4), 2**31 - 5, dtype=torch.int32), tokens=2**31 // 127**2,
                       x_rms=torch.ones(4), delta_rms=torch.ones(3))
    cast(ballot, torch.full((2, 4), 100.0), torch.full((2, 3), 100.0))
    assert ballot.votes.tolist() == [[2**31 - 5 + 2 * 127**2] * 4] * 3


@pytest.mark.parametrize("groups", [[slice(0, 3)], [slice(0, 2), slice(2, 3)]], ids=["one group", "two groups"])
def test_ballot_counts_the_pieces_of_one_large_batch_in_int64(groups):
    """A convolution's batch comes in pieces, none of which need overflow by itself."""
    half = 70_000  # 2 · 70,000 · 127² > 2^31
    ballot = ballot_of("int8", x_rms=torch.ones(2), delta_rms=torch.ones(3))
    x = torch.full((half, 2), 127, dtype=torch.int8)
    ballot.cast(lambda q: [(rows, x, part[:, rows]) for part in q.split(half) for rows in groups], None,
                torch.full((2 * half, 3), 100.0), (3, 2), 1)
    assert ballot.votes.tolist() == [[2 * half * 127**2] * 2] * 3


# -------------------------------------------------------------------------------------------- one voice a sequence


@pytest.mark.parametrize("mask", ["none", "literal"])
def test_sequence_votes_equal_a_plain_loop(mask):
    samples, tokens, features, out = 6, 5, 8, 7
    x, delta = torch.randn(samples * tokens, features), torch.randn(samples * tokens, out)
    levels = torch.randint(-1, 2, (out, features), dtype=torch.int8)
    ballot = ballot_of("sign", sample="sequence", mask=mask)
    cast(ballot, x, delta, sequence=tokens, levels=levels)

    def q(values: torch.Tensor, purpose: int) -> list[list[int]]:
        noise = noise16(values.numel(), seed=77, step=3, stream=3 * 5 + purpose)
        return vote.quantize(values, "int8", values.square().mean(0).sqrt(), noise).tolist()

    q_x, q_delta = q(x, 1), q(delta, 2)
    expected = [[0] * features for _ in range(out)]
    for start in range(0, samples * tokens, tokens):
        for o in range(out):
            for i in range(features):
                voice = reference.sign(sum(q_delta[t][o] * q_x[t][i] for t in range(start, start + tokens)))
                if mask == "none" or voice * int(levels[o, i]) < 0:
                    expected[o][i] += voice
    assert ballot.votes.tolist() == expected
    assert ballot.votes.any()


def test_sequence_votes_are_the_sign_of_the_sequences_gradient():
    x, delta = torch.randn(40, 6, 12), torch.randn(40, 6, 9)
    ballot = ballot_of("sign", sample="sequence")
    cast(ballot, x.flatten(0, 1), delta.flatten(0, 1), sequence=6)
    wanted = torch.einsum("bto,bti->boi", delta, x).sign().sum(0)
    assert (ballot.votes - wanted).abs().float().mean() < 2  # of at most 40 voices; 8 bits blur only what is near 0
    assert int(ballot.votes.abs().max()) <= 40


def test_sequence_votes_leave_single_tokens_and_other_codes_alone():
    assert not ballot_of("sign", sample="sequence").speaks_per_sequence(1)
    assert not ballot_of("int8", sample="sequence").speaks_per_sequence(9)
    assert not ballot_of("sign", sample="token").speaks_per_sequence(9)
    assert ballot_of("sign", sample="sequence").speaks_per_sequence(9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_single_tokens_vote_by_signs_also_after_sequences(device):
    """The sequences left a running rms; signs have no scale that it could set."""
    x, delta = torch.randn(12, 8, device=device), torch.randn(12, 5, device=device)
    ballot = ballot_of("sign", sample="sequence")
    cast(ballot, x, delta, sequence=4)
    ballot.discard()
    assert ballot.x_rms is not None
    cast(ballot, x, delta, sequence=1)
    assert torch.equal(ballot.votes.cpu(), (delta.sign().t() @ x.sign()).int().cpu())


# ---------------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_quantize_equals_the_reference(kind):
    code = CODES[kind]
    x = torch.randn(37, 11) * 2
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    rms = torch.rand(11) + 0.2
    noise = noise16(x.numel(), seed=5, step=2, stream=1).view(37, 11)
    expected = torch.tensor([[reference.quantize(a, s, n, largest=code.largest, reach=code.reach)
                              for a, s, n in zip(row, rms.tolist(), line, strict=True)]
                             for row, line in zip(x.tolist(), noise.tolist(), strict=True)])
    off = (vote.quantize(x, kind, rms, noise) - expected).abs()
    # float32 against float64: where the noise falls between the two, the neighbour is chosen.
    assert off.max() <= 1
    assert off.sum() <= 1


def test_sequence_votes_equal_the_reference():
    # Sizes that int8 keeps exactly: whole numbers up to 127, an rms of 4/127 times 1, no noise in what is whole.
    x, delta = torch.randint(-9, 10, (6, 5, 4)).float(), torch.randint(-9, 10, (6, 5, 3)).float()
    rms = 127 / CODES["int8"].reach
    ballot = ballot_of("sign", "sequence", x_rms=torch.full((4,), rms), delta_rms=torch.full((3,), rms))
    cast(ballot, x.flatten(0, 1), delta.flatten(0, 1), sequence=5)
    assert ballot.votes.tolist() == reference.votes_by_sequence(x.tolist(), delta.tolist())
