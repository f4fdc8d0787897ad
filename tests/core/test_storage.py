"""How a weight's bytes are read and written: packing, values, levels, positions between levels, encodings, codes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gft import reference
from gft.errors import UsageError
from gft.storage import Storage, field_bits, pack_fields, unpack_fields

HALF_A_BYTE = Storage(2, memory=False, half=True)
PACKED = [*(Storage(bits, memory=False) for bits in range(2, 9)), HALF_A_BYTE]
MEMORY = [Storage(bits) for bits in range(2, 9)]  # with inertia from 2 to 6 bits, at 7 and 8 there is no bit for it
NO_INERTIA = [Storage(bits, inertia=False) for bits in range(2, 7)]
SHAPES = [(63, 65), (1, 64), (257, 130)]


def name_of(storage: Storage) -> str:
    packed = "half" if storage.half else "packed"
    return f"{storage.bits}bit-" + (packed if not storage.memory else "inertia" if storage.inertia else "no-inertia")


every_storage = pytest.mark.parametrize("storage", PACKED + MEMORY + NO_INERTIA, ids=name_of)


def random_levels(shape: tuple[int, ...], storage: Storage) -> torch.Tensor:
    """Both ends of the grid among them."""
    levels = torch.randint(-storage.largest, storage.largest + 1, shape, dtype=torch.int8)
    levels.view(-1)[:2] = torch.tensor([-storage.largest, storage.largest])
    return levels


def every_value(storage: Storage) -> torch.Tensor:
    """(1, n): all values a weight can have."""
    return torch.arange(storage.lowest, storage.limit + 1).to(torch.int8)[None]


def positions_of(storage: Storage, values: torch.Tensor) -> torch.Tensor:
    """Where votes have carried each weight, in levels: the docstring of storage.py, in float64."""
    value, unit = values.double(), 2**storage.low_bits
    if storage.inertia:
        level = (value / unit + 0.5).floor()
        return level + (value - level * unit) / (unit / 2)
    return (value + 0.5) / unit if storage.spare_bits else value / unit


# ---------------------------------------------------------------------------------------------------- packing


@given(st.data())
def test_pack_and_unpack_are_inverse_and_equal_the_reference(data):
    bits = data.draw(st.integers(2, 8))
    largest = 2 ** (bits - 1) - 1
    columns = data.draw(st.integers(1, 13))
    row = st.lists(st.integers(-largest, largest), min_size=columns, max_size=columns)
    rows = data.draw(st.lists(row, min_size=1, max_size=4))

    packed = pack_fields(torch.tensor(rows), field_bits(bits), largest)

    assert packed.dtype == torch.uint8
    assert packed.tolist() == [reference.pack(one, bits) for one in rows]
    assert torch.equal(unpack_fields(packed, field_bits(bits), largest, columns), torch.tensor(rows, dtype=torch.int8))


def test_pack_takes_leading_dimensions_and_strides():
    numbers = torch.randint(-1, 2, (3, 10, 7), dtype=torch.int8).transpose(1, 2)
    assert torch.equal(unpack_fields(pack_fields(numbers, 2, 1), 2, 1, 10), numbers)


# ---------------------------------------------------------------------------------------------------- levels


@every_storage
def test_levels_are_stored_and_read_back(storage):
    shape = SHAPES[storage.bits % 3]
    levels = random_levels(shape, storage)

    stored = storage.store(levels)
    values = storage.values(stored, shape[1])

    assert stored.dtype == storage.dtype
    assert tuple(stored.shape) == (shape[0], storage.bytes_per_row(shape[1]))
    assert torch.equal(storage.levels(stored, shape[1]), levels)
    assert torch.equal(storage.value_levels(values), levels)
    assert torch.equal(storage.from_values(values), stored)
    assert storage.lowest <= int(values.min())
    assert int(values.max()) <= storage.limit


@pytest.mark.parametrize(("storage", "columns", "size"), [
    (Storage(2, memory=False), 64, 16), (Storage(2, memory=False), 65, 17), (Storage(3, memory=False), 64, 32),
    (Storage(4, memory=False), 63, 32), (HALF_A_BYTE, 65, 33), (Storage(5, memory=False), 63, 63),
    (Storage(8, memory=False), 1, 1), (Storage(2), 64, 64), (Storage(7), 65, 65)],
    ids=lambda one: name_of(one) if isinstance(one, Storage) else str(one))
def test_a_row_takes_the_promised_bytes(storage, columns, size):
    assert storage.bytes_per_row(columns) == size
    stored = storage.store(torch.zeros(3, columns, dtype=torch.int8))
    assert stored.numel() * stored.element_size() == 3 * size


@every_storage
def test_every_value_is_kept_and_read_as_the_nearest_level(storage):
    values = every_value(storage)
    kept = storage.values(storage.from_values(values), values.shape[1])
    assert torch.equal(kept, values)
    expected = [math.floor(value / 2**storage.low_bits + 0.5) for value in values[0].tolist()]
    assert storage.value_levels(values)[0].tolist() == expected
    assert set(expected) == set(range(-storage.largest, storage.largest + 1))


@pytest.mark.parametrize(("storage", "count"), [
    (Storage(3, False), 14), (Storage(5, False), 31 * 8), (Storage(6, False), 63 * 4), (Storage(7, False), 254),
    (HALF_A_BYTE, 12)], ids=lambda one: name_of(one) if isinstance(one, Storage) else str(one))
def test_spare_bits_serve_every_level_alike(storage, count):
    values = every_value(storage)
    assert values.shape[1] == count
    levels = storage.value_levels(values)
    assert levels.unique(return_counts=True)[1].tolist() == [2**storage.spare_bits] * (2**storage.bits - 1)
    assert torch.equal(storage.value_levels(-1 - values), -levels)  # a mirrored value is of the mirrored level


def test_half_a_byte_is_taken_where_there_are_bits_to_spare(refuses):
    assert Storage.as_asked(2, "half") == HALF_A_BYTE
    assert (HALF_A_BYTE.spare_bits, HALF_A_BYTE.resolution, HALF_A_BYTE.dtype) == (2, 4, torch.uint8)
    for bits in (3, 4):  # which take half a byte when they are packed
        assert Storage.as_asked(bits, "half") == Storage.as_asked(bits, False) == Storage(bits, memory=False)
    assert [Storage.as_asked(2, memory).asked_for for memory in (True, False, "half")] == [True, False, "half"]
    with refuses(UsageError, 'memory="half".*too little for 5 bits'):
        Storage.as_asked(5, "half")
    with refuses(UsageError, "memory"):
        Storage.as_asked(2, "quarter")


@pytest.mark.parametrize("storage", [Storage(6), Storage(7), Storage(8), Storage(4, memory=False), Storage(3, memory=False)],
                         ids=name_of)
def test_inertia_is_only_where_there_is_memory(storage):
    assert storage.inertia == (storage.memory_bits > 0) == (storage == Storage(6))


# ---------------------------------------------------------------------------------------------------- between levels


@every_storage
def test_store_nearest_keeps_what_there_is_room_for(storage):
    positions = torch.randn(9, 31, dtype=torch.float64) * storage.largest
    reach = storage.largest + (0.5 - 0.5 / storage.unit if storage.spare_bits else 0)  # as far as a weight can be

    values = storage.values(storage.store_nearest(positions.float()), 31)

    inside = positions.clamp(-reach, reach)
    assert float((positions_of(storage, values) - inside).abs().max()) <= 0.5001 / storage.resolution
    levels = storage.value_levels(values)
    assert float((levels - inside).abs().max()) <= 0.5001 + (0.5 / storage.unit if storage.low_bits else 0)
    assert (int(levels.min()), int(levels.max())) == (-storage.largest, storage.largest)


@pytest.mark.parametrize("inertia", [True, False], ids=["inertia", "no-inertia"])
def test_a_start_between_levels_is_read_back_where_it_was_put(inertia):
    storage = Storage(2, inertia=inertia)
    read = positions_of(storage, storage.store_nearest(torch.tensor([[0.4, -0.4, 0.75]])))
    assert read[0].tolist() == pytest.approx([0.4, -0.4, 0.75], abs=0.5 / storage.resolution)


@pytest.mark.parametrize("bits", range(2, 7), ids="{}bit".format)
def test_weights_stay_where_they_are_when_inertia_is_given_up(bits):
    lagging, direct = Storage(bits), Storage(bits, inertia=False)
    values = every_value(lagging)
    new = lagging.converted(values, direct)
    positions = positions_of(lagging, values)
    assert torch.equal(positions_of(direct, new), positions)  # and a level that lagged behind has followed
    assert torch.equal(direct.value_levels(new).double(), (positions + 0.5).floor())
    assert (direct.value_levels(new) != lagging.value_levels(values)).any()
    nearest = (lagging.value_levels(values) - positions).abs() < 0.5
    assert torch.equal(direct.converted(new, lagging)[nearest], values[nearest])


@pytest.mark.parametrize("bits", range(2, 7), ids="{}bit".format)
def test_weights_stay_within_half_a_resolution_when_inertia_is_taken_up(bits):
    direct, lagging = Storage(bits, inertia=False), Storage(bits)
    values = every_value(direct)
    new = direct.converted(values, lagging)
    difference = positions_of(lagging, new) - positions_of(direct, values)
    assert torch.equal(lagging.value_levels(new), direct.value_levels(values))
    assert float(difference.abs().max()) == 0.5 / lagging.resolution
    assert abs(float(difference.mean())) < 0.02 / lagging.resolution  # no drift


@every_storage
def test_conversion_to_the_same_storage_changes_nothing(storage):
    stored = storage.store(random_levels((3, 5), storage))
    assert torch.equal(storage.converted(stored, storage), stored)


@pytest.mark.parametrize("other", [Storage(3), Storage(4, memory=False)], ids=name_of)
def test_conversion_to_other_bits_or_form_is_refused(other, refuses):
    with refuses(ValueError, "cannot be read as"):
        Storage(4).converted(torch.zeros(2, 3, dtype=torch.int8), other)


# ---------------------------------------------------------------------------------------------------- saved with the weight


@every_storage
def test_storage_is_read_back_from_its_code(storage):
    assert Storage.from_code(storage.code) == storage


@pytest.mark.parametrize(("code", "storage"), [([4, 1], Storage(4)), ([2, 0], Storage(2, memory=False)),
                                               ([3, 0, 1], Storage(3, memory=False)), ([6, 0, 2], Storage(6, memory=False))],
                         ids=str)
def test_codes_of_older_files_are_read(code, storage):
    assert Storage.from_code(code) == storage


@pytest.mark.parametrize("code", [[], [4], [9, 4, 1, 1], [2, 4, 1, 1, 0], [4, 1, 1]], ids=str)
def test_codes_of_newer_files_are_refused(code, refuses):
    with refuses(ValueError, "does not know.*update gft"):
        Storage.from_code(code)


@pytest.mark.parametrize(("bits", "kind"), [(1, ValueError), (9, ValueError), (True, TypeError), (2.0, TypeError),
                                            ("4", TypeError), (None, TypeError)], ids=repr)
def test_storage_of_impossible_bits_is_refused(bits, kind, refuses):
    with refuses(kind, f"bits={bits!r}.*2 to 8"):
        Storage(bits)
