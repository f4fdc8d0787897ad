"""Products of whole numbers by Triton and by C: tokens are rounded to the definition's, and multiplied as it multiplies."""

import math

import pytest
import torch
from kernel_cases import KEY, random_stored

from gft import ops
from gft.errors import UsageError
from gft.ops import Scaling
from gft.storage import Storage

eight_bits = pytest.mark.parametrize("dtype", [ops.INT8, ops.FP8], ids=["int8", "fp8"])


def random_tokens(shape, dtype=torch.float32):
    values = torch.randn(shape) * torch.exp(2 * torch.randn(shape))
    values[0], values[-1] = 0, values[-1] * 1e-36
    values[1, -1], values[2, 0] = math.nan, math.inf
    return values.to(dtype)


@eight_bits
@pytest.mark.parametrize(("shape", "float_type"), [((33, 64), torch.float32), ((5, 4100), torch.bfloat16),
                                                   ((9, 257), torch.float16)], ids=str)
def test_tokens_are_rounded_as_the_definition_does(triton_twins, dtype, shape, float_type):
    device, values = triton_twins.device, random_tokens(shape, float_type)
    gain = torch.tensor([0.01])
    for scaling, by_feature in ((Scaling(None, None, 0.37), None), (Scaling(None, gain, 0.37, 3.0), torch.rand(shape[1]))):
        wanted = ops.round_tokens.definition(values, dtype, scaling, by_feature)
        there = scaling._replace(log_gain=None if scaling.log_gain is None else gain.to(device))
        # The second time they do not lie side by side.
        for lie in (values.to(device), values.to(device).t().contiguous().t()):
            got = triton_twins.round_tokens(lie, dtype, there, None if by_feature is None else by_feature.to(device))
            assert got.q.dtype is dtype
            assert torch.equal(got.q.cpu().float(), wanted.q.float())
            torch.testing.assert_close(got.scale.cpu(), wanted.scale, rtol=1e-6, atol=0, equal_nan=True)


@eight_bits
@pytest.mark.parametrize(("shape", "result"), [((33, 64, 48), torch.bfloat16), ((5, 130, 17), torch.float32),
                                               ((140, 256, 144), torch.float32), ((3, 16, 16), torch.float16)], ids=str)
def test_products_are_those_of_the_definition(triton_twins, dtype, shape, result):
    device, (tokens, features, outputs) = triton_twins.device, shape
    here = ops.round_tokens.definition(torch.randn(tokens, features), dtype)
    there = ops.Tokens(here.q.to(device), here.scale.to(device))
    levels = torch.randint(-7, 8, (outputs, features)).to(dtype)
    for by_output in (None, torch.rand(outputs) + 0.1):
        got = triton_twins.multiply_tokens(there, levels.to(device), result, None if by_output is None else
                                           by_output.to(device))
        assert got.dtype is result
        wanted = ops.multiply_tokens.definition(here, levels, result, by_output)
        if device.type == "cuda" and dtype is ops.FP8:  # sums of these have 14 bits there
            assert (got.cpu() - wanted).float().norm() < 5e-3 * wanted.float().norm()
        else:
            torch.testing.assert_close(got.cpu(), wanted)


@pytest.mark.parametrize(("storage", "dtype"), [(Storage(2, memory=False), ops.INT8), (Storage(3, memory=False), ops.FP8),
                                                (Storage(4), ops.INT8), (Storage(5), ops.FP8)], ids=str)
def test_levels_are_read_out_in_eight_bits_and_turned(triton_twins, storage, dtype):
    """Alone, and beside values that are rounded for votes, whose bits are the same as beside floats."""
    device, stored = triton_twins.device, random_stored(storage, (35, 131))
    values, factors = torch.randn(20, 131).to(device), torch.full((131,), 1e5, device=device)
    weight = ops.StoredWeight(stored.to(device), storage, 131, torch.float32)
    _, wanted = triton_twins.read_and_quantize(weight, values, factors, 127, KEY)
    for turned in (False, True):
        levels = storage.levels(stored, 131).t() if turned else storage.levels(stored, 131)
        low = weight._replace(dtype=dtype, turned=turned)
        beside, got = triton_twins.read_and_quantize(low, values, factors, 127, KEY)
        assert torch.equal(got.q, wanted.q)
        for read in (triton_twins.float_levels(*low), beside):
            assert read.dtype is dtype
            assert read.is_contiguous()
            assert torch.equal(read.cpu().float(), levels.float())
        assert torch.equal(ops.float_levels.definition(*low).float().cpu(), levels.float())


def test_what_does_not_fit_together_is_refused_before_a_kernel_reads_it(triton_twins, refuses):
    device = triton_twins.device
    tokens = triton_twins.round_tokens(torch.randn(20, 32, device=device), ops.INT8)
    levels = torch.ones(16, 32, dtype=torch.int8, device=device)
    with refuses(UsageError, "the levels must be 16 × 32 of int8"):
        triton_twins.multiply_tokens(tokens, levels[:, :31], torch.float32)
    with refuses(UsageError, "the levels must be 16 × 32 of int8"):
        triton_twins.multiply_tokens(tokens, levels.to(ops.FP8), torch.float32)
    with refuses(UsageError, "the tokens' scales must be 20 of float32"):
        triton_twins.multiply_tokens(tokens._replace(scale=tokens.scale[1:]), levels, torch.float32)
    with refuses(UsageError, "the outputs' scales must be 16 of float32"):
        triton_twins.multiply_tokens(tokens, levels, torch.float32, tokens.scale)
    with refuses(UsageError, "the factors must be 32 of float32"):
        triton_twins.round_tokens(torch.randn(2, 32, device=device), ops.INT8, ops.PLAIN, tokens.scale)
    with refuses(UsageError, "the gain of a weight must be one float"):
        triton_twins.round_tokens(torch.randn(2, 32, device=device), ops.INT8, Scaling(log_gain=tokens.scale))
    assert triton_twins.round_tokens(torch.randn(2, 32, device=device).double(), ops.INT8) is NotImplemented
    assert triton_twins.multiply_tokens(tokens, levels, torch.float64) is NotImplemented


# ---------------------------------------------------------------------------------------------------- C

# tokens, features, outputs: single ones, whole tiles, one more and one less, more than a block and than a step of AMX.
SHAPES = [(5, 1, 1), (16, 64, 48), (17, 65, 49), (8, 4, 48), (33, 130, 100), (6, 2049, 17), (40, 63, 7)]
in_c = pytest.mark.parametrize("dtype", [ops.INT8, ops.FIXED], ids=["int8", "fixed"])


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request, monkeypatch):
    monkeypatch.setattr("gft.ops.native.threads.LEAST_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


@in_c
def test_c_rounds_tokens_to_the_same_bits(c_twins, threads, dtype):
    for shape in SHAPES:
        values, gain = random_tokens(shape[:2]), torch.tensor([0.01])
        for scaling, by_feature in ((ops.PLAIN, None), (Scaling(None, gain, 0.37, 3.0), torch.rand(shape[1]))):
            wanted = ops.round_tokens.definition(values, dtype, scaling, by_feature)
            for lie in (values, values.t().contiguous().t()):
                got = c_twins.round_tokens(lie, dtype, scaling, by_feature)
                assert got.q.dtype is dtype
                assert torch.equal(got.q, wanted.q), shape
                assert torch.equal(got.scale.nan_to_num(7), wanted.scale.nan_to_num(7)), shape


@in_c
def test_c_multiplies_tokens_to_the_same_bits(c_twins, threads, dtype):
    for tokens, features, outputs in SHAPES:
        rounded = ops.round_tokens.definition(torch.randn(tokens, features) * torch.exp(torch.randn(features)), dtype)
        levels = torch.randint(-7, 8, (outputs, features), dtype=torch.int8)
        for by_output in (None, torch.rand(outputs) + 0.1):
            wanted = ops.multiply_tokens.definition(rounded, levels, torch.float32, by_output)
            for lie in (levels, levels.t().contiguous().t()):
                got = c_twins.multiply_tokens(rounded, lie, torch.float32, by_output)
                assert torch.equal(got, wanted), (tokens, features, outputs)
        assert c_twins.multiply_tokens(rounded, levels, torch.bfloat16).dtype is torch.bfloat16


def test_the_largest_sums_of_fixed_point_are_exact(c_twins):
    """Digits of -128 and of 127, and levels of 8 bits."""
    q = torch.tensor([[127 * 65536, -127 * 65536, 127 * 257 + 127 * 65536, -128 * 257 - 126 * 65536]], dtype=torch.int32)
    tokens = ops.Tokens(q.repeat(3, 500), torch.ones(3))
    levels = torch.tensor([[127, -127, 127, -127], [-127] * 4], dtype=torch.int8).repeat(1, 500)
    wanted = (tokens.q.double() @ levels.double().t()).float()
    assert torch.equal(c_twins.multiply_tokens(tokens, levels, torch.float32), wanted)


def test_c_reads_levels_out_as_bytes(c_twins):
    for storage in (Storage(2, memory=False), Storage(3, memory=False), Storage(4), Storage(2), Storage(8, memory=False)):
        stored = random_stored(storage, (35, 131))
        got = c_twins.float_levels(stored, storage, 131, torch.int8)
        assert got.dtype is torch.int8
        assert torch.equal(got, storage.levels(stored, 131))


def test_c_refuses_what_does_not_fit_together(c_twins, refuses):
    tokens = c_twins.round_tokens(torch.randn(20, 32), ops.FIXED)
    levels = torch.ones(16, 32, dtype=torch.int8)
    with refuses(UsageError, "the levels must be 16 × 32 of int8"):
        c_twins.multiply_tokens(tokens, levels[:, :31], torch.float32)
    with refuses(UsageError, "the tokens' scales must be 20 of float32"):
        c_twins.multiply_tokens(tokens._replace(scale=tokens.scale[1:]), levels, torch.float32)
    with refuses(UsageError, "the factors must be 32 of float32"):
        c_twins.round_tokens(torch.randn(2, 32), ops.FIXED, ops.PLAIN, tokens.scale)
    assert c_twins.round_tokens(torch.randn(2, 32), ops.FP8) is NotImplemented
    assert c_twins.multiply_tokens(tokens, levels, torch.float64) is NotImplemented
