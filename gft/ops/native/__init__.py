"""The CPU's twins of the operations: native.c, called on ranges of rows by as many threads as torch has.

Where there is no compiler, or GFT_NATIVE=0 is set, the torch definitions do the same work, more slowly.

    build      compiles and loads native.c
    interface  the structs and types that C and Python agree on
"""

import ctypes
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gft.ops import checks
from gft.ops.activations import LARGEST_SQUARED, MeanSquare, Quantized, take_mean
from gft.ops.levels import PLAIN, Scaling
from gft.ops.lowprecision import FIXED, INT8, LARGEST, MOST_FEATURES, SMALLEST, Tokens
from gft.ops.momentum import KeptMean, factors_of, shares_of
from gft.ops.native.build import library
from gft.ops.native.interface import (
    CMoments,
    CRoundingPlan,
    CTopKPlan,
    LevelsJob,
    MeanJob,
    MoveJob,
    Parts,
    ProductJob,
    QuantizeJob,
    SquaresJob,
    ToIntJob,
    TokensJob,
    VotesJob,
    c_key,
    c_storage,
    filled,
)
from gft.ops.products import EXACT_IN_FLOAT32
from gft.ops.rounding import CLIP, RoundingJob, RoundingPlan, share_of_newest, size_of_moves, suited
from gft.ops.topk import TopKPlan
from gft.philox import NoiseKey
from gft.storage import Storage

ROWS_OF_SQUARES = 64  # summed together, whatever the threads: so the sum's order, and its last bit, never changes
LEAST_A_THREAD = 1 << 15  # elements; fewer do not repay waking a thread
PARTS_A_THREAD = 4  # taken one by one: a thread that is held up leaves its share to the others
DIGITS = 3  # of 8 bits in a number of fixed point
ROWS_OF_VOTES = 64  # as many as native.c packs at once
NOT_REUSED = 1 << 18  # bytes; a block this large may go back to the system when it is freed (glibc), and be new each time
MOST_KEPT = 1 << 26  # bytes; a model that is gone leaves no more behind
HUGE_PAGES = 1 << 22  # bytes; in a block this large there are some, wherever it begins


def twins() -> dict[str, Callable[..., Any]]:
    """The operations that C does, by name; none where it cannot be built."""
    if library() is None:
        return {}
    offered = (quantize, float_levels, votes_product, round_tokens, multiply_tokens, mean_amax, renew_mean,
               sums_of_squares, rounding_plan, round_weights, topk_weights)
    return {function.__name__: function for function in offered}


def _functions() -> Any:
    found = library()
    assert found is not None
    return found


# ---------------------------------------------------------------------------------------------------- threads


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


def _side_by_side(work: Any, job: ctypes.Structure, rows: int, elements: int, multiple: int = 1) -> int:
    """The sum of work(job, from, to) over all rows, shared by torch's number of threads. Each range but the last is a
    `multiple` of rows."""
    shares = max(1, min(torch.get_num_threads(), elements // LEAST_A_THREAD, -(-rows // multiple)))
    if shares == 1:
        return work(ctypes.byref(job), 0, rows)
    step = -(-rows // (shares * PARTS_A_THREAD * multiple)) * multiple
    parts = Parts(ctypes.cast(work, ctypes.c_void_p), ctypes.addressof(job), rows, step)
    take, parallel = _functions().gft_take_parts, None if _forked.is_set() else _parallel()
    if parallel is not None:
        parallel(ctypes.cast(take, ctypes.c_void_p), ctypes.addressof(parts), shares, 0)
    else:  # a ctypes call leaves Python's lock
        list(_threads(shares).map(lambda _: take(ctypes.byref(parts)), range(shares)))
    return parts.total


# ---------------------------------------------------------------------------------------------------- memory


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.empty, in huge pages where it is large: 64 MB in small ones take five times as long to get as to fill."""
    memory = torch.empty(shape, dtype=dtype)
    if memory.nbytes >= HUGE_PAGES:
        _functions().gft_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory


class _Block:
    """A piece of kept memory, and who has it."""

    def __init__(self, nbytes: int) -> None:
        self.memory = _empty((nbytes,), torch.uint8)
        self.borrower: Callable[[], Any] = lambda: None


class _Scratch:
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


_scratch = _Scratch()


# ---------------------------------------------------------------------------------------------------- activations, levels


def quantize(values: Tensor, factors: Tensor | None, largest: int, key: NoiseKey,
             not_finite: Tensor | None = None) -> Quantized:
    """Round x or grad_output to int8 (activations.quantize); signs are left to torch."""
    checks.check_values(values, factors, not_finite)
    if factors is None or values.dtype not in checks.FLOATS or not 0 < values.numel() <= checks.MOST_ELEMENTS:
        return NotImplemented
    values, factors = values.float().contiguous(), factors.contiguous()
    tokens, features = values.shape
    q = torch.empty(tokens, features, dtype=torch.int8)
    squares = torch.zeros(-(-tokens // ROWS_OF_SQUARES), features, dtype=torch.float64)
    job = QuantizeJob(values.data_ptr(), factors.data_ptr(), q.data_ptr(), squares.data_ptr(), features, ROWS_OF_SQUARES,
                      largest * 65536.0, LARGEST_SQUARED, c_key(key))
    bad = _side_by_side(_functions().gft_quantize, job, tokens, values.numel(), ROWS_OF_SQUARES)
    if not_finite is not None and bad:
        not_finite += bad
    return Quantized(q, squares.sum(0, keepdim=True).float())


def float_levels(stored: Tensor, storage: Storage, columns: int, dtype: torch.dtype, scaling: Scaling = PLAIN,
                 places: int = 1, turned: bool = False) -> Tensor:
    """Read a weight out as float32, or its levels alone as int8 (levels.float_levels)."""
    checks.check_stored(stored, storage, columns)
    checks.check_scaling(scaling, stored, columns)
    if not (dtype is torch.float32 or (dtype is torch.int8 and scaling is PLAIN)) or places != 1 or turned:
        return NotImplemented
    stored, rows = stored.contiguous(), len(stored)
    levels, factors = _scratch.borrow((rows, columns), dtype), scaling.factors()
    by_group = factors if isinstance(factors, Tensor) and factors.dim() else None
    factor = 1.0 if by_group is not None else float(factors)
    job = LevelsJob(stored.data_ptr(), levels.data_ptr(), factor, columns, dtype is torch.int8, c_storage(storage))
    _side_by_side(_functions().gft_levels, job, rows, levels.numel())
    if by_group is not None and levels.numel():
        levels.view(*by_group.shape, columns // by_group.shape[1]).mul_(by_group[:, :, None])
    return levels


# ---------------------------------------------------------------------------------------------------- products


def votes_product(grad_output: Tensor, x: Tensor, into: Tensor | None = None, means: Sequence[MeanSquare] = ()) -> Tensor:
    """Multiply int8 matrices exactly (products.votes_product); what is added to others, the definition adds."""
    checks.check_pair(grad_output, x)
    if not checks.are_int8(grad_output, x) or into is not None:
        return NotImplemented
    for one in means:
        take_mean(*one)
    functions = _functions()
    panel = functions.gft_panel_columns()
    if panel == 0 or not (grad_output.numel() and x.numel()):
        return _float_product(grad_output, x)
    grad_output, x = grad_output.contiguous(), x.contiguous()
    (tokens, rows), columns = grad_output.shape, x.shape[1]
    panels, group = -(-columns // panel), functions.gft_group_tokens()
    packed = torch.empty(panels * panel, functions.gft_packed_groups(tokens), group, dtype=torch.uint8)
    votes = _scratch.borrow((rows, columns), torch.int32)
    job = VotesJob(grad_output.data_ptr(), x.data_ptr(), packed.data_ptr(), votes.data_ptr(), tokens, rows, columns)
    _side_by_side(functions.gft_pack_x, job, panels, x.numel())
    _side_by_side(functions.gft_votes, job, rows, votes.numel(), ROWS_OF_VOTES)
    return votes


def _float_product(grad_output: Tensor, x: Tensor) -> Tensor:
    """The same for a processor without a product of bytes: a float32 sum is exact below 2^24."""
    votes: Tensor | None = None
    shape = grad_output.shape[1], x.shape[1]
    with torch.autocast("cpu", enabled=False):
        for some_grad, some_x in zip(grad_output.split(EXACT_IN_FLOAT32), x.split(EXACT_IN_FLOAT32), strict=True):
            part = torch.mm(some_grad.float().t(), some_x.float(), out=_empty(shape, torch.float32))
            votes = _as_int32(part) if votes is None else votes.add_(_as_int32(part))
    assert votes is not None  # split gives at least one piece
    return votes


def _as_int32(whole: Tensor) -> Tensor:  # float32, contiguous, whole numbers
    """The same numbers as int32, in the same memory: `whole` is not to be used any more."""
    _side_by_side(_functions().gft_to_int, ToIntJob(whole.data_ptr()), whole.numel(), whole.numel())
    return whole.view(torch.int32)


def round_tokens(values: Tensor, dtype: torch.dtype, scaling: Scaling = PLAIN, by_feature: Tensor | None = None) -> Tokens:
    """Round each token on a scale of its own (lowprecision.round_tokens); floats of 8 bits are left to torch."""
    checks.check_values(values, by_feature, None)
    checks.check_gain(scaling.log_gain, values.device)
    if values.dtype not in checks.FLOATS or dtype not in (INT8, FIXED) or not values.numel():
        return NotImplemented
    values = values.float().contiguous()
    by_feature = None if by_feature is None else by_feature.contiguous()
    q, scale = _scratch.borrow(values.shape, dtype), torch.empty(len(values), dtype=torch.float32)
    factor = float(Scaling(None, *scaling[1:]).factors())
    job = TokensJob(values.data_ptr(), _address(by_feature), q.data_ptr(), scale.data_ptr(), values.shape[1],
                    LARGEST[dtype], SMALLEST, factor, dtype is INT8)
    _side_by_side(_functions().gft_round_tokens, job, len(values), values.numel())
    return Tokens(q, scale)


def multiply_tokens(tokens: Tokens, levels: Tensor, dtype: torch.dtype, by_output: Tensor | None = None) -> Tensor:
    """q · levels^T on the tokens' scales (lowprecision.multiply_tokens). Levels may lie either way round."""
    checks.check_tokens(tokens, levels, by_output)
    functions, (q, scale) = _functions(), tokens
    panel = functions.gft_panel_columns()
    if (panel == 0 or dtype not in checks.FLOATS or q.dtype not in (INT8, FIXED) or not (q.numel() and levels.numel())
            or q.shape[1] > MOST_FEATURES):
        return NotImplemented
    (count, features), outputs = q.shape, len(levels)
    q, scale, by_output = q.contiguous(), scale.contiguous(), None if by_output is None else by_output.contiguous()
    panels, tile, group = -(-outputs // panel), functions.gft_tile_tokens(), functions.gft_group_tokens()
    tiles, groups, digits = -(-count // tile), functions.gft_packed_groups(features), 1 if q.dtype is INT8 else DIGITS
    packed_levels = _scratch.borrow((panels * panel, groups, group), torch.uint8)
    packed_tokens = _scratch.borrow((tiles, digits, groups, tile, group), torch.int8)
    starts = torch.empty(tiles, digits, tile, dtype=torch.int32)
    y = _scratch.borrow((count, outputs))
    turned = levels.t().is_contiguous() and not levels.is_contiguous()
    levels = levels if turned else levels.contiguous()
    job = ProductJob(q.data_ptr(), levels.data_ptr(), scale.data_ptr(), _address(by_output), packed_levels.data_ptr(),
                     packed_tokens.data_ptr(), starts.data_ptr(), y.data_ptr(), count, features, outputs, q.dtype is INT8)
    if turned:  # as x lies for its votes
        as_x = VotesJob(None, levels.data_ptr(), packed_levels.data_ptr(), None, features, 0, outputs)
        _side_by_side(functions.gft_pack_x, as_x, panels, levels.numel())
    else:
        _side_by_side(functions.gft_pack_levels, job, panels, levels.numel())
    _side_by_side(functions.gft_pack_tokens, job, tiles, q.numel())
    _side_by_side(functions.gft_multiply_tokens, job, tiles, y.numel())
    return y.to(dtype)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# ---------------------------------------------------------------------------------------------------- running means


def mean_amax(kept: KeptMean, votes: Tensor, share: float) -> Tensor:
    """Largest entries of a mean and of votes (momentum.mean_amax)."""
    checks.check_kept(kept, votes)
    if not _can_renew(kept, votes):
        return NotImplemented
    votes, (rows, columns) = votes.contiguous(), votes.shape
    pieces = -(-rows // ROWS_OF_SQUARES)
    amax, largest = torch.zeros(pieces, columns), torch.zeros(pieces, dtype=torch.int64)
    share, rest = shares_of(share)
    job = MeanJob(kept.stored.data_ptr(), votes.data_ptr(), kept.scale.data_ptr(), None, amax.data_ptr(), largest.data_ptr(),
                  None, columns, ROWS_OF_SQUARES, 0, votes.dtype is torch.int64, share, rest, 0.0)
    _side_by_side(_functions().gft_mean_amax, job, rows, votes.numel(), ROWS_OF_SQUARES)
    by_column = amax.amax(0)
    return torch.cat([by_column, by_column.amax().view(1), largest.amax().float().view(1)])


def renew_mean(kept: KeptMean, votes: Tensor, amax: Tensor, share: float, bound: int, key: NoiseKey) -> Tensor:
    """Take votes into a mean, in place (momentum.renew_mean)."""
    checks.check_tensor("the largest entries of the mean of votes", amax, (votes.shape[1] + 2,), torch.float32, votes.device)
    checks.check_kept(kept, votes)
    if not _can_renew(kept, votes) or key.first % votes.shape[1]:
        return NotImplemented
    votes, (rows, columns) = votes.contiguous(), votes.shape
    scale, inverse, per_move = factors_of(amax, share, bound)
    share, rest = shares_of(share)
    moves = _scratch.borrow((rows, columns), torch.int32)
    job = MeanJob(kept.stored.data_ptr(), votes.data_ptr(), kept.scale.data_ptr(), inverse.data_ptr(), None, None,
                  moves.data_ptr(), columns, ROWS_OF_SQUARES, key.first // columns, votes.dtype is torch.int64, share, rest,
                  float(per_move), c_key(replace(key, first=0)))
    _side_by_side(_functions().gft_renew_mean, job, rows, votes.numel())
    torch.autograd.graph.increment_version(kept.stored)  # autograd does not see what C writes
    kept.scale.copy_(scale)
    return moves


def _can_renew(kept: KeptMean, votes: Tensor) -> bool:
    return checks.are_votes(votes) and kept.stored.is_contiguous() and kept.scale.is_contiguous()


# ---------------------------------------------------------------------------------------------------- moving weights


def sums_of_squares(votes: Tensor, shift: int) -> Tensor:
    """Sum the squares of votes by row and by column (rounding.sums_of_squares)."""
    checks.check_matrix("the votes", votes)
    if not checks.are_votes(votes):
        return NotImplemented
    votes, (rows, columns) = votes.contiguous(), votes.shape
    by_row = torch.empty(rows, dtype=torch.int64)
    by_column = torch.zeros(-(-rows // ROWS_OF_SQUARES), columns, dtype=torch.int64)
    job = SquaresJob(votes.data_ptr(), by_row.data_ptr(), by_column.data_ptr(), columns, ROWS_OF_SQUARES,
                     votes.dtype is torch.int64, shift)
    _side_by_side(_functions().gft_squares, job, rows, votes.numel(), ROWS_OF_SQUARES)
    return torch.cat([by_row, by_column.sum(0)])


def rounding_plan(job: RoundingJob, lr: float | Tensor) -> tuple[RoundingPlan, Tensor]:
    """Normalise votes by row and column (rounding.rounding_plan)."""
    checks.check_job(job, lr)
    if not checks.are_votes(job.votes) or (isinstance(lr, Tensor) and lr.is_cuda):
        return NotImplemented
    size, threshold_share = suited(size_of_moves(job, lr), job.threshold)
    rows, columns = job.votes.shape
    by_row, by_column = sums_of_squares(job.votes, job.shift).split([rows, columns])
    row, column = (torch.empty(shape, dtype=torch.float32) for shape in ((rows, 1), (1, columns)))
    moments = torch.zeros(rows + columns + 1) if job.running is None else job.running.clone()
    how = CMoments(share=share_of_newest(int(job.key.step)), size=size, shift=job.shift, rescale_step=job.rescale_step)
    _functions().gft_factors(by_row.data_ptr(), by_column.data_ptr(), rows, columns, how, moments.data_ptr(), row.data_ptr(),
                          column.data_ptr())
    return RoundingPlan(row, column, CLIP * size, threshold_share, job.follow), moments


def round_weights(stored: Tensor, votes: Tensor, storage: Storage, plan: RoundingPlan, key: NoiseKey) -> Tensor:
    """Move a stored weight by stochastic rounding, in place (rounding.round_weights)."""
    checks.check_weight(stored, votes, storage)
    checks.check_factors(plan, votes)
    if not checks.are_votes(votes, key.first) or not stored.is_contiguous():
        return NotImplemented
    plan = replace(plan, row=plan.row.contiguous(), column=plan.column.contiguous())
    return _moved(_functions().gft_round, stored, votes, storage, key, rounding=filled(CRoundingPlan, plan))


def topk_weights(stored: Tensor, votes: Tensor, storage: Storage, plan: TopKPlan, key: NoiseKey) -> Tensor:
    """Move the weights with the largest votes one level, in place (topk.topk_weights)."""
    checks.check_weight(stored, votes, storage)
    checks.check_choice(plan, votes)
    if not checks.are_votes(votes, key.first) or not stored.is_contiguous():
        return NotImplemented
    return _moved(_functions().gft_topk, stored, votes, storage, key, topk=filled(CTopKPlan, plan))


def _moved(work: Any, stored: Tensor, votes: Tensor, storage: Storage, key: NoiseKey, **plan: ctypes.Structure) -> Tensor:
    """Move all rows in place -> int64 scalar: how many levels changed."""
    votes, (rows, columns) = votes.contiguous(), votes.shape
    job = MoveJob(stored.data_ptr(), votes.data_ptr(), columns, votes.dtype is torch.int64, c_storage(storage),
                  key=c_key(key), **plan)
    flips = _side_by_side(work, job, rows, votes.numel())
    torch.autograd.graph.increment_version(stored)  # autograd does not see what C writes
    return torch.tensor(flips, dtype=torch.int64)
