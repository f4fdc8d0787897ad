"""The product of a few rows equals its definition; what is kept of a text changes nothing about it; its benchmark runs."""

import pytest
import torch

import gft
from gft import kernels
from gft.grid import Grid, largest_level
from gft.lab import generate
from gft.lab.bench import decode as bench
from gft.lab.models import GPT

triton = pytest.importorskip("triton")
from gft.kernels import decode  # noqa: E402  (it imports Triton)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = torch.device("cpu")
# Half a step of the output's type. The interpreter cuts bfloat16 off where the device rounds it.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7}
FORMS = [pytest.param(2, False, id="2bit-packed"), pytest.param(3, False, id="3bit-packed"),
         pytest.param(8, False, id="8bit-packed"), pytest.param(2, True, id="2bit-memory"),
         pytest.param(4, True, id="4bit-memory"), pytest.param(8, True, id="8bit-memory")]
# Bytes of a row that make whole units, and that do not; x in fours, and not.
CASES = [pytest.param((3, 65), 1, torch.float32, id="odd-1-float32"),
         pytest.param((5, 77), 3, torch.bfloat16, id="odd-3-bfloat16"),
         pytest.param((66, 48), 1, torch.bfloat16, id="even-1-bfloat16"),
         pytest.param((66, 48), 16, torch.bfloat16, id="even-16-bfloat16"),
         pytest.param((1, 80), 2, torch.float16, id="even-2-float16"),
         pytest.param((7, 64), 2, torch.float32, id="even-2-float32")]


def stored_matrix(shape, bits, memory):
    """A grid, and a matrix of every value that can be stored."""
    grid = Grid(bits, *shape, memory)
    return grid, grid.from_values(torch.randint(grid.lowest, grid.limit + 1, shape, dtype=torch.int8))


def assert_is_the_product(x, grid, stored, **options):
    got = decode.product(x.to(DEVICE), stored.to(DEVICE), 0.37, **grid.form, **options)
    assert got.dtype is x.dtype
    levels = grid.levels(stored).double()
    expected = 0.37 * x.double() @ levels.t()
    # Codes, not levels, are what is summed: up to I more each.
    added = 0.37 * x.double().abs() @ (levels.abs() + largest_level(grid.bits) + 1).t()
    error = (got.cpu().double() - expected).abs()
    assert (error <= expected.abs() * ROUNDING[x.dtype] * 1.01 + added * 2**-23 * 4).all()
    assert expected.any()
    return got


@pytest.mark.parametrize(("shape", "n", "dtype"), CASES)
@pytest.mark.parametrize(("bits", "memory"), FORMS)
def test_product_equals_definition(shape, n, dtype, bits, memory):
    grid, stored = stored_matrix(shape, bits, memory)
    assert_is_the_product(torch.randn(n, shape[1]).to(dtype), grid, stored)


@pytest.mark.parametrize("n", [1, 5])
def test_product_is_the_same_however_its_columns_are_split(n):
    grid, stored = stored_matrix((67, 1080), 2, False)  # 135 units: two steps and a bit
    x = torch.randn(n, 1080).half()
    for tile in (decode.Tile(4, 16, 16, 1), decode.Tile(2, 32, 32, 2)):
        for splits in (1, 2, 3):
            assert_is_the_product(x, grid, stored, tile=tile, splits=splits)


def test_product_takes_numbers_of_any_size_and_any_alignment():
    grid, stored = stored_matrix((4, 64), 4, False)
    for size in (1e-9, 1e15):
        assert_is_the_product(torch.randn(1, 64) * size, grid, stored)
    apart = torch.empty(stored.numel() + 1, dtype=torch.uint8)[1:].view(stored.shape).copy_(stored)  # no word boundary
    assert_is_the_product(torch.randn(1, 64), grid, apart)
    assert_is_the_product(torch.randn(65).half()[1:].view(1, 64), grid, stored)
    assert_is_the_product(torch.randn(64, 1).half().t(), grid, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 3])
def test_product_of_numbers_that_are_all_positive_loses_no_precision(n, dtype):
    """Their codes' sum is far larger than their levels'."""
    grid, stored = stored_matrix((20, 8192), 4, False)
    x = (1 + torch.rand(n, 8192)).to(dtype)
    got = decode.product(x.to(DEVICE), stored.to(DEVICE), 1.0, packed_width=4, top_level=7, memory_bits=0)
    levels = grid.levels(stored).double()
    exact = x.double() @ levels.t()
    rounding = exact.abs() * ROUNDING[dtype] * 1.01
    size = x.double().norm(dim=1)[:, None] * levels.norm(dim=1)
    assert ((got.cpu().double() - exact).abs() <= rounding + 1e-6 * size).all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_rows_with_what_is_no_number_are_nan_and_others_are_not_touched(n, wrong):
    grid, stored = stored_matrix((33, 72), 2, False)
    x = torch.randn(n, 72).bfloat16()
    x[0, 13] = wrong
    got = decode.product(x.to(DEVICE), stored.to(DEVICE), 0.37, packed_width=2, top_level=1, memory_bits=0).cpu()
    assert got[0].isnan().all()
    if n > 1:
        torch.testing.assert_close(got[1:], assert_is_the_product(x[1:], grid, stored).cpu())


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
def test_rows_of_zeros_give_zeros(n, memory):
    grid, stored = stored_matrix((33, 72), 4, memory)
    x = torch.zeros(n, 72).bfloat16()
    got = decode.product(x.to(DEVICE), stored.to(DEVICE), 0.37, **grid.form)
    assert not got.any()


def test_columns_are_split_until_every_multiprocessor_works():
    assert decode._splits(blocks=256, steps=8, processors=132) == 1
    assert decode._splits(blocks=128, steps=8, processors=132) == 1  # nearly all of them work, and no sums are added up
    assert decode._splits(blocks=64, steps=32, processors=132) == 2
    assert decode._splits(blocks=1, steps=3, processors=132) == 3
    assert decode._splits(blocks=1, steps=99, processors=132) == decode.MOST_SPLITS


def test_layers_ask_for_the_kernel_only_where_it_can_work():
    assert kernels.decoder_of(torch.zeros(1, 8), 8) is None  # not on CUDA


@pytest.mark.gpu
def test_product_gives_the_same_bits_every_time():
    grid, stored = stored_matrix((1000, 4096), 2, False)
    for n in (1, 16):
        x = torch.randn(n, 4096).bfloat16()
        first = assert_is_the_product(x, grid, stored)
        assert all(torch.equal(first, assert_is_the_product(x, grid, stored)) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_layers_on_gpu_give_the_same_for_few_rows_and_for_many(bits, memory, dtype):
    layer = gft.QuantLinear(4096, 1000, bits, memory=memory, device="cuda").eval()
    x = torch.randn(2, 32, 4096, device="cuda", dtype=dtype)
    assert kernels.decoder_of(x[:, :8], 4096) is decode
    assert kernels.decoder_of(x, 4096) is None
    exact = (x.double() @ layer.float_weight().double().t())
    with torch.no_grad():
        for n in (1, 2, 7, 8):
            error = (layer(x[:, :n]).double() - exact[:, :n]).abs().max()
            assert error <= 2 * max((layer(x).double() - exact).abs().max(), exact.abs().max() * 1e-6)


# ---------------------------------------------------------------------------------------------------- keys and values


@pytest.fixture
def writer():
    model = GPT(11, context=9, width=24, depth=2, heads=3, dropout=0.5).eval()
    gft.quantize_(model, 4, lambda module, name: name.startswith("blocks."))
    with torch.no_grad():
        model.head.weight.mul_(40)
    return model


def test_cached_logits_equal_those_of_the_whole_text(writer):
    tokens = torch.randint(11, (2, 9))
    expected, cache = writer(tokens), writer.cache(2)
    pieces = [writer.cached(piece, cache) for piece in tokens.split([3, 1, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=1e-4)
    assert int(cache.length) == 9
    with pytest.raises((IndexError, RuntimeError)):
        writer.cached(tokens[:, :1], cache)


def test_text_is_the_same_with_and_without_a_cache_and_past_a_full_context(writer):
    def without_cache(tokens, generator):
        while True:
            logits = writer(tokens[:, -9:])[0, -1]
            kept, places = logits.topk(5)
            tokens = torch.cat([tokens, places[torch.multinomial((kept / 0.7).softmax(0), 1, generator=generator)][None]], 1)
            yield int(tokens[0, -1])

    for prompt in (2, 9, 12):
        tokens = torch.randint(11, (1, prompt))
        both = (generate.next_tokens(writer, tokens, 0.7, 5, torch.Generator().manual_seed(3)),
                without_cache(tokens, torch.Generator().manual_seed(3)))
        texts = list(zip(range(20), *both, strict=False))
        assert [ours for _, ours, _ in texts] == [expected for _, _, expected in texts]


# ---------------------------------------------------------------------------------------------------- the benchmark


def test_benchmark_measures_every_case():
    rows = list(bench.decode(CPU, small=True))
    assert len(rows) == 2 * 2 * 3 + 2 * 2
    for row in rows:
        assert row.ours > 0
        assert row.ratio == pytest.approx(row.ours / row.peer, rel=1e-6)


@torch.no_grad()
def test_twins_compute_the_same():
    model, twin = bench.twins(CPU, 2, context=8, width=16, depth=1, heads=2)
    assert not any(parameter.dtype is torch.uint8 for parameter in twin.parameters())
    tokens = torch.randint(256, (3, 8))
    torch.testing.assert_close(model(tokens), twin(tokens))
    assert gft.quantized(model)
