"""The CPU twin of the Triton kernels: native.c, built by the machine's own C compiler when first needed.

Building takes about a second and is kept in the user's cache folder, by the source's and the processor's fingerprint.
Where there is no compiler, or GFT_NATIVE=0 is set, the torch definitions do the same work, more slowly.
"""

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
TUNINGS = (("-march=native",), ())  # the first that the compiler takes
ROWS_OF_SQUARES = 64  # summed by one call, whatever the threads: so the sum's order, and its last bit, never changes
LEAST_A_THREAD = 1 << 15  # elements; fewer are not worth waking a thread for
ROWS_OF_VOTES = 64  # as many as native.c packs at once
FRESH = 1 << 25  # bytes; a block this large is not kept for reuse when it is freed (glibc), so it is fresh each time

POINTER, INT, LONG, FLOAT, DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_double
STREAM = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32]  # seed, step, stream, call
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "gft_quantize": (None, [POINTER] * 5 + [LONG] * 3 + [FLOAT] * 2 + STREAM),
    "gft_huge_pages": (None, [POINTER, LONG]),
    "gft_levels": (None, [POINTER, POINTER, LONG, LONG, INT]),
    "gft_to_int": (None, [POINTER, LONG, LONG]),
    "gft_panel_columns": (LONG, []),
    "gft_pack_x": (None, [POINTER, POINTER, *[LONG] * 4]),
    "gft_votes": (None, [POINTER, POINTER, POINTER, *[LONG] * 5]),
    "gft_squares": (None, [POINTER, INT, POINTER, POINTER, LONG, LONG, LONG, INT]),
    "gft_factors": (None, [POINTER, POINTER, LONG, LONG, INT, FLOAT, POINTER, DOUBLE, INT, POINTER, POINTER]),
    "gft_move": (LONG, [POINTER, POINTER, INT, POINTER, POINTER, FLOAT, FLOAT, INT, *[LONG] * 7, *[INT] * 5, *STREAM]),
}


# ---------------------------------------------------------------------------------------------------- building


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def _build(compiler: str, folder: Path) -> Path:
    marks = [SOURCE.read_text(), *FLAGS, *chain(*TUNINGS), compiler, platform.machine(), _processor()]
    library = folder / f"native-{hashlib.sha256(chr(0).join(marks).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # whole or not at all, also with two processes at it
            os.replace(_compile(compiler, Path(scratch) / library.name), library)
    return library


def _compile(compiler: str, target: Path) -> Path:
    for tuning in TUNINGS:
        command = [compiler, *FLAGS, *tuning, "-o", str(target), str(SOURCE), "-lm"]
        done = subprocess.run(command, check=tuning == TUNINGS[-1], capture_output=True, timeout=60)
        if done.returncode == 0:
            break
    return target


@cache
def library() -> ctypes.CDLL | None:
    """The built functions; None where they cannot be had."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if os.environ.get("GFT_NATIVE") == "0" or compiler is None:
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gft"
    for folder in (home, Path(tempfile.gettempdir()) / f"gft-{os.getuid() if hasattr(os, 'getuid') else 'user'}"):
        try:
            found = ctypes.CDLL(str(_build(compiler, folder)))
        except (OSError, subprocess.SubprocessError):
            continue
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
        return found
    return None


# ---------------------------------------------------------------------------------------------------- threads


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


if hasattr(os, "register_at_fork"):  # a forked process inherits the pool but none of its threads
    os.register_at_fork(after_in_child=_threads.cache_clear)


def _side_by_side(work: Callable[[int, int], Any], rows: int, elements: int, multiple: int = 1) -> list[Any]:
    """work(from, to) over all rows, shared by torch's number of threads (a ctypes call leaves Python's lock). Each range but
    the last is a `multiple` of rows."""
    shares = max(1, min(torch.get_num_threads(), elements // LEAST_A_THREAD, -(-rows // multiple)))
    if shares == 1:
        return [work(0, rows)]
    step = -(-rows // (shares * multiple)) * multiple
    ranges = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    return list(_threads(shares).map(lambda each: work(*each), ranges))


def _functions() -> Any:
    found = library()
    assert found is not None
    return found


# ---------------------------------------------------------------------------------------------------- memory


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.empty, in huge pages where it is large: 64 MB in small ones take five times as long to get as to fill."""
    memory = torch.empty(shape, dtype=dtype)
    if memory.nbytes >= FRESH:
        _functions().gft_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory


class _Scratch:
    """Memory kept for large tensors that live for one product only, one at a time: fresh memory is cleared first."""

    def __init__(self) -> None:
        self.memory, self.lock = torch.empty(0), threading.Lock()
        self.borrower: Callable[[], Any] = lambda: None

    def borrow(self, shape: Sequence[int]) -> Tensor:
        """An empty float32 tensor; in fresh memory while the one before, or a view of it, is alive."""
        elements = math.prod(shape)
        if elements * 4 < FRESH:
            return torch.empty(shape, dtype=torch.float32)
        with self.lock:
            if self.borrower() is not None:
                return _empty(shape, torch.float32)
            if self.memory.numel() < elements:
                self.memory = _empty((elements,), torch.float32)
            # Every tensor made from this array keeps it alive, so its end is theirs.
            array = self.memory.numpy()[:elements]
            self.borrower = weakref.ref(array)
            return torch.from_numpy(array).view(*shape)


_scratch = _Scratch()


# ---------------------------------------------------------------------------------------------------- the functions


def quantize(values: Tensor,  # (n, features) float
             factors: Tensor,  # (features,) float32: what one is worth, in 1/65536 of q
             counted: Tensor | None = None,  # int64 scalar, to which is added how many values are NaN or inf
             *,
             largest: int, largest_squared: float,
             seed: int, step: int, stream: int, call: int) -> tuple[Tensor, Tensor]:
    """vote.quantize with the noise of philox.noise16, and vote.mean_square."""
    values, factors, gft_quantize = values.float().contiguous(), factors.contiguous(), _functions().gft_quantize
    tokens, features = values.shape
    q = torch.empty(tokens, features, dtype=torch.int8)
    pieces = -(-tokens // ROWS_OF_SQUARES)
    squares = torch.zeros(pieces, features, dtype=torch.float64)
    not_finite = torch.zeros(pieces, dtype=torch.int64)

    def work(start: int, stop: int) -> None:
        for first in range(start, stop, ROWS_OF_SQUARES):
            piece = first // ROWS_OF_SQUARES
            gft_quantize(values.data_ptr(), factors.data_ptr(), q.data_ptr(), squares[piece].data_ptr(),
                         not_finite[piece].data_ptr(), first, min(first + ROWS_OF_SQUARES, stop), features,
                         largest * 65536.0, largest_squared, seed, step, stream, call)

    if values.numel():
        _side_by_side(work, tokens, values.numel(), ROWS_OF_SQUARES)
    if counted is not None:
        counted += not_finite.sum()
    return q, (squares.sum(0) / max(tokens, 1)).float()


def float_levels(stored: Tensor, memory_bits: int) -> Tensor:  # (rows, columns) int8 -> float32
    """grid.values_to_levels as floats, in one pass."""
    stored, functions = stored.contiguous(), _functions()
    levels = _scratch.borrow(stored.shape)
    _side_by_side(lambda start, stop: functions.gft_levels(stored.data_ptr(), levels.data_ptr(), start, stop, memory_bits),
                  stored.numel(), stored.numel())
    return levels


def as_int32(whole: Tensor) -> Tensor:  # float32, contiguous, whole numbers
    """The same numbers as int32, in the same memory: `whole` is not to be used any more."""
    functions = _functions()
    _side_by_side(lambda start, stop: functions.gft_to_int(whole.data_ptr(), start, stop), whole.numel(), whole.numel())
    return whole.view(torch.int32)


def votes_product(delta: Tensor,  # (n, out) int8
                  x: Tensor) -> Tensor:  # (n, in) int8 -> (out, in) int32
    """delta^T · x, exact as long as int32 holds it: vote.tally."""
    functions = _functions()
    panel = functions.gft_panel_columns()
    if panel == 0 or not (delta.numel() and x.numel()):
        return _float_product(delta, x)
    delta, x = delta.contiguous(), x.contiguous()
    (tokens, rows), columns = delta.shape, x.shape[1]
    panels = -(-columns // panel)
    packed = torch.empty(panels * panel, -(-tokens // 4), 4, dtype=torch.uint8)
    _side_by_side(lambda start, stop: functions.gft_pack_x(x.data_ptr(), packed.data_ptr(), tokens, columns, start, stop),
                  panels, x.numel())
    votes = _empty((rows, columns), torch.int32)
    _side_by_side(lambda start, stop: functions.gft_votes(
        delta.data_ptr(), packed.data_ptr(), votes.data_ptr(), tokens, rows, columns, start, stop),
        rows, votes.numel(), ROWS_OF_VOTES)
    return votes


def _float_product(delta: Tensor, x: Tensor) -> Tensor:
    """The same for a processor without a product of bytes: a float32 sum is exact below 2^24."""
    votes: Tensor | None = None
    at_once = 2**24 // 128**2
    with torch.autocast("cpu", enabled=False):
        for some_delta, some_x in zip(delta.split(at_once), x.split(at_once), strict=True):
            part = torch.mm(some_delta.float().t(), some_x.float(), out=_empty((delta.shape[1], x.shape[1]), torch.float32))
            votes = as_int32(part) if votes is None else votes.add_(as_int32(part))
    assert votes is not None  # split gives at least one piece
    return votes


def rounding_factors(votes: Tensor, lr: float | Tensor, worth: float, shift: int, *, clip: float, most_halvings: int,
                     running: Tensor | None, step: int, own_size: bool) -> tuple[Tensor, Tensor, float, Tensor]:
    """step.rounding_factors: (out, 1) and (1, in) float32, the cap, and the squares. `worth` must be a float32."""
    gain = (torch.as_tensor(lr, dtype=torch.float32) * worth).item()
    votes, functions = votes.contiguous(), _functions()
    rows, columns = votes.shape
    by_row = torch.empty(rows, dtype=torch.int64)

    def work(start: int, stop: int) -> Tensor:
        by_column = torch.zeros(columns, dtype=torch.int64)
        functions.gft_squares(votes.data_ptr(), int(votes.dtype == torch.int64), by_row.data_ptr(), by_column.data_ptr(),
                              start, stop, columns, shift)
        return by_column

    by_column = torch.stack(_side_by_side(work, rows, votes.numel())).sum(0)
    row, column = (torch.empty(shape, dtype=torch.float32) for shape in ((rows, 1), (1, columns)))
    squares = torch.zeros(rows + columns + 1) if running is None else running.clone()
    share = 2.0 ** -min((step + 1).bit_length() - 1, most_halvings)
    functions.gft_factors(by_row.data_ptr(), by_column.data_ptr(), rows, columns, shift, gain, squares.data_ptr(), share,
                          int(own_size), row.data_ptr(), column.data_ptr())
    return row, column, clip * gain, squares


def move(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8, changed in place
         votes: Tensor,  # (rows, columns) int32 or int64
         columns: int,
         flips: Tensor,  # int64 scalar, to which is added how many levels change
         *,
         packed_width: int, top_level: int, memory_bits: int, spare_bits: int = 0, follow: int,
         seed: int, step: int, stream: int, call: int,
         row: Tensor | None = None, column: Tensor | None = None, cap: float = 0.0,
         quiet: float = 0.0,  # step.Rounding
         least: Tensor | None = None, largest: Tensor | None = None, p_min: int = 0) -> None:  # step.TopK
    """step.rounding or step.topk on a whole stored matrix, in place."""
    votes, gft_move = votes.contiguous(), _functions().gft_move
    rows = stored.shape[0]
    by_row, by_column = (torch.empty(0) if factor is None else factor.contiguous() for factor in (row, column))
    topk = least is not None
    bounds = (0, 0) if least is None or largest is None else (int(least), int(largest))
    target = stored if stored.is_contiguous() else stored.contiguous()

    def work(start: int, stop: int) -> int:
        return gft_move(target.data_ptr(), votes.data_ptr(), int(votes.dtype == torch.int64), by_row.data_ptr(),
                        by_column.data_ptr(), cap, quiet, int(topk), *bounds, p_min, start, stop, columns, target.shape[1],
                        packed_width, top_level, memory_bits, spare_bits, follow, seed, step, stream, call)

    changed = sum(_side_by_side(work, rows, votes.numel())) if votes.numel() else 0
    if target is not stored:
        stored.copy_(target)
    else:
        torch.autograd.graph.increment_version(stored)  # autograd does not see what a kernel writes
    flips += changed
