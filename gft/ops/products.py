"""Products of integers: the votes, and the forward product with stored levels."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gft.ops.activations import MeanSquare, take_mean
from gft.ops.levels import PLAIN, Scaling, float_levels
from gft.ops.operation import operation
from gft.storage import Storage

EXACT_IN_FLOAT32 = 2**24 // 128**2  # tokens whose products of int8 a float32 sum holds
EXACT_IN_INT32 = 2**31 // 128**2 - 16  # likewise; where a kernel likes to begin
FEW_ROWS = 16  # of x, for which a product takes as long as reading the weight does (triton/decode.py)
_unsafe_view = torch.ops.aten._unsafe_view.default  # as torch.matmul does: a result that may be changed in place
SEQUENCES_SCRATCH = 1 << 26  # votes of single sequences held at once


@operation
def votes_product(grad_output: Tensor,  # (n, out) int8
                  x: Tensor,  # (n, in) int8
                  into: Tensor | None = None,  # (out, in) int32 or int64
                  means: Sequence[MeanSquare] = ()) -> Tensor:  # taken in passing -> `into`, or (out, in) int32
    """grad_output^T · x, exact as long as int32 holds it; if given, added to `into`, exact as long as its type does."""
    for one in means:
        take_mean(*one)
    if into is not None:
        for some_grad, some_x in zip(grad_output.split(EXACT_IN_INT32), x.split(EXACT_IN_INT32), strict=True):
            into += votes_product(some_grad, some_x)
        return into
    if x.is_cuda:
        return _cublas_product(grad_output, x)
    # A float32 product of small integers is exact while its sums stay below 2^24, and many times faster than torch's
    # integer one. Autocast off: backward may run inside one, and bf16 sums are not exact.
    votes = torch.zeros(grad_output.shape[1], x.shape[1], dtype=torch.int32, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        for some_grad, some_x in zip(grad_output.split(EXACT_IN_FLOAT32), x.split(EXACT_IN_FLOAT32), strict=True):
            votes += (some_grad.float().t() @ some_x.float()).to(torch.int32)
    return votes


@operation
def grouped_votes_product(grad_output: Tensor,  # (groups, n, out) int8
                          x: Tensor,  # (groups, n, in) int8
                          dtype: torch.dtype) -> Tensor:  # (groups, out, in) of this integer type
    """grad_output^T · x of each group, exact as long as `dtype` holds it."""
    votes = torch.zeros(len(x), grad_output.shape[2], x.shape[2], dtype=dtype, device=x.device)
    with torch.autocast(x.device.type, enabled=False):  # int8 fits TF32's mantissa, too
        for some_grad, some_x in zip(grad_output.split(EXACT_IN_FLOAT32, 1), x.split(EXACT_IN_FLOAT32, 1), strict=True):
            votes += torch.bmm(some_grad.float().transpose(1, 2), some_x.float()).to(dtype)
    return votes


def _cublas_product(grad_output: Tensor, x: Tensor) -> Tensor:
    """On a GPU without Triton: cuBLAS wants sizes in multiples of 8 and more than 16 rows, so pad with zeros."""
    tokens, out, features = x.shape[0], grad_output.shape[1], x.shape[1]

    def padded_transpose(q: Tensor, least: int) -> Tensor:
        rows, columns = max(-(-q.shape[1] // 8) * 8, least), -(-tokens // 8) * 8
        padded = q.new_zeros(rows, columns)
        padded[: q.shape[1], :tokens] = q.t()
        return padded

    return torch._int_mm(padded_transpose(grad_output, 24), padded_transpose(x, 8).t())[:out, :features]


@operation
def sequence_votes(grad_output: Tensor,  # (n, out) int8
                   x: Tensor,  # (n, in) int8
                   sequence: int) -> Tensor:  # tokens that make one sample -> (out, in) int32
    """The sum over sequences of sign(sum over a sequence's tokens of grad_output · x): one vote a sequence."""
    return sequence_votes_and_counts(grad_output, x, sequence)[0]


def sequence_votes_and_counts(grad_output: Tensor, x: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    """`sequence_votes`, and how many sequences voted at all."""
    out, features = grad_output.shape[1], x.shape[1]
    votes = torch.zeros(out, features, dtype=torch.int32, device=x.device)
    counts = torch.zeros_like(votes)
    at_once = max(1, SEQUENCES_SCRATCH // max(out * features, 1)) * sequence
    for some_x, some_grad in zip(x.split(at_once), grad_output.split(at_once), strict=True):
        signs = _votes_of_each_sequence(some_x, some_grad, sequence).sign().to(torch.int8)
        votes += signs.sum(0, dtype=torch.int32)
        counts += signs.abs().sum(0, dtype=torch.int32)
    return votes, counts


def _votes_of_each_sequence(x: Tensor, grad_output: Tensor, sequence: int) -> Tensor:  # (sequences, out, in)
    if sequence > EXACT_IN_FLOAT32:
        pairs, shape = zip(grad_output.split(sequence), x.split(sequence), strict=True), (grad_output.shape[1], x.shape[1])
        return torch.stack([votes_product(one_grad, one_x, x.new_zeros(shape, dtype=torch.int64)
                                          if sequence > EXACT_IN_INT32 else None) for one_grad, one_x in pairs])
    with torch.autocast(x.device.type, enabled=False):  # int8 fits TF32's mantissa, too
        return torch.bmm(grad_output.reshape(-1, sequence, grad_output.shape[1]).float().transpose(1, 2),
                         x.reshape(-1, sequence, x.shape[1]).float())


@operation
def along_levels(votes: Tensor,  # (rows, columns) int32 or int64
                 weight: Tensor,  # (rows, columns) float
                 row_factors: Tensor,  # (rows,) float32: one unit of grad_output, in 1/65536 of a vote's
                 column_factors: Tensor,  # (columns,) float32, likewise of x
                 slope: float = 1.0) -> Tensor:  # (1,) float32
    """slope · sum(gradient · weight) by the votes, each taken back to the scale of its row and column."""
    by_row = (votes.float() * weight.float()) @ (65536.0 / column_factors)
    return (by_row @ (65536.0 / row_factors) * slope).view(1)


@operation
def linear(x: Tensor,  # (n, columns) float
           stored: Tensor,  # (rows, bytes) or (rows, columns)
           storage: Storage,
           scaling: Scaling = PLAIN) -> Tensor:  # (n, rows) of x's type
    """x · weight^T: the forward product of a linear layer."""
    return multiply(x, float_levels(stored, storage, x.shape[1], x.dtype, scaling).t())


@cache
def _cpu_multiplies_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def multiply(x: Tensor,  # (..., k)
             matrix: Tensor) -> Tensor:  # (k, m) -> (..., m)
    """x · matrix."""
    if x.is_cuda:  # torch.matmul would find out as much, and takes the host twice as long
        y = torch.mm(x.reshape(-1, x.shape[-1]), matrix)
        return y if x.dim() == 2 else _unsafe_view(y, (*x.shape[:-1], y.shape[1]))
    if x.dtype is torch.bfloat16 and x.device.type == "cpu" and not _cpu_multiplies_bfloat16():
        # Torch's own product would fail inside, warn, and leave oneDNN for good, also for float32.
        with torch.autocast("cpu", enabled=False):
            return torch.matmul(x.float(), matrix.float()).to(x.dtype)
    return torch.matmul(x, matrix)
