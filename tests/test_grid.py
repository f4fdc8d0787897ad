"""grid.py: levels, packing, storage, and where weights start."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gft import grid, reference
from gft.grid import SPACING, Grid

BITS = range(2, 9)
BYTES = {2: 0.25, 3: 0.5, 4: 0.5, 5: 1.0, 6: 1.0, 7: 1.0, 8: 1.0}
shapes = pytest.mark.parametrize("shape", [(1, 64), (63, 65), (257, 130)], ids="{0[0]}x{0[1]}".format)
all_bits = pytest.mark.parametrize("bits", BITS, ids="{}bit".format)
both_forms = pytest.mark.parametrize("memory", [False, True], ids=["packed", "memory"])


def random_levels(shape: tuple[int, ...], bits: int) -> torch.Tensor:
    largest = 2 ** (bits - 1) - 1
    return torch.randint(-largest, largest + 1, shape, dtype=torch.int8)


@pytest.mark.parametrize(("bits", "largest"), [(2, 1), (3, 3), (4, 7), (5, 15), (6, 31), (7, 63), (8, 127)])
def test_largest_level_is_that_of_a_symmetric_grid(bits, largest):
    assert grid.largest_level(bits) == largest


# ---------------------------------------------------------------------------------------------------- packing


@given(st.data())
def test_pack_and_unpack_are_inverse_and_equal_the_reference(data):
    bits = data.draw(st.integers(2, 8))
    largest = 2 ** (bits - 1) - 1
    columns = data.draw(st.integers(1, 13))
    row = st.lists(st.integers(-largest, largest), min_size=columns, max_size=columns)
    rows = data.draw(st.lists(row, min_size=1, max_size=4))

    packed = grid.pack(torch.tensor(rows), bits)

    assert packed.dtype == torch.uint8
    assert packed.tolist() == [reference.pack(one, bits) for one in rows]
    assert torch.equal(grid.unpack(packed, bits, columns), torch.tensor(rows, dtype=torch.int8))


@all_bits
@shapes
def test_pack_and_unpack_are_inverse_on_odd_shapes(shape, bits):
    levels = random_levels(shape, bits)
    packed = grid.pack(levels, bits)
    assert packed.shape == (shape[0], math.ceil(shape[1] * BYTES[bits]))
    assert torch.equal(grid.unpack(packed, bits, shape[1]), levels)


def test_pack_takes_leading_dimensions_and_strides():
    levels = random_levels((3, 10, 7), 2).transpose(1, 2)
    assert torch.equal(grid.unpack(grid.pack(levels, 2), 2, 10), levels)


# ---------------------------------------------------------------------------------------------------- Grid


@both_forms
@all_bits
@shapes
def test_grid_stores_and_reads_back_all_levels(shape, bits, memory):
    levels = random_levels(shape, bits)
    largest = 2 ** (bits - 1) - 1
    levels[0, :2] = torch.tensor([-largest, largest])
    kept = Grid(bits, *shape, memory)

    stored = kept.store(levels)

    a_byte = 1 if memory else {2: 4, 3: 2, 4: 2}.get(bits, 1)
    assert stored.dtype == (torch.int8 if memory else torch.uint8)
    assert tuple(stored.shape) == (shape[0], -(-shape[1] // a_byte))
    assert torch.equal(kept.levels(stored), levels)
    assert torch.equal(kept.from_values(kept.values(stored)), stored)
    values = kept.values(stored)
    assert kept.lowest <= int(values.min())
    assert int(values.max()) <= kept.limit
    assert torch.equal(kept.value_levels(values), levels)


@pytest.mark.parametrize(("bits", "memory", "bytes_a_weight"),
                         [(bits, False, size) for bits, size in BYTES.items()] + [(bits, True, 1.0) for bits in BITS])
def test_grid_takes_the_stated_bytes_a_weight(bits, memory, bytes_a_weight):
    stored = Grid(bits, 3, 64, memory).store(random_levels((3, 64), bits))
    assert stored.numel() * stored.element_size() == 3 * 64 * bytes_a_weight


@all_bits
def test_values_to_levels_is_the_nearest_level(bits):
    kept = Grid(bits, 1, 1, memory=True)
    values = torch.arange(-kept.limit, kept.limit + 1).to(torch.int8)
    expected = [math.floor(value / kept.unit + 0.5) for value in values.tolist()]
    assert grid.values_to_levels(values, kept.memory_bits).tolist() == expected
    assert grid.values_to_levels(values, kept.memory_bits).dtype == torch.int8


@pytest.mark.parametrize(("bits", "values"), [(3, 14), (5, 31 * 8), (6, 63 * 4), (7, 254)])
def test_spare_bits_serve_every_level_alike(bits, values):
    kept = Grid(bits, 1, values, memory=False)
    every = torch.arange(kept.lowest, kept.limit + 1)
    assert len(every) == values
    levels = kept.value_levels(every.to(torch.int8))
    assert levels.unique(return_counts=True)[1].tolist() == [kept.unit] * (2**bits - 1)
    assert torch.equal(kept.value_levels((-1 - every).to(torch.int8)), -levels)  # a mirrored value is of the mirrored level
    assert torch.equal(kept.values(kept.from_values(every.to(torch.int8)[None])), every.to(torch.int8)[None])


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 7], ids="{}bit".format)
@both_forms
def test_store_nearest_keeps_level_and_rest(bits, memory):
    largest = 2 ** (bits - 1) - 1
    positions = torch.randn(9, 31) * largest
    kept = Grid(bits, 9, 31, memory)
    stored = kept.store_nearest(positions)
    inside = positions.clamp(-largest, largest)
    assert torch.equal(kept.levels(stored).float(), inside.round())
    if kept.memory_bits:
        rest = (kept.values(stored).float() - inside.round() * kept.unit) / kept.resolution(True)
        assert float((inside.round() + rest - inside).abs().max()) <= 0.5 / kept.resolution(True)
    elif kept.spare_bits:
        fine = (kept.values(stored).float() + 0.5) / kept.unit
        reach = largest + 0.5 - 0.5 / kept.unit
        assert float((fine - positions.clamp(-reach, reach)).abs().max()) <= 0.5001 / kept.unit
    else:
        assert torch.equal(stored, kept.store(inside.round().to(torch.int8)))


# --------------------------------------------------------------------------------------------- where weights start

GAUSSIAN = torch.linspace(-9, 9, 180_001, dtype=torch.float64)
DENSITY = torch.exp(-GAUSSIAN.square() / 2) / math.sqrt(2 * math.pi) * (GAUSSIAN[1] - GAUSSIAN[0])


def gaussian_loss(spacing: float, bits: int) -> float:
    """Mean square error of a standard Gaussian rounded to the levels -I..I times `spacing`, by quadrature."""
    largest = 2 ** (bits - 1) - 1
    rounded = (GAUSSIAN / spacing).round_().clamp_(-largest, largest).mul_(spacing)
    return float((rounded.sub_(GAUSSIAN).square_() * DENSITY).sum())


@all_bits
def test_spacing_loses_least_of_a_gaussian(bits):
    low, high = SPACING[bits] * 0.8, SPACING[bits] * 1.25
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-6:  # golden section
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if gaussian_loss(left, bits) < gaussian_loss(right, bits):
            high = right
        else:
            low = left
    assert (low + high) / 2 == pytest.approx(SPACING[bits], abs=6e-5)  # as many digits as the table has


@all_bits
def test_levels_of_keeps_the_variance_but_for_the_rounding_loss(bits):
    weight = 0.08 * torch.randn(257, 130)
    levels, scale = grid.levels_of(weight, bits)
    kept = float((levels * scale).square().mean() / weight.square().mean())
    # At the best spacing what is lost is exactly the error: E q² = E w² - E (w - q)².
    assert kept == pytest.approx(1 - gaussian_loss(SPACING[bits], bits), abs=0.01)
    assert levels.dtype == torch.int8
    assert int(levels.abs().max()) <= 2 ** (bits - 1) - 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_levels_of_takes_other_float_types(dtype):
    levels, scale = grid.levels_of(torch.randn(63, 65).to(dtype), 3)
    assert scale.dtype == torch.float32
    assert levels.unique().numel() == 7


def test_levels_of_keeps_an_offset_of_the_weights():
    weight = 0.3 + 0.01 * torch.randn(5, 9)
    levels, scale = grid.levels_of(weight, 4)
    assert float((levels * scale - weight).abs().max()) < 0.06


@pytest.mark.parametrize("bits", [2, 3, 4, 8], ids="{}bit".format)
def test_scale_of_a_small_start_leaves_room_to_grow(bits):
    edge = 2 ** (bits - 1) - 1
    large, small, tiny, nothing = (float(grid.scale_of(std * torch.randn(300, 400), bits)) for std in (0.2, 0.02, 1e-4, 0))
    assert large == pytest.approx(SPACING[bits] * 0.2, rel=0.01)
    assert edge * small >= 0.7 / 20 - 1e-6
    assert tiny <= 4.1e-4  # or all its levels would be 0
    assert edge * nothing == pytest.approx(0.7 / 20)


def test_levels_of_zeros_is_zero_with_a_usable_scale():
    levels, scale = grid.levels_of(torch.zeros(4, 7), 4)
    assert not levels.any()
    assert 0 < float(scale) < math.inf


@all_bits
def test_variance_start_has_deviation_one_over_root_fan_in(bits):
    levels, scale = grid.variance_start(257, 130, bits)
    kept = 130 * float((levels * scale).square().mean())
    assert kept == pytest.approx(1 - gaussian_loss(SPACING[bits], bits), abs=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_paper_start_is_nine_tenths_zeros(bits):
    levels, scale = grid.paper_start(257, 130, bits)
    shares = [float((levels == level).float().mean()) for level in (-1, 0, 1)]
    assert shares == pytest.approx([0.05, 0.9, 0.05], abs=0.01)
    assert sum(shares) == pytest.approx(1)
    assert float(scale) == pytest.approx(1 / ((2 ** (bits - 1) - 1) * math.sqrt(130)))


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("bits", "kind"), [(1, ValueError), (9, ValueError), (-4, ValueError), (True, TypeError),
                                            (2.0, TypeError), ("4", TypeError), (None, TypeError)], ids=repr)
def test_bits_off_the_grid_are_refused(bits, kind, refuses):
    with refuses(kind, f"bits={bits!r}.*2 to 8"):
        grid.largest_level(bits)
    with refuses(kind, f"bits={bits!r}"):
        grid.levels_of(torch.randn(2, 3), bits)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(bad, refuses):
    weight = torch.randn(3, 5)
    weight[1, 2] = bad
    with refuses(ValueError, "NaN or inf"):
        grid.levels_of(weight, 4)


def test_integer_weights_are_refused(refuses):
    with refuses(TypeError, "float weights"):
        grid.levels_of(torch.ones(3, 5, dtype=torch.int64), 4)
