"""Memory for what C writes."""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gft.ops.native.threads import functions

NOT_REUSED = 1 << 18  # bytes; a block this large may go back to the system when it is freed (glibc), and be new each time
MOST_KEPT = 1 << 26  # bytes; a model that is gone leaves no more behind
HUGE_PAGES = 1 << 22  # bytes; in a block this large there are some, wherever it begins


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.empty, in huge pages where it is large: 64 MB in small ones take five times as long to get as to fill."""
    memory = torch.empty(shape, dtype=dtype)
    if memory.nbytes >= HUGE_PAGES:
        functions().gft_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory


class _Block:
    """A piece of kept memory, and who has it."""

    def __init__(self, nbytes: int) -> None:
        self.memory = empty((nbytes,), torch.uint8)
        self.borrower: Callable[[], Any] = lambda: None


class Scratch:
    """Memory kept for large tensors that are soon gone and needed anew: the system clears what it hands out, page by page.
    A block is lent to one tensor at a time. Those lent last are kept, one of any size, several up to MOST_KEPT together."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []  # the one lent last first
        self.lock = threading.Lock()

    def borrow(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """An empty tensor; in memory of another only when that one, and all views of it, are gone."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < NOT_REUSED:
            return torch.empty(shape, dtype=dtype)
        with self.lock:
            fitting = [one for one in self.blocks if one.borrower() is None and nbytes <= one.memory.nbytes <= 2 * nbytes]
            block = min(fitting, key=lambda one: one.memory.nbytes) if fitting else _Block(nbytes)
            self.blocks = [block, *(one for one in self.blocks if one is not block)]
            while len(self.blocks) > 1 and sum(one.memory.nbytes for one in self.blocks) > MOST_KEPT:
                self.blocks.pop()
            # Every tensor made from this array keeps it alive, so its end is theirs.
            array = block.memory.numpy()[:nbytes]
            block.borrower = weakref.ref(array)
            return torch.from_numpy(array).view(dtype).view(*shape)


scratch = Scratch()
