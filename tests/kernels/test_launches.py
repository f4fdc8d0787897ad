"""How kernels are launched: within the limits of a grid, and many weights of a kind at once."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import DEVICE, KEY, on, random_job

from gft import ops
from gft.storage import Storage

pytest.importorskip("triton")
from gft.ops import triton as twins
from gft.ops.triton import activations, alike, factors, levels, update, windows
from gft.ops.triton.launch import Launcher

MOST = 65_535  # programs along a grid's second and third dimension


class Recorded:
    """A kernel that remembers its grids; it runs if it is given one to run."""

    def __init__(self, kernel=None):
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return (lambda *_, **__: None) if self.kernel is None else self.kernel[grid]


@pytest.fixture
def recorded(monkeypatch):
    """recorded(module, name) puts a Recorded in a kernel's place."""

    def put(module, name, runs=False):
        kernel = Recorded(getattr(module, name) if runs else None)
        launchers = [one for one in vars(module).values() if isinstance(one, Launcher)]
        for launcher in launchers:
            if launcher.kernel is getattr(module, name):
                monkeypatch.setattr(launcher, "kernel", kernel)
                monkeypatch.setattr(launcher, "_known", {})
        monkeypatch.setattr(module, name, kernel)
        return kernel

    return put


def programs(kernel):
    (grid,) = kernel.grids
    assert all(size <= MOST for size in grid[1:])
    return math.prod(grid)


def test_a_convolution_of_millions_of_positions_is_quantized_in_one_launch(recorded):
    kernel = recorded(activations, "_quantize_kernel")
    tokens = (MOST + 2) * activations.LANES * activations.RUN
    twins.quantize(torch.empty(tokens, 1, dtype=torch.bfloat16, device=DEVICE), torch.ones(1, device=DEVICE), 7, KEY)
    assert programs(kernel) >= MOST + 2


def test_images_of_millions_of_positions_are_unfolded_in_one_launch(recorded):
    kernel = recorded(windows, "_patches_kernel")
    positions = (MOST + 2) * windows.BLOCK + 1  # rows that are no whole words
    line = ops.Window((positions,), (positions,), (3,), (1,), (1,), (1,))
    twins.patches(torch.empty(positions, 1, dtype=torch.int8, device=DEVICE), line)
    assert programs(kernel) >= MOST + 2


def test_activations_of_millions_of_tokens_are_packed_in_one_launch(recorded):
    pack, unpack = recorded(levels, "_pack_kernel"), recorded(levels, "_levels_kernel")
    columns = (MOST + 2) * levels.COLUMNS
    packed = twins.pack_fields(torch.empty(1, columns, dtype=torch.int8, device=DEVICE), 2, 1)
    twins.unpack_fields(packed, 2, 1, columns)
    assert programs(pack) == programs(unpack) >= MOST + 2


def test_a_weight_of_millions_of_columns_moves_in_one_launch(recorded):
    squares, move = recorded(factors, "_squares_kernel"), recorded(update, "_move_kernel")
    recorded(factors, "_factors_kernel")
    votes = torch.empty(1, (MOST + 2) * 128 + 8, dtype=torch.int32, device=DEVICE)
    storage = Storage(2, False)
    stored = torch.empty(1, storage.bytes_per_row(votes.shape[1]), dtype=torch.uint8, device=DEVICE)
    twins.round_many([ops.RoundingJob(stored, votes, storage, KEY, 1.0, 9)], 0.5)
    assert programs(squares) > MOST
    assert programs(move) > MOST


def test_a_step_launches_by_kinds_of_weights_and_not_by_weights(recorded):
    kernels = [recorded(factors, "_squares_kernel"), recorded(factors, "_factors_kernel"), recorded(update, "_move_kernel")]
    shapes = [(9, 3), (3, 3), (12, 3), (3, 12)] * 6
    twins.round_many([on(DEVICE, random_job(Storage(2), shape, running=True)) for shape in shapes], 0.4)
    assert [len(kernel.grids) for kernel in kernels] == [4, 4, 4]


def test_a_setting_that_differs_is_a_kind_of_its_own(recorded):
    kernel = recorded(update, "_move_kernel")
    recorded(factors, "_squares_kernel")
    recorded(factors, "_factors_kernel")
    settings = [{}, {"threshold": 0.5}, {"follow": 9}, {"rescale_step": True}, {"running": True}, {"seed": 3}]
    jobs = [on(DEVICE, random_job(Storage(2), (9, 8), **some)) for some in settings]
    jobs.append(on(DEVICE, random_job(Storage(2, inertia=False), (9, 8))))
    twins.round_many(jobs, 0.4)
    assert sorted(grid[1] for grid in kernel.grids) == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_shared_launches_hold_each_weight_once_and_no_two_kinds(most, monkeypatch):
    monkeypatch.setattr(alike, "MOST_LAYERS", most)
    kinds = random.Random(most).choices("abc", weights=[7, 2, 1], k=12)
    shared = alike.shared_launches(kinds)
    assert sorted(number for numbers in shared for number in numbers) == list(range(12))
    assert all(len({kinds[number] for number in numbers}) == 1 for numbers in shared)
    assert len(shared) == sum(-(-kinds.count(kind) // most) for kind in set(kinds))
    assert [alike.padded(numbers)[: len(numbers)] for numbers in shared] == [tuple(numbers) for numbers in shared]
    assert {len(alike.padded([0] * count)) for count in range(1, 9)} == {1, 2, 4, 8}


@pytest.mark.parametrize("most", [3, 4, 65_535])
def test_a_launch_that_goes_on_in_the_third_size_gives_the_same(monkeypatch, most):
    """Eight blocks of tokens in grids of 3 × 3, of 4 × 2 and of 8 × 1: programs without a block do nothing."""
    values = torch.randn(8 * activations.LANES * activations.RUN - 5, 9)
    values[-1, 0] = torch.nan
    factors_of_values = torch.full((9,), 1e5)
    wanted = ops.quantize.definition(values, factors_of_values, 7, KEY)
    monkeypatch.setattr("gft.ops.triton.grids.MOST", most)
    not_finite = torch.zeros((), dtype=torch.int64, device=DEVICE)
    got = twins.quantize(values.to(DEVICE), factors_of_values.to(DEVICE), 7, KEY, not_finite)
    assert torch.equal(got.q.cpu(), wanted.q)
    assert torch.allclose(got.squares.sum(0).cpu(), wanted.squares.sum(0))
    assert int(not_finite) == 1


class Compiled:
    """A kernel that compiles to something that notes how it is run."""

    def __init__(self):
        self.arg_names, self.found, self.runs = ["tensor", "number", "WIDTH"], 0, []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.found += 1
            return SimpleNamespace(run=lambda *args: self.runs.append(args), function="function", packed_metadata="metadata")

        return launch


def test_equal_launches_are_found_once_and_then_run(monkeypatch):
    monkeypatch.setattr("gft.ops.triton.launch.driver",
                        SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: "stream")))
    kernel = Compiled()
    launcher, tensor = Launcher(kernel), torch.zeros(64)
    for number in (3, 4):
        launcher("key", (1, 2, 3), (tensor, number), {"WIDTH": 8})
    assert kernel.found == 1
    assert kernel.runs == [(1, 2, 3, "stream", "function", "metadata", None, None, None, tensor.data_ptr(), 4, 8)]
    launcher("another", (1, 2, 3), (tensor, 3), {"WIDTH": 16})
    assert kernel.found == 2


def test_a_launch_on_memory_that_begins_elsewhere_is_found_by_itself(monkeypatch):
    """A kernel that was compiled to read 16 bytes at a time must not be run where none begin."""
    monkeypatch.setattr("gft.ops.triton.launch.driver",
                        SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: "stream")))
    kernel = Compiled()
    launcher, tensor = Launcher(kernel), torch.zeros(64)
    for _ in range(2):
        launcher("key", (1, 1, 1), ((tensor, tensor), 1), {"WIDTH": 8})
        launcher("key", (1, 1, 1), ((tensor, tensor[1:]), 1), {"WIDTH": 8})
    assert kernel.found == 2
    assert len(kernel.runs) == 2


def test_constants_must_stand_in_the_kernels_order():
    with pytest.raises(AssertionError, match="in the kernel's order"):
        Launcher(Compiled())("key", (1, 1, 1), (torch.zeros(4),), {"WIDTH": 8, "number": 1})
