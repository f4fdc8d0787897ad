"""What a twin checks before it hands memory to C or Triton, which would read and write whatever lies there.

Shapes, types and devices only: to look at numbers would make the host wait for a GPU. What numbers can be is held where they
enter: running scales by `votes.check_running`, levels and scales by `layers/reading.py`. What fails raises UsageError before
anything is written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gft.errors import UsageError
from gft.ops.levels import Scaling
from gft.ops.lowprecision import FIXED, INT8, Tokens
from gft.ops.momentum import KeptMean
from gft.ops.rounding import RoundingJob, RoundingPlan
from gft.ops.topk import TopKPlan
from gft.storage import Storage

VOTES = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # that float32 holds exactly
MOST_ELEMENTS = 2**35  # random numbers are counted so far


def check_tensor(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a tensor of another shape, type or device than a kernel will take it for."""
    if tuple(tensor.shape) == tuple(shape) and tensor.dtype is dtype and tensor.device == device:
        return
    raise UsageError(f"{name} must be {_words(shape, dtype, device)} here but is "
                     f"{_words(tensor.shape, tensor.dtype, tensor.device)}")


def _words(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    size = " × ".join(map(str, shape)) or "one number"
    return f"{size} of {str(dtype).removeprefix('torch.')} on {device}"


def check_matrix(name: str, tensor: Tensor) -> None:
    """Refuse what has not two dimensions."""
    if tensor.dim() != 2:
        raise UsageError(f"{name} must have two dimensions but has the shape {tuple(tensor.shape)}")


def check_scalar(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what is not one number in a device's memory."""
    check_tensor(name, tensor, (), dtype, device)


def check_stored(stored: Tensor, storage: Storage, columns: int) -> None:
    """Refuse bytes that are not rows of `columns` weights in this storage."""
    check_matrix("the stored weight", stored)
    expected = stored.shape[0], storage.bytes_per_row(columns)
    check_tensor(f"the stored weight of {columns} columns", stored, expected, storage.dtype, stored.device)


def check_weight(stored: Tensor, votes: Tensor, storage: Storage) -> None:
    """Refuse a stored weight and votes that do not belong together."""
    check_matrix("the votes", votes)
    check_stored(stored, storage, votes.shape[1])
    if votes.shape[0] != stored.shape[0] or votes.device != stored.device:
        raise UsageError(f"the votes are {_words(votes.shape, votes.dtype, votes.device)} but the stored weight has "
                         f"{stored.shape[0]} rows on {stored.device}")


def check_factors(plan: RoundingPlan, votes: Tensor) -> None:
    """Refuse factors that are not one for each row and one for each column of the votes."""
    rows, columns = votes.shape
    check_tensor("the plan's row factors", plan.row, (rows, 1), torch.float32, votes.device)
    check_tensor("the plan's column factors", plan.column, (1, columns), torch.float32, votes.device)
    if isinstance(plan.cap, Tensor):
        check_scalar("the plan's cap", plan.cap, torch.float32, votes.device)
    if isinstance(plan.threshold_share, Tensor):
        check_scalar("the plan's threshold", plan.threshold_share, torch.float32, votes.device)


def check_choice(plan: TopKPlan, votes: Tensor) -> None:
    """Refuse bounds of K that are not whole numbers beside the votes."""
    check_scalar("the plan's least vote", plan.least, torch.int64, votes.device)
    check_scalar("the plan's largest vote", plan.largest, torch.int64, votes.device)


def check_job(job: RoundingJob, lr: float | Tensor) -> None:
    """Refuse running second moments of another layer's size, and a lr that is not one number."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise UsageError(f"lr must be one number but has the shape {tuple(lr.shape)}")
    check_matrix("the votes", job.votes)
    if job.running is not None:
        length = sum(job.votes.shape) + 1
        check_tensor("the running second moments", job.running, (length,), torch.float32, job.votes.device)


def check_values(values: Tensor, factors: Tensor | None, not_finite: Tensor | None) -> None:
    """Refuse factors that are not one for each feature, and a counter that is not one int64."""
    check_matrix("the values to quantize", values)
    if factors is not None:
        check_tensor("the factors", factors, values.shape[1:], torch.float32, values.device)
    if not_finite is not None:
        check_scalar("the count of what is not finite", not_finite, torch.int64, values.device)


def check_scaling(scaling: Scaling, stored: Tensor, columns: int) -> None:
    """Refuse factors that are not one for each group of columns of a row, and a gain that is not one float, beside the
    weight."""
    rows, factors, log_gain = len(stored), scaling.by_group, scaling.log_gain
    if factors is not None:
        fits = factors.dim() == 2 and factors.shape[0] == rows and factors.shape[1] > 0 and columns % factors.shape[1] == 0
        if not fits or factors.device != stored.device or not factors.is_floating_point():
            raise UsageError(f"the factors of {rows} × {columns} levels must be as many floats for each row as divide it "
                             f"evenly, on {stored.device}, but are {_words(factors.shape, factors.dtype, factors.device)}")
    check_gain(log_gain, stored.device)


def check_gain(log_gain: Tensor | None, device: torch.device) -> None:
    """Refuse a gain that is not one float on the device."""
    if log_gain is not None and not (log_gain.shape == (1,) and log_gain.is_floating_point() and log_gain.device == device):
        raise UsageError(f"the gain of a weight must be one float on {device} but is "
                         f"{_words(log_gain.shape, log_gain.dtype, log_gain.device)}")


def check_tokens(tokens: Tokens, levels: Tensor, by_output: Tensor | None) -> None:
    """Refuse levels of other features than the rounded tokens have, and scales that are not one for each."""
    q, scale = tokens
    check_matrix("the rounded tokens", q)
    (count, features), outputs, device = q.shape, len(levels), q.device
    check_tensor("the levels", levels, (outputs, features), INT8 if q.dtype is FIXED else q.dtype, device)
    check_tensor("the tokens' scales", scale, (count,), torch.float32, device)
    if by_output is not None:
        check_tensor("the outputs' scales", by_output, (outputs,), torch.float32, device)


def check_pair(grad_output: Tensor, x: Tensor) -> None:
    """Refuse a grad_output and an x that are not of the same tokens."""
    check_matrix("grad_output", grad_output)
    check_matrix("x", x)
    if grad_output.shape[0] != x.shape[0] or grad_output.device != x.device:
        raise UsageError(f"grad_output has {grad_output.shape[0]} tokens on {grad_output.device} but x has {x.shape[0]} on "
                         f"{x.device}")


def check_kept(kept: KeptMean, votes: Tensor) -> None:
    """Refuse a running mean and votes that do not belong together."""
    check_matrix("the votes", votes)
    check_tensor("the mean of votes", kept.stored, votes.shape, torch.int8, votes.device)
    check_tensor("the scales of the mean of votes", kept.scale, votes.shape[1:], torch.float32, votes.device)


def are_votes(votes: Tensor, first: int = 0) -> bool:
    """Are there any, in a type that kernels read, and not more than there are random numbers for from `first` on?"""
    return votes.dtype in VOTES and 0 < votes.numel() <= MOST_ELEMENTS - first


def are_int8(*tensors: Tensor) -> bool:
    return all(tensor.dtype is torch.int8 for tensor in tensors)
