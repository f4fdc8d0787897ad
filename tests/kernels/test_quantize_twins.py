"""x and grad_output as small integers: C and Triton give the definition's numbers."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import KEY, random_stored

from gft import ops
from gft.philox import NoiseKey
from gft.storage import Storage

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # as on a GPU, and mended there, too
SHAPES = [pytest.param((1, 64), 7, torch.float32, id="row"), pytest.param((63, 65), 127, torch.bfloat16, id="odd"),
          pytest.param((130, 97), 1, torch.float32, id="blocks"), pytest.param((131, 72), 127, torch.float16, id="eights"),
          pytest.param((144, 128), 7, torch.bfloat16, id="even"), pytest.param((329, 8), 127, torch.float32, id="chunks")]


def random_values(shape, dtype):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3
    values[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    if dtype is not torch.float16:
        values[0, 3] = 1e25  # its square is too large for float32
    return values.to(dtype)


@pytest.mark.parametrize(("shape", "largest", "dtype"), SHAPES)
def test_values_are_rounded_as_the_definition_says(backend, shape, largest, dtype):
    values = random_values(shape, dtype)
    factors = (torch.rand(shape[1], generator=torch.Generator().manual_seed(4)) + 0.1) * largest * 20000
    factors[5] = 0
    expected = ops.quantize.definition(values, factors, largest, KEY)
    bad = torch.tensor(5, device=backend.device)
    got = backend.quantize(values.to(backend.device), factors.to(backend.device), largest, KEY, bad)
    assert torch.equal(got.q.cpu(), expected.q)
    assert expected.q.any()
    assert int(expected.q.abs().max()) <= largest
    torch.testing.assert_close(got.squares.sum(0).cpu(), expected.squares.sum(0), rtol=1e-5, atol=0)
    assert int(bad) == 5 + 3


@pytest.mark.parametrize(("shape", "dtype"), [((1, 64), torch.float32), ((63, 65), torch.bfloat16),
                                              ((144, 72), torch.float32)], ids=str)
def test_signs_equal_the_definition(triton_twins, shape, dtype):
    values = random_values(shape, dtype).round()
    bad = torch.tensor(0, device=triton_twins.device)
    got = triton_twins.quantize(values.to(triton_twins.device), None, 1, KEY, bad)
    assert torch.equal(got.q.cpu(), ops.quantize.definition(values, None, 1, KEY).q)
    assert got.squares is None
    assert int(bad) == 3
    again = triton_twins.quantize(values.to(triton_twins.device), None, 1, KEY)
    assert torch.equal(again.q, got.q)


def test_a_step_on_the_device_gives_the_same_numbers(backend):
    values, factors = random_values((9, 24), torch.float32).to(backend.device), torch.full((24,), 1e5, device=backend.device)
    there = replace(KEY, step=torch.tensor(77, device=backend.device))
    assert torch.equal(backend.quantize(values, factors, 7, there).q, backend.quantize(values, factors, 7, KEY).q)


@pytest.mark.parametrize("threads", [2, 3])
def test_c_gives_the_same_whatever_the_threads(c_twins, threads, monkeypatch):
    values, factors = random_values((300, 77), torch.float32), torch.full((77,), 1e6)
    one = c_twins.quantize(values, factors, 127, KEY)
    monkeypatch.setattr("gft.ops.native.threads.LEAST_A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    other = c_twins.quantize(values, factors, 127, KEY)
    assert torch.equal(one.q, other.q)
    assert torch.equal(one.squares, other.squares)


def test_no_values_have_mean_square_zero():
    got = ops.quantize(torch.zeros(0, 5), torch.ones(5), 7, KEY)
    assert got.q.shape == (0, 5)
    mean = torch.empty(5)
    ops.take_mean(got.squares, 0, mean, False)
    assert mean.tolist() == [0.0] * 5


@pytest.mark.parametrize("shape", [(1, 1), (5, 64), (131, 77)], ids=str)
def test_means_are_taken_of_the_sums_over_runs_of_tokens(triton_twins, shape):
    squares, old = torch.rand(shape), torch.rand(shape[1])
    for add in (False, True):
        mean = old.clone().to(triton_twins.device)
        assert triton_twins.take_mean(squares.to(triton_twins.device), 300, mean, add) is None
        torch.testing.assert_close(mean.cpu(), squares.sum(0) / 300 + (old if add else 0))


@pytest.mark.parametrize(("rows", "columns", "tokens"), [(5, 7, 33), (70, 130, 300), (64, 256, 2100)])
def test_means_taken_beside_the_votes_are_the_same(triton_twins, rows, columns, tokens):
    device = triton_twins.device
    grad, x = (torch.randint(-127, 128, (tokens, size), dtype=torch.int8) for size in (rows, columns))
    of_x, of_grad = torch.rand(9, columns), torch.rand(40, rows)
    means = [ops.MeanSquare(of_x.to(device), tokens, torch.ones(columns, device=device), True),
             ops.MeanSquare(of_grad.to(device), 7, torch.empty(rows, device=device), False)]
    votes = triton_twins.votes_product(grad.to(device), x.to(device), means=means)
    assert torch.equal(votes.cpu(), grad.int().t() @ x.int())
    torch.testing.assert_close(means[0].mean.cpu(), of_x.sum(0) / tokens + 1)
    torch.testing.assert_close(means[1].mean.cpu(), of_grad.sum(0) / 7)


@pytest.mark.parametrize(("shape", "rows", "storage", "dtype"), [
    ((144, 72), 33, Storage(4), torch.float32), ((5, 130), 3, Storage(2, memory=False), torch.float16),
    ((200, 1030), 7, Storage(3, memory=False), torch.float32)], ids=str)
def test_a_weight_read_out_beside_values_is_the_same(triton_twins, shape, rows, storage, dtype):
    device, (_, columns) = triton_twins.device, shape
    values, factors = random_values(shape, torch.float32).to(dtype), torch.full((columns,), 1e5)
    stored, scales = random_stored(storage, (rows, columns)), torch.rand(rows, 2) + 0.1
    wanted = ops.read_and_quantize.definition(ops.StoredWeight(stored, storage, columns, dtype, ops.Scaling(scales)), values,
                                              factors, 127, KEY)
    there = ops.StoredWeight(stored.to(device), storage, columns, dtype, ops.Scaling(scales.to(device)))
    for values_there in (values.to(device), torch.cat([values[:1], values]).to(device)[1:]):  # and where it is not aligned
        bad = torch.tensor(5, device=device)
        weight, got = triton_twins.read_and_quantize(there, values_there, factors.to(device), 127, KEY, bad)
        assert torch.equal(weight.cpu(), wanted[0])
        assert torch.equal(got.q.cpu(), wanted[1].q)
        torch.testing.assert_close(got.squares.sum(0).cpu(), wanted[1].squares.sum(0), rtol=1e-5, atol=0)
        assert int(bad) == 5 + int((~torch.isfinite(values)).sum())


def test_what_was_made_ready_once_serves_again_and_other_values_are_looked_at_anew(triton_twins):
    """On a GPU the third call and those after it launch what the first ones found; here the device counts the steps."""
    device, storage = triton_twins.device, Storage(4)
    stored, factors, log_gain = random_stored(storage, (33, 72)), torch.full((72,), 1e5), torch.tensor([0.02])
    scaling = ops.Scaling(None, log_gain, 0.3, 72**0.5)
    weight = ops.StoredWeight(stored, storage, 72, torch.float32, scaling)
    there = ops.StoredWeight(stored.to(device), storage, 72, torch.float32, scaling._replace(log_gain=log_gain.to(device)))
    step, bad = torch.tensor(0, device=device), torch.tensor(0, device=device)
    run = triton_twins.preparer(there, torch.empty(144, 72, device=device), factors.to(device), 127, bad)
    not_finite = 0
    for number, tokens in enumerate((144, 144, 144, 80, 144, 144)):
        step.fill_(number)
        values = random_values((tokens, 72), torch.float32)
        not_finite += int((~torch.isfinite(values)).sum())
        wanted = ops.read_and_quantize.definition(weight, values, factors, 127, NoiseKey(7, number, 5, number))
        # The fifth begins where no 16 bytes can be read at a time, the last lies the other way round.
        lies = torch.cat([values[:1, :1].flatten(), values.flatten()]).to(device)[1:].view(tokens, 72) if number == 4 else (
            values.to(device).t().contiguous().t() if number == 5 else values.to(device))
        read, got = run(lies, NoiseKey(7, step, 5, number))
        assert torch.equal(read.cpu(), wanted[0])
        assert torch.equal(got.q.cpu(), wanted[1].q)
        torch.testing.assert_close(got.squares.sum(0).cpu(), wanted[1].squares.sum(0), rtol=1e-5, atol=0)
        assert int(bad) == not_finite


@pytest.mark.gpu
def test_more_tokens_than_a_grid_has_rows_are_rounded():
    """Convolutions have millions of output positions: 224² at a batch of 84."""
    values = torch.randn(65_536 * 64 + 100, 3, device="cuda")
    factors = torch.full((3,), 1e6, device="cuda")
    got = ops.quantize(values, factors, 127, KEY)
    expected = ops.quantize.definition(values, factors, 127, KEY)
    assert torch.equal(got.q, expected.q)
    torch.testing.assert_close(got.squares.sum(0), expected.squares.sum(0), rtol=1e-4, atol=0)
