"""Votes: x and grad_output become small integers, their product is exact, and an accumulator keeps it until the step."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gft import ops, reference
from gft.ops import Quantized
from gft.philox import NoiseKey, noise8
from gft.votes import Along, Int4, Int8, Sign, Ternary, Vote, VoteAccumulator, count_votes, fixed_point_factors, renew

KEY = NoiseKey(seed=77, step=3, stream=16, call=1)
stochastic = pytest.mark.parametrize("vote", [Ternary(), Int4(), Int8()], ids=lambda vote: type(vote).__name__)
# (tokens, out, in)
odd_shapes = pytest.mark.parametrize("size", [(1, 1, 9), (7, 5, 13), (33, 17, 8)], ids="{0[0]}tokens-{0[1]}x{0[2]}".format)


def accumulator(vote: Vote, x_rms: torch.Tensor | None = None, grad_rms: torch.Tensor | None = None) -> VoteAccumulator:
    """Of layer 5 in step 3."""
    votes = VoteAccumulator(vote, seed=77, number=5)
    votes.step, votes.x_rms, votes.grad_rms = 3, x_rms, grad_rms
    return votes


def cast(votes: VoteAccumulator, x: torch.Tensor, grad: torch.Tensor, sequence: int = 1,
         levels: torch.Tensor | None = None) -> torch.Tensor | None:
    """One forward and backward pass of a linear layer, as the layer does it."""
    (_, quantized_x), (_, quantized_grad) = votes.quantize_x(x, sequence, True), votes.quantize_grad(grad, sequence)
    along = None if levels is None else Along(levels, 1.0)
    return votes.cast(lambda q_grad: [(slice(None), quantized_x.q, q_grad)], quantized_x, quantized_grad,
                      (grad.shape[1], x.shape[1]), sequence, along)


def quantized(values: torch.Tensor, vote: Vote, rms: torch.Tensor, key: NoiseKey = KEY) -> torch.Tensor:
    return ops.quantize(values, fixed_point_factors(vote, rms) if vote.has_scale else None, vote.largest, key).q


def with_odd_values(shape: tuple[int, int]) -> torch.Tensor:
    """Gaussian numbers with a tenth each of 0, NaN and ±inf among them."""
    values = torch.randn(shape)
    where = torch.rand(shape)
    for index, odd in enumerate((0.0, math.nan, math.inf, -math.inf)):
        values[(where > 0.1 * index) & (where < 0.1 * (index + 1))] = odd
    return values


# ---------------------------------------------------------------------------------------------------- signs


@odd_shapes
def test_sign_votes_equal_the_reference(size):
    tokens, out, features = size
    x, grad = with_odd_values((tokens, features)), with_odd_values((tokens, out))
    votes = accumulator(Sign())
    cast(votes, x, grad)
    assert votes.votes.tolist() == reference.votes(x.tolist(), grad.tolist())


@given(st.lists(st.tuples(*[st.floats(width=32)] * 5), min_size=1, max_size=6))
def test_sign_votes_equal_the_reference_for_any_floats(rows):
    x, grad = torch.tensor(rows)[:, :3], torch.tensor(rows)[:, 3:]
    votes = accumulator(Sign())
    cast(votes, x, grad)
    assert votes.votes.tolist() == reference.votes(x.tolist(), grad.tolist())


@odd_shapes
def test_literal_mask_equals_the_reference(size):
    tokens, out, features = size
    x, grad = with_odd_values((tokens, features)), with_odd_values((tokens, out))
    levels = torch.randint(-3, 4, (out, features), dtype=torch.int8)
    votes = accumulator(Sign(literal_mask=True))
    cast(votes, x, grad, levels=levels)
    assert votes.votes.tolist() == reference.votes_literal(x.tolist(), grad.tolist(), levels.tolist())


def test_literal_mask_only_lets_weights_grow():
    x, grad, levels = torch.randn(40, 30), torch.randn(40, 20), torch.randint(-1, 2, (20, 30), dtype=torch.int8)
    votes = accumulator(Sign(literal_mask=True))
    cast(votes, x, grad, levels=levels)
    assert (votes.votes.sign() * levels <= 0).all()  # w moves against its votes, so away from 0
    assert not votes.votes[levels == 0].any()
    assert votes.votes.any()


def test_sign_votes_of_four_micro_batches_equal_those_of_one_batch():
    x, grad = torch.randn(20, 13), torch.randn(20, 9)
    whole, parts = accumulator(Sign()), accumulator(Sign())
    cast(whole, x, grad)
    for index in (2, 0, 3, 1):
        cast(parts, x[5 * index : 5 * index + 5], grad[5 * index : 5 * index + 5])
    assert torch.equal(whole.votes, parts.votes)
    assert whole.tokens == parts.tokens == whole.bound == parts.bound == 20


# ---------------------------------------------------------------------------------------------------- stochastic rounding


@stochastic
def test_quantize_rounds_as_the_reference_does(vote):
    values, rms = 2 * torch.randn(7, 31), torch.rand(31) + 0.5
    values[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.6 / 65536 * rms[3] * vote.reach / vote.largest])
    noise = (noise8(7, 31, KEY) * 256 + 128).flatten().tolist()
    fixed = values * (rms.reciprocal() * vote.unit)  # one float32 product, cut off: what follows is exact
    expected = [0 if not math.isfinite(a) else reference.stochastic_round(Fraction(int(a), 65536), n)
                for a, n in zip(fixed.flatten().tolist(), noise, strict=True)]
    q = quantized(values, vote, rms).flatten().tolist()
    assert q == [max(-vote.largest, min(vote.largest, e)) for e in expected]


@stochastic
def test_quantize_equals_the_reference(vote):
    x, rms = 2 * torch.randn(37, 11), torch.rand(11) + 0.2
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    noise = noise8(37, 11, KEY) * 256 + 128
    expected = [[reference.quantize(a, s, n, largest=vote.largest, reach=vote.reach)
                 for a, s, n in zip(row, rms.tolist(), line, strict=True)]
                for row, line in zip(x.tolist(), noise.tolist(), strict=True)]
    off = (quantized(x, vote, rms) - torch.tensor(expected)).abs()
    # float32 against float64: where the noise falls between the two, the neighbour is chosen.
    assert off.max() <= 1
    assert off.sum() <= 1


@stochastic
def test_quantize_has_the_right_mean(vote):
    rms = torch.tensor([0.5, 2.0, 3e-6, 1e4, 1.0])
    expected = torch.tensor([0.3, -1.7, 0.001, 2.2, -0.6], dtype=torch.float64) * vote.largest / vote.reach
    values = (expected * vote.reach / vote.largest * rms).float()
    q = quantized(values.expand(65536, 5), vote, rms).double()
    assert torch.allclose(q.mean(0), expected, atol=0.01)  # five times the deviation of such a mean
    assert (q - expected).abs().max() < 1


@stochastic
def test_quantize_clips_at_the_largest(vote):
    values = torch.tensor([[1e6, -1e6, 3e38, 17.0, -17.0, 0.0]])
    for step in range(3):
        q = quantized(values, vote, torch.ones(6), NoiseKey(1, step, 2))
        assert q.tolist() == [[vote.largest, -vote.largest, vote.largest, vote.largest, -vote.largest, 0]]


@pytest.mark.parametrize(("vote", "dtype"), [(Sign(), torch.bfloat16), (Ternary(), torch.float16), (Int4(), torch.float64),
                                             (Int8(), torch.float32), (Int8(), torch.bfloat16)], ids=str)
def test_nan_and_inf_cast_no_vote_and_are_counted(vote, dtype):
    values = torch.tensor([[math.nan, math.inf, -math.inf, 1.5]], dtype=dtype).expand(50, 4)
    factors = fixed_point_factors(vote, torch.ones(4)) if vote.has_scale else None
    count = torch.tensor(7)
    q = ops.quantize(values, factors, vote.largest, KEY, count).q
    assert q.dtype == torch.int8
    assert not q[:, :3].any()
    assert q[:, 3].float().mean() > 0.3
    assert int(count) == 7 + 150


def test_the_first_value_of_a_feature_that_was_always_zero_counts_in_full():
    assert quantized(torch.tensor([[1e-4, 0.0]]), Int8(), torch.zeros(2)).tolist() == [[127, 0]]


@pytest.mark.parametrize(("vote", "least"), [(Ternary(), 0.9), (Int4(), 0.99), (Int8(), 0.999)], ids=str)
def test_stochastic_votes_point_along_the_normalised_gradient(vote, least):
    x = torch.randn(800, 31)
    grad = x @ torch.randn(31, 23)
    x, grad = x * torch.logspace(-2, 2, 31), grad * torch.logspace(1, -3, 23)
    votes = accumulator(vote)
    cast(votes, x, grad)
    wanted = (grad / grad.square().mean(0).sqrt()).T @ (x / x.square().mean(0).sqrt())
    assert torch.nn.functional.cosine_similarity(votes.votes.float().flatten(), wanted.flatten(), dim=0) > least


@stochastic
def test_votes_tell_what_larger_weights_would_do_to_the_loss(vote):
    """cast returns an estimate of sum(gradient · levels), by which a layer's gain learns."""
    x, levels = torch.randn(2000, 31), torch.randint(-7, 8, (23, 31), dtype=torch.int8)
    x, grad = x * torch.logspace(-1, 1, 31), (x @ torch.randn(31, 23)) * torch.logspace(1, -1, 23)
    estimates = []
    for seed in range(16):
        votes = accumulator(vote)
        votes.seed = seed
        estimates.append(float(cast(votes, x, grad, levels=levels)))
    gradient, found = grad.T @ x, torch.tensor(estimates)
    scatter = float((gradient.square() * levels.float().square()).sum().sqrt())
    # Four times the deviation of such a mean, and what is cut off at the largest.
    assert float(found.mean()) == pytest.approx(float((gradient * levels).sum()), abs=float(found.std()) + 0.05 * scatter)
    assert found.std() < {"Ternary": 0.5, "Int4": 0.1, "Int8": 0.01}[type(vote).__name__] * scatter


# ---------------------------------------------------------------------------------------------------- running scales


def test_running_rms_is_renewed_once_a_step():
    votes = accumulator(Int4())
    batches = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(2)]
    cast(votes, *batches[0])
    start = votes.x_rms.clone(), votes.grad_rms.clone()
    assert torch.allclose(start[0], batches[0][0].square().mean(0).sqrt())
    cast(votes, *batches[1])
    assert torch.equal(votes.x_rms, start[0])  # one scale for all micro-batches of a step

    renew([votes])

    for index, (rms, old) in enumerate(zip((votes.x_rms, votes.grad_rms), start, strict=True)):
        square = torch.stack([batch[index].square().mean(0) for batch in batches]).mean(0)
        assert torch.allclose(rms, (0.9 * old.square() + 0.1 * square).sqrt())
    assert votes.votes is None
    assert votes.tokens == votes.bound == 0


def test_votes_after_a_step_are_cast_on_the_renewed_scale():
    """The factors are kept from call to call, so they must be renewed with the rms that they are of."""
    votes, x, grad = accumulator(Int8()), torch.randn(9, 4), torch.randn(9, 3)
    cast(votes, x, grad)
    cast(votes, 3 * x, grad)
    renew([votes])
    other = accumulator(Int8())
    other.x_rms, other.grad_rms = votes.x_rms.clone(), votes.grad_rms.clone()
    cast(votes, 5 * x, grad)
    cast(other, 5 * x, grad)
    assert torch.equal(votes.votes, other.votes)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25], ids=str)
def test_running_rms_stays_finite_whatever_grad_output_holds(bad):
    votes, grad = accumulator(Int8()), torch.randn(6, 3)
    grad[2, 1] = bad
    cast(votes, torch.randn(6, 4), grad)
    renew([votes])
    assert votes.grad_rms.isfinite().all()
    assert votes.x_rms.isfinite().all()


@pytest.mark.parametrize(("name", "scale"), [("x_rms", torch.ones(5)), ("grad_rms", torch.ones(3, dtype=torch.float64)),
                                             ("second_moment", torch.ones(12)), ("x_rms", torch.ones(2, 2)),
                                             ("grad_rms", -torch.ones(3)), ("second_moment", torch.full((11,), math.nan))],
                         ids=["length", "type", "second moment", "shape", "negative", "NaN"])
def test_running_scales_that_do_not_fit_the_weight_are_refused(name, scale, refuses):
    votes = accumulator(Int8())
    votes.check_state(4, (3, 7))
    setattr(votes, name, scale)
    with refuses(ValueError, f"a {name} .*load"):
        votes.check_state(4, (3, 7))


# ---------------------------------------------------------------------------------------------------- random numbers


def test_votes_neither_read_nor_move_the_global_generator(rng_untouched):
    x, grad = torch.randn(12, 7), torch.randn(12, 5)
    first, again = accumulator(Int8()), accumulator(Int8())
    cast(first, x, grad)
    torch.manual_seed(1)
    with rng_untouched():
        cast(again, x, grad)
    assert torch.equal(first.votes, again.votes)


def test_each_use_of_a_layer_draws_new_noise():
    """Several times in one forward pass, or from micro-batch to micro-batch; an evaluation in between changes nothing."""
    x, grad = torch.randn(40, 7), torch.randn(40, 5)
    at_once, in_turn = (accumulator(Int4(), torch.ones(7), torch.ones(5)) for _ in range(2))
    first, second = (at_once.quantize_x(x, 1, training=True)[1].q for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(in_turn.quantize_x(x, 1, training=False)[1].q, first)
    cast(in_turn, x, grad)
    assert torch.equal(in_turn.quantize_x(x, 1, training=True)[1].q, second)


def test_each_rank_draws_noise_of_its_own():
    x, drawn = torch.randn(40, 7), []
    for rank in range(3):
        votes = accumulator(Int4(), torch.ones(7), torch.ones(5))
        votes.rank, votes.world = rank, 3
        drawn += [votes.quantize_x(x, 1, training=True)[1].q.flatten().tolist() for _ in range(2)]
    assert len({tuple(one) for one in drawn}) == 6


# ---------------------------------------------------------------------------------------------------- the product


@pytest.mark.parametrize(("tokens", "fill"), [(1, None), (63, 127), (1040, None), (1041, 127), (2500, None)])
def test_votes_are_counted_exactly(tokens, fill):
    x, grad = torch.randint(-127, 128, (tokens, 13)), torch.randint(-127, 128, (tokens, 7))
    if fill is not None:
        x.fill_(fill)
        grad.fill_(-fill)
    votes = count_votes(x.to(torch.int8), grad.to(torch.int8), 127)
    assert votes.dtype == torch.int32
    assert torch.equal(votes.to(torch.int64), grad.T @ x)


def test_votes_are_counted_in_int64_where_int32_would_overflow():
    tokens = 133_200  # · 127² > 2^31
    x, grad = torch.full((tokens, 2), 127, dtype=torch.int8), torch.full((tokens, 3), -127, dtype=torch.int8)
    assert count_votes(x, grad, 127).tolist() == [[-tokens * 127**2] * 2] * 3


def test_votes_of_many_micro_batches_go_over_to_int64_before_they_overflow():
    votes = accumulator(Int8(), torch.ones(4), torch.ones(3))
    votes.votes, votes.tokens = torch.full((3, 4), 2**31 - 5, dtype=torch.int32), 2**31 // 127**2
    cast(votes, torch.full((2, 4), 100.0), torch.full((2, 3), 100.0))
    assert votes.votes.tolist() == [[2**31 - 5 + 2 * 127**2] * 4] * 3


@pytest.mark.parametrize("groups", [[slice(0, 3)], [slice(0, 2), slice(2, 3)]], ids=["one group", "two groups"])
def test_the_pieces_of_one_large_batch_are_counted_in_int64(groups):
    """A convolution's batch comes in pieces, none of which need overflow by itself."""
    half = 70_000  # 2 · 70,000 · 127² > 2^31
    votes = accumulator(Int8(), torch.ones(2), torch.ones(3))
    x = torch.full((half, 2), 127, dtype=torch.int8)
    _, grad = votes.quantize_grad(torch.full((2 * half, 3), 100.0), 1)
    votes.cast(lambda q: [(rows, x, part[:, rows]) for part in q.split(half) for rows in groups], Quantized(x, None), grad,
               (3, 2), 1)
    assert votes.votes.tolist() == [[2 * half * 127**2] * 2] * 3


# ---------------------------------------------------------------------------------------------------- one vote a sequence


@pytest.mark.parametrize("literal_mask", [False, True], ids=["no mask", "literal mask"])
def test_sequence_votes_equal_a_plain_loop(literal_mask):
    samples, tokens, features, out = 6, 5, 8, 7
    x, grad = torch.randn(samples * tokens, features), torch.randn(samples * tokens, out)
    levels = torch.randint(-1, 2, (out, features), dtype=torch.int8)
    votes = accumulator(Sign(per="sequence", literal_mask=literal_mask))
    cast(votes, x, grad, sequence=tokens, levels=levels)

    def q(values: torch.Tensor, purpose: int) -> list[list[int]]:
        return quantized(values, Int8(), values.square().mean(0).sqrt(), NoiseKey(77, 3, stream=3 * 5 + purpose)).tolist()

    q_x, q_grad = q(x, 1), q(grad, 2)
    expected = [[0] * features for _ in range(out)]
    for start in range(0, samples * tokens, tokens):
        for o in range(out):
            for i in range(features):
                vote = reference.sign(sum(q_grad[t][o] * q_x[t][i] for t in range(start, start + tokens)))
                if not literal_mask or vote * int(levels[o, i]) < 0:
                    expected[o][i] += vote
    assert votes.votes.tolist() == expected
    assert votes.votes.any()
    assert votes.bound == samples


def test_sequence_votes_equal_the_reference():
    # Whole numbers on a scale where int8 keeps them exactly: no noise in what is whole.
    x, grad = torch.randint(-9, 10, (6, 5, 4)).float(), torch.randint(-9, 10, (6, 5, 3)).float()
    rms = Int8.largest / Int8.reach
    votes = accumulator(Sign(per="sequence"), torch.full((4,), rms), torch.full((3,), rms))
    cast(votes, x.flatten(0, 1), grad.flatten(0, 1), sequence=5)
    assert votes.votes.tolist() == reference.votes_by_sequence(x.tolist(), grad.tolist())


def test_sequence_votes_are_the_sign_of_the_sequences_gradient():
    x, grad = torch.randn(40, 6, 12), torch.randn(40, 6, 9)
    votes = accumulator(Sign(per="sequence"))
    cast(votes, x.flatten(0, 1), grad.flatten(0, 1), sequence=6)
    wanted = torch.einsum("bto,bti->boi", grad, x).sign().sum(0)
    assert (votes.votes - wanted).abs().float().mean() < 2  # of at most 40; 8 bits blur only what is near 0
    assert int(votes.votes.abs().max()) <= 40


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_single_tokens_vote_by_signs_also_after_sequences(device):
    """The sequences left a running rms; signs have no scale that it could set."""
    x, grad = torch.randn(12, 8, device=device), torch.randn(12, 5, device=device)
    votes = accumulator(Sign(per="sequence"))
    cast(votes, x, grad, sequence=4)
    renew([votes])
    assert votes.x_rms is not None
    cast(votes, x, grad, sequence=1)
    assert torch.equal(votes.votes.cpu(), (grad.sign().t() @ x.sign()).int().cpu())
