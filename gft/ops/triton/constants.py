"""What a kernel must know of a storage, when it is compiled."""

from functools import cache

from gft.storage import Storage


@cache
def constants_of(storage: Storage) -> dict[str, int]:
    """The constexpr arguments of every kernel that reads or writes stored weights."""
    return {"PACKED": not storage.memory, "WIDTH": storage.field_bits, "LARGEST": storage.largest,
            "MEMORY_BITS": storage.memory_bits, "SPARE_BITS": storage.spare_bits, "INERTIA": storage.inertia}
