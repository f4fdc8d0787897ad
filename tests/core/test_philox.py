"""Random numbers: the published ones, the reference's, and nothing of torch's global generator."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gft import reference
from gft.philox import CPU_COUNTERS_AT_ONCE, PER_COUNTER, NoiseKey, noise8, noise16, philox

# Random123 1.14, kat_vectors: philox4x32 10.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
known = pytest.mark.parametrize(("counter", "key", "answer"), KNOWN, ids=["zeros", "ones", "pi"])
KEY = NoiseKey(seed=0x9876543210ABCDEF, step=901, stream=37, call=2)


@known
def test_philox_gives_the_published_numbers(counter, key, answer):
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == answer


@known
def test_reference_philox_gives_the_published_numbers(counter, key, answer):
    assert reference.philox(counter, key) == answer


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1),
       st.integers(0, 2**34), st.integers(0, 21))
def test_noise16_equals_the_reference(seed, step, stream, call, offset, count):
    numbers = noise16(count, NoiseKey(seed, step, stream, call), offset)
    assert numbers.dtype == torch.int32
    assert numbers.tolist() == [reference.noise16(element, seed=seed, step=step, stream=stream, call=call)
                                for element in range(offset, offset + count)]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 8), (7, 13), (2, 40)])
def test_noise8_equals_the_reference(rows, columns):
    key = {"seed": 2**40 + 3, "step": 5, "stream": 7, "call": 2}
    assert noise8(rows, columns, NoiseKey(**key)).tolist() == [
        [reference.noise8(token, feature, columns, **key) for feature in range(columns)] for token in range(rows)]


def test_noise8_takes_all_values_equally_often_and_tells_tokens_apart():
    numbers = noise8(1024, 512, KEY)
    counts = torch.bincount(numbers.flatten(), minlength=256).double()
    assert len(counts) == 256
    assert ((counts - 2048) ** 2 / 2048).sum() < 350  # chi-squared of 255 degrees of freedom: beyond it once in 10,000
    centred = numbers.double() - 127.5
    for one, other in ((centred[0::2], centred[1::2]), (centred[:, :-1], centred[:, 1:]), (centred[1:-1:2], centred[2::2])):
        assert abs((one * other).mean()) < 5 * 73.9**2 / one.numel() ** 0.5


def test_noise16_with_an_offset_is_a_slice_of_the_whole():
    whole = noise16(3 * PER_COUNTER * CPU_COUNTERS_AT_ONCE + 13, KEY)  # several chunks and a ragged end
    border = PER_COUNTER * CPU_COUNTERS_AT_ONCE
    for start, stop in [(0, 1), (5, 23), (border - 3, border + 11), (border, 2 * border), (77, len(whole))]:
        assert torch.equal(noise16(stop - start, KEY, start), whole[start:stop])


def test_noise16_leaves_the_global_generator_alone(rng_untouched):
    first = noise16(1000, KEY)
    torch.manual_seed(1)
    with rng_untouched():
        again = noise16(1000, KEY)
    assert torch.equal(first, again)


@pytest.mark.parametrize("byte", [0, 8], ids=["low byte", "high byte"])
def test_noise16_is_uniform(byte):
    numbers = noise16(1 << 18, KEY)
    counts = torch.bincount((numbers >> byte) & 255, minlength=256).double()
    chi_square = float(((counts - 1024).square() / 1024).sum())
    assert 160 < chi_square < 350  # 255 degrees of freedom: a chance of 1e-4 on either side
    assert int(numbers.min()) >= 0
    assert int(numbers.max()) < 2**16
    assert float(numbers.double().mean()) == pytest.approx(32767.5, abs=150)


@pytest.mark.parametrize("part", ["seed", "step", "stream", "call"])
def test_noise16_depends_on_each_part_of_its_key(part):
    one, other = noise16(4096, KEY), noise16(4096, replace(KEY, **{part: getattr(KEY, part) + 1}))
    assert int((one == other).sum()) < 5
    together = torch.stack([one, other]).double()
    assert abs(float(torch.corrcoef(together)[0, 1])) < 0.06


def test_noise16_is_the_same_where_the_step_is_counted_in_a_tensor():
    assert torch.equal(noise16(100, replace(KEY, step=torch.tensor(901))), noise16(100, KEY))


@pytest.mark.parametrize(("part", "value"), [("seed", -1), ("seed", 2**64), ("step", 2**32), ("stream", -1),
                                             ("call", 2**32)])
def test_a_key_that_its_counter_cannot_hold_is_refused(part, value, refuses):
    with refuses(ValueError, f"{part}={value}"):
        replace(KEY, **{part: value})


def test_more_elements_than_can_be_counted_are_refused(refuses):
    with refuses(ValueError, "split the tensor"):
        noise16(16, KEY, offset=2**35 - 8)
