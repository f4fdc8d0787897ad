"""Where integer weights start: the spacing of the levels, a model's own weights, a Gaussian's levels, the paper's zeros."""

import math

import pytest
import torch

from gft import initialize
from gft.initialize import SPACING

all_bits = pytest.mark.parametrize("bits", range(2, 9), ids="{}bit".format)

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
    levels, scale = initialize.levels_of(weight, bits)
    kept = float((levels * scale).square().mean() / weight.square().mean())
    # At the best spacing what is lost is exactly the error: E q² = E w² - E (w - q)².
    assert kept == pytest.approx(1 - gaussian_loss(SPACING[bits], bits), abs=0.01)
    assert levels.dtype == torch.int8
    assert int(levels.abs().max()) <= 2 ** (bits - 1) - 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_levels_of_takes_other_float_types(dtype):
    levels, scale = initialize.levels_of(torch.randn(63, 65).to(dtype), 3)
    assert scale.dtype == torch.float32
    assert levels.unique().numel() == 7


def test_levels_of_keeps_an_offset_of_the_weights():
    weight = 0.3 + 0.01 * torch.randn(5, 9)
    levels, scale = initialize.levels_of(weight, 4)
    assert float((levels * scale - weight).abs().max()) < 0.06


@pytest.mark.parametrize("bits", [2, 3, 4, 8], ids="{}bit".format)
def test_scale_of_a_small_start_leaves_room_to_grow(bits):
    edge = 2 ** (bits - 1) - 1
    weight = torch.randn(300, 400)
    large, small, tiny, nothing = (float(initialize.scale_of(std * weight, bits)) for std in (0.2, 0.02, 1e-4, 0))
    assert large == pytest.approx(SPACING[bits] * 0.2, rel=0.01)
    assert edge * small >= 0.7 / 20 - 1e-6
    assert tiny <= 4.1e-4  # or all its levels would be 0
    assert edge * nothing == pytest.approx(0.7 / 20)


def test_levels_of_zeros_is_zero_with_a_usable_scale():
    levels, scale = initialize.levels_of(torch.zeros(4, 7), 4)
    assert not levels.any()
    assert 0 < float(scale) < math.inf


@all_bits
def test_variance_start_has_deviation_one_over_root_fan_in(bits):
    levels, scale = initialize.variance_start(257, 130, bits)
    kept = 130 * float((levels * scale).square().mean())
    assert kept == pytest.approx(1 - gaussian_loss(SPACING[bits], bits), abs=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_paper_start_is_nine_tenths_zeros(bits):
    levels, scale = initialize.paper_start(257, 130, bits)
    shares = [float((levels == level).float().mean()) for level in (-1, 0, 1)]
    assert shares == pytest.approx([0.05, 0.9, 0.05], abs=0.01)
    assert sum(shares) == pytest.approx(1)
    assert float(scale) == pytest.approx(1 / ((2 ** (bits - 1) - 1) * math.sqrt(130)))


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("bits", "kind"), [(1, ValueError), (9, ValueError), (-4, ValueError), (True, TypeError),
                                            (2.0, TypeError), ("4", TypeError), (None, TypeError)], ids=repr)
def test_bits_off_the_grid_are_refused(bits, kind, refuses):
    with refuses(kind, f"bits={bits!r}.*2 to 8"):
        initialize.levels_of(torch.randn(2, 3), bits)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(bad, refuses):
    weight = torch.randn(3, 5)
    weight[1, 2] = bad
    with refuses(ValueError, "NaN or inf"):
        initialize.levels_of(weight, 4)


def test_integer_weights_are_refused(refuses):
    with refuses(TypeError, "float weights"):
        initialize.levels_of(torch.ones(3, 5, dtype=torch.int64), 4)
