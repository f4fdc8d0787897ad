"""The same bits on a GPU each time that a run is repeated (`gft train --deterministic`).

gft's own kernels add floats in a fixed order, and only integers by atomics, whose order makes no difference. What is left is
torch's: gradients of attention and of embeddings are added by atomics unless it is told not to, cuDNN and torch.compile take
whichever of several kernels was faster when they tried them, and each adds floats in an order of its own.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from gft.errors import UsageError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE_WORKSPACES = (":4096:8", ":16:8")  # the two with which cuBLAS gives the same bits again


@contextmanager
def repeatable(wanted: bool, compiled: bool) -> Iterator[None]:
    """Have torch take the same order each time, in this block; an operation that cannot raises torch's own error. compiled:
    is there something that torch.compile has to know of it?"""
    if not wanted:
        yield
        return
    workspace = os.environ.get(WORKSPACE)
    if workspace is not None and workspace not in REPEATABLE_WORKSPACES:
        raise UsageError(f"{WORKSPACE}={workspace} lets products differ from run to run; unset it, or set it to "
                         f"{REPEATABLE_WORKSPACES[0]}, or leave out --deterministic")
    switches = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills, tries = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    os.environ[WORKSPACE] = workspace or REPEATABLE_WORKSPACES[0]  # read when the first product asks for cuBLAS
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # to find programs that read it; these do not, and it costs
    torch.backends.cudnn.benchmark = False
    try:
        with _compiler() if compiled else nullcontext():
            yield
    finally:
        if workspace is None:
            del os.environ[WORKSPACE]
        torch.use_deterministic_algorithms(switches[0], warn_only=switches[1])
        memory.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = tries


@contextmanager
def _compiler() -> Iterator[None]:
    """torch.compile chooses kernels of sums by their shape, not by the clock."""
    from torch._inductor import config

    # Before torch 2.10 there is no such setting, and the switch of deterministic algorithms has to do.
    with config.patch(deterministic=True) if hasattr(config, "deterministic") else nullcontext():
        yield
