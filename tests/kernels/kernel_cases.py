"""What the tests of kernels share: the backends, and jobs of every kind of storage and setting.

Triton's kernels run through its interpreter here, and on the device where there is one (then the definition runs on the CPU
and the kernel on the GPU, so both claims are tested at once). C's run on the CPU.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from gft import ops
from gft.ops import native
from gft.philox import NoiseKey

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
KEY = NoiseKey(seed=2**63 + 5, step=77, stream=4, call=2)


class Backend(NamedTuple):
    """Functions by the operations' names, and the device their tensors must be on."""

    twins: dict[str, Any]
    device: torch.device

    def __getattr__(self, name):
        return self.twins[name]


def triton_backend() -> Backend:
    pytest.importorskip("triton")
    from gft.ops import triton

    return Backend(triton.twins(), DEVICE)


def c_backend() -> Backend:
    if native.library() is None:
        pytest.skip("no C compiler here")
    return Backend(native.twins(), CPU)


def random_votes(shape, dtype=torch.int32, seed=1):
    size = 200 if dtype is torch.int32 else 2**40
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def random_stored(storage, shape):
    """Every value that can be stored, with and without something remembered."""
    return storage.from_values(torch.randint(storage.lowest, storage.limit + 1, shape).to(torch.int8))


def random_job(storage, shape, dtype=torch.int32, running=False, seed=1, **settings):
    """A weight with votes, of which it moves about a level at lr = 1."""
    votes = random_votes(shape, dtype, seed)
    if running:
        earlier = random_job(storage, shape, dtype, seed=seed + 90)
        moments = ops.rounding_plan.definition(earlier, 1.0)[1]
        moments[-2] = 0  # a column that had no votes before
        settings["running"] = moments
    one_level = 65536.0 * storage.resolution
    settings = {"lr_scale": one_level * (1 + 10 * (settings.get("threshold", 0) or 0)), "key": KEY} | settings
    return ops.RoundingJob(random_stored(storage, shape), votes, storage, bound=int(votes.abs().max()), **settings)


def aligned(votes: torch.Tensor) -> torch.Tensor:
    """The same where it begins at a multiple of 16 bytes, as on a GPU."""
    room = torch.empty(votes.nbytes + 16, dtype=torch.uint8, device=votes.device)
    room = room[-room.data_ptr() % 16 :][: votes.nbytes].view(votes.dtype).view(votes.shape)
    return room.copy_(votes)


def on(device, value):
    """A job or a plan with its tensors on a device; stored weights are a copy."""
    names = [name for name in value.__slots__ if isinstance(getattr(value, name), torch.Tensor)]
    return replace(value, **{name: getattr(value, name).to(device, copy=True) for name in names})


def rounded_by_definition(job, lr):
    """(stored, second moments, flips) as the definitions give them."""
    stored = job.stored.clone()
    plan, moments = ops.rounding_plan.definition(job, lr)
    return stored, moments, int(ops.round_weights.definition(stored, job.votes, job.storage, plan, job.key))


def assert_on_the_grid(stored, storage, columns):
    values = storage.values(stored, columns)
    assert storage.lowest <= int(values.min())
    assert int(values.max()) <= storage.limit
    assert int(storage.levels(stored, columns).abs().max()) <= storage.largest
