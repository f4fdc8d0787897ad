"""What the definitions of both rules share: reading, moving and writing a stored weight some rows at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from gft.philox import NoiseKey, noise16
from gft.storage import Storage

# Elements a definition works on at once: on the CPU its dozen passes stay in the cache, on a GPU its scratch stays bounded.
AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 26}

# (rows, their values int8, their noise 0..65535) -> their new values int8
NewValues = Callable[[slice, Tensor, Tensor], Tensor]


def move_rows(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8, changed in place
              columns: int,
              storage: Storage,
              key: NoiseKey,
              new_values: NewValues) -> Tensor:  # int64 scalar: how many levels changed
    """Give every row its new values, with one random number a weight."""
    rows, flips = len(stored), torch.zeros((), dtype=torch.int64, device=stored.device)
    rows_at_once = max(1, AT_ONCE.get(stored.device.type, AT_ONCE["cuda"]) // max(columns, 1))
    for start in range(0, rows, rows_at_once):
        some = slice(start, min(start + rows_at_once, rows))
        old = storage.values(stored[some], columns)
        new = new_values(some, old, noise16(old.numel(), key, start * columns, stored.device).view_as(old))
        flips += (storage.value_levels(new) != storage.value_levels(old)).sum()
        stored[some] = storage.from_values(new)
    return flips
