"""The product of a few rows of x with a stored weight equals its definition but for float32's rounding."""

import pytest
import torch
from kernel_cases import DEVICE, random_stored

from gft import ops
from gft.ops import Scaling
from gft.storage import Storage

pytest.importorskip("triton")
from gft.ops.triton import decode

# Half a step of the output's type. The interpreter cuts bfloat16 off where the device rounds it.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8 if DEVICE.type == "cuda" else 2**-7}
# Bytes of a row that make whole units, and that do not; x in fours, and not; each number of limbs; one row and more.
CASES = [pytest.param((3, 65), 1, torch.float32, Storage(2, False), id="odd-1-float32-2packed"),
         pytest.param((3, 65), 1, torch.bfloat16, Storage(4), id="odd-1-bfloat16-4memory"),
         pytest.param((5, 77), 3, torch.bfloat16, Storage(3, False), id="odd-3-bfloat16-3packed"),
         pytest.param((5, 77), 2, torch.float32, Storage(2), id="odd-2-float32-2memory"),
         pytest.param((5, 77), 2, torch.bfloat16, Storage(2, False, half=True), id="odd-2-bfloat16-2half"),
         pytest.param((66, 48), 1, torch.bfloat16, Storage(2, False), id="even-1-bfloat16-2packed"),
         pytest.param((66, 48), 1, torch.float16, Storage(8, False), id="even-1-float16-8packed"),
         pytest.param((66, 48), 16, torch.bfloat16, Storage(4, inertia=False), id="even-16-bfloat16-4memory"),
         pytest.param((1, 80), 2, torch.float16, Storage(8), id="even-2-float16-8memory"),
         pytest.param((7, 64), 2, torch.float32, Storage(5, False), id="even-2-float32-5packed"),
         pytest.param((7, 64), 9, torch.bfloat16, Storage(2, False), id="even-9-bfloat16-2packed")]


def assert_is_the_product(x, storage, stored, **options):
    got = decode.product(x.to(DEVICE), stored.to(DEVICE), storage, 0.37, **options)
    assert got.dtype is x.dtype
    levels = storage.levels(stored, x.shape[1]).double()
    expected = 0.37 * x.double() @ levels.t()
    # Codes, not levels, are what is summed: up to I more each.
    added = 0.37 * x.double().abs() @ (levels.abs() + storage.largest + 1).t()
    error = (got.cpu().double() - expected).abs()
    assert (error <= expected.abs() * ROUNDING[x.dtype] * 1.01 + added * 2**-23 * 4).all()
    assert expected.any()
    return got


@pytest.mark.parametrize(("shape", "n", "dtype", "storage"), CASES)
def test_product_equals_definition(shape, n, dtype, storage):
    assert_is_the_product(torch.randn(n, shape[1]).to(dtype), storage, random_stored(storage, shape))


@pytest.mark.parametrize("n", [1, 5])
def test_product_is_the_same_however_its_columns_are_split(n):
    storage = Storage(2, False)
    stored, x = random_stored(storage, (35, 1080)), torch.randn(n, 1080).half()  # 135 units: two steps and a bit
    for tile, splits in ((decode.Tile(4, 16, 16, 1), 1), (decode.Tile(4, 16, 16, 1), 3), (decode.Tile(2, 32, 32, 2), 2)):
        assert_is_the_product(x, storage, stored, tile=tile, splits=splits)


def test_product_takes_numbers_of_any_size_and_any_alignment():
    storage = Storage(4, False)
    stored = random_stored(storage, (4, 64))
    for size in (1e-9, 1e15):
        assert_is_the_product(torch.randn(1, 64) * size, storage, stored)
    apart = torch.empty(stored.numel() + 1, dtype=torch.uint8)[1:].view(stored.shape).copy_(stored)  # no word boundary
    assert_is_the_product(torch.randn(1, 64), storage, apart)
    assert_is_the_product(torch.randn(65).half()[1:].view(1, 64), storage, stored)
    assert_is_the_product(torch.randn(64, 1).half().t(), storage, stored)


@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float32), (3, torch.bfloat16)])
def test_product_of_numbers_that_are_all_positive_loses_no_precision(n, dtype):
    """Their codes' sum is far larger than their levels'."""
    storage = Storage(4, False)
    stored, x = random_stored(storage, (20, 4096)), (1 + torch.rand(n, 4096)).to(dtype)
    got = decode.linear(x.to(DEVICE), stored.to(DEVICE), storage, Scaling(number=1.0))
    levels = storage.levels(stored, 4096).double()
    exact = x.double() @ levels.t()
    size = x.double().norm(dim=1)[:, None] * levels.norm(dim=1)
    assert ((got.cpu().double() - exact).abs() <= exact.abs() * ROUNDING[dtype] * 1.01 + 1e-6 * size).all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("n", "wrong"), [(1, torch.inf), (4, -torch.inf), (4, torch.nan)])
def test_rows_with_what_is_no_number_are_nan_and_others_are_not_touched(n, wrong):
    storage = Storage(2, False)
    stored, x = random_stored(storage, (33, 72)), torch.randn(n, 72).bfloat16()
    x[0, 13] = wrong
    got = decode.linear(x.to(DEVICE), stored.to(DEVICE), storage, Scaling(number=0.37)).cpu()
    assert got[0].isnan().all()
    if n > 1:
        torch.testing.assert_close(got[1:], assert_is_the_product(x[1:], storage, stored).cpu())


@pytest.mark.parametrize(("n", "memory"), [(1, True), (4, False)])
def test_rows_of_zeros_give_zeros(n, memory):
    storage = Storage(4, memory)
    x, stored = torch.zeros(n, 72).bfloat16(), random_stored(storage, (33, 72))
    got = decode.linear(x.to(DEVICE), stored.to(DEVICE), storage, Scaling(number=0.37))
    assert got.shape == (n, 33)
    assert not got.any()


def test_columns_are_split_until_every_multiprocessor_works():
    assert decode._splits(blocks=256, steps=8, processors=132) == 1
    assert decode._splits(blocks=128, steps=8, processors=132) == 1  # nearly all of them work, and no sums are added up
    assert decode._splits(blocks=64, steps=32, processors=132) == 2
    assert decode._splits(blocks=1, steps=3, processors=132) == 3
    assert decode._splits(blocks=1, steps=99, processors=132) == decode.MOST_SPLITS


@pytest.mark.gpu
def test_product_gives_the_same_bits_every_time():
    storage = Storage(2, False)
    stored = random_stored(storage, (1000, 4096))
    for n in (1, 16):
        x = torch.randn(n, 4096).bfloat16()
        first = assert_is_the_product(x, storage, stored)
        assert all(torch.equal(first, assert_is_the_product(x, storage, stored)) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", [Storage(2), Storage(2, False), Storage(4, False), Storage(8)], ids=str)
def test_few_rows_give_the_same_as_many(storage, dtype):
    stored = random_stored(storage, (1000, 4096)).cuda()
    x = torch.randn(64, 4096, device="cuda", dtype=dtype)
    exact = 0.01 * (x.double() @ storage.levels(stored, 4096).double().t())
    assert decode.linear(x, stored, storage, Scaling(number=0.01)) is NotImplemented
    many = (ops.linear(x, stored, storage, Scaling(number=0.01)).double() - exact).abs().max()
    for n in (1, 2, 7, 16):
        error = (ops.linear(x[:n], stored, storage, Scaling(number=0.01)).double() - exact[:n]).abs().max()
        assert error <= 2 * max(many, exact.abs().max() * 1e-6)
