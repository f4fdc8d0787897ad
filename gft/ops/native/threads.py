"""Work of the C library, called on ranges of rows by as many threads as torch has."""

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from gft.ops.native.build import library
from gft.ops.native.interface import Parts

LEAST_A_THREAD = 1 << 15  # elements; fewer do not repay waking a thread
PARTS_A_THREAD = 4  # taken one by one: a thread that is held up leaves its share to the others


def functions() -> Any:
    """The C library's, which is there: else no twin is called."""
    found = library()
    assert found is not None
    return found


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


@cache
def _parallel() -> Callable[..., None] | None:
    """GOMP_parallel of the OpenMP that torch has loaded. Its threads still wait, wide awake, for torch's next operation:
    others would have to share the processor with them, and be woken first."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # another OpenMP, or a system that cannot be asked
        return None
    found.restype, found.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return found


_forked = threading.Event()  # a forked process has none of the threads, neither OpenMP's nor the pool's
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)
    os.register_at_fork(after_in_child=_forked.set)


def side_by_side(work: Any, job: ctypes.Structure, rows: int, elements: int, multiple: int = 1) -> int:
    """The sum of work(job, from, to) over all rows, shared by torch's number of threads. Each range but the last is a
    `multiple` of rows."""
    shares = max(1, min(torch.get_num_threads(), elements // LEAST_A_THREAD, -(-rows // multiple)))
    if shares == 1:
        return work(ctypes.byref(job), 0, rows)
    step = -(-rows // (shares * PARTS_A_THREAD * multiple)) * multiple
    parts = Parts(ctypes.cast(work, ctypes.c_void_p), ctypes.addressof(job), rows, step)
    take, parallel = functions().gft_take_parts, None if _forked.is_set() else _parallel()
    if parallel is not None:
        parallel(ctypes.cast(take, ctypes.c_void_p), ctypes.addressof(parts), shares, 0)
    else:  # a ctypes call leaves Python's lock
        list(_threads(shares).map(lambda _: take(ctypes.byref(parts)), range(shares)))
    return parts.total
