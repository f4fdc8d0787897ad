"""Votes, levels and packed numbers: C and Triton give the definitions' integers."""

import math

import pytest
import torch
from kernel_cases import random_stored

from gft import ops
from gft.errors import UsageError
from gft.ops import Scaling
from gft.ops.native import memory
from gft.ops.native.threads import functions
from gft.storage import Storage, field_bits, largest_level


def random_int8(tokens, *features, largest=127):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(-largest, largest + 1, (tokens, n), dtype=torch.int8, generator=generator) for n in features]


@pytest.mark.parametrize("shape", [(1, 64, 1), (37, 24, 8), (131, 130, 257), (1100, 40, 72)], ids=str)
def test_votes_are_the_exact_product(backend, shape):
    grad_output, x = random_int8(*shape)
    grad_output[:, 0] = x[:, 0] = -127
    got = backend.votes_product(grad_output.to(backend.device), x.to(backend.device))
    assert got.dtype is torch.int32
    assert torch.equal(got.cpu(), grad_output.int().T @ x.int())
    assert torch.equal(got.cpu(), ops.votes_product.definition(grad_output, x))


def test_votes_of_no_tokens_are_zero(backend):
    nothing = torch.zeros(0, 7, dtype=torch.int8, device=backend.device)
    got = backend.votes_product(nothing, nothing[:, :5])
    assert got.tolist() == [[0] * 5] * 7


@pytest.mark.parametrize("threads", [1, 3])
def test_c_votes_are_the_same_without_a_product_of_bytes(c_twins, threads, monkeypatch):
    monkeypatch.setattr("gft.ops.native.threads.LEAST_A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    grad_output, x = random_int8(1100, 70, 97)
    expected = grad_output.int().T @ x.int()
    assert torch.equal(c_twins.votes_product(grad_output, x), expected)
    monkeypatch.setattr(functions(), "gft_panel_columns", lambda: 0)
    assert torch.equal(c_twins.votes_product(grad_output, x), expected)


CUTS = [pytest.param((64, 128, 128, 4, 3, 9), 1056, id="tokens split"),
        pytest.param((128, 64, 64, 4, 3, 1), 1100, id="not split"),
        pytest.param((64, 64, 32, 4, 2, 40), 700, id="many programs")]


@pytest.mark.parametrize(("cut", "tokens"), CUTS)
def test_votes_are_the_same_however_the_product_is_cut(triton_twins, cut, tokens, monkeypatch):
    from gft.ops.triton import votes

    monkeypatch.setattr(votes, "cut_for", lambda rows, columns, tokens: votes.Cut(*cut))
    monkeypatch.setattr(votes, "LEAST_TOKENS_A_SPLIT", 64)
    grad_output, x = random_int8(tokens, 70, 130)
    got = triton_twins.votes_product(grad_output.to(triton_twins.device), x.to(triton_twins.device))
    assert torch.equal(got.cpu(), grad_output.int().T @ x.int())


@pytest.mark.parametrize(("sequences", "sequence", "shape"), [(1, 7, (24, 8)), (3, 50, (9, 131)), (3, 128, (24, 8)),
                                                              (10, 2, (70, 9)), (3, 197, (24, 8))])
def test_sequences_vote_as_the_definition_says(triton_twins, sequences, sequence, shape):
    grad_output, x = random_int8(sequences * sequence, *shape, largest=3)
    expected = ops.sequence_votes.definition(grad_output, x, sequence)
    got = triton_twins.sequence_votes(grad_output.to(triton_twins.device), x.to(triton_twins.device), sequence)
    assert torch.equal(got.cpu(), expected)
    assert expected.any()


STORAGES = [Storage(2, False), Storage(2, False, half=True), Storage(3, False), Storage(5, False), Storage(8, False),
            Storage(2), Storage(4, inertia=False), Storage(7)]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_float_levels_equal_the_definition(triton_twins, storage):
    stored = random_stored(storage, (7, 1131))
    for dtype in (torch.float32, torch.bfloat16):
        got = triton_twins.float_levels(stored.to(triton_twins.device), storage, 1131, dtype)
        assert torch.equal(got.cpu(), ops.float_levels.definition(stored, storage, 1131, dtype))
        assert got.any()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_c_float_levels_equal_the_definition(c_twins, storage, threads, monkeypatch):
    monkeypatch.setattr("gft.ops.native.threads.LEAST_A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for shape in ((63, 65), (1, 1), (2, 4099)):
        stored = random_stored(storage, shape)
        got = c_twins.float_levels(stored, storage, shape[1], torch.float32)
        assert torch.equal(got, ops.float_levels.definition(stored, storage, shape[1], torch.float32))


def test_c_float_levels_lie_in_kept_memory_only_once(c_twins, monkeypatch):
    monkeypatch.setattr(memory, "NOT_REUSED", 1)
    monkeypatch.setattr("gft.ops.native.scratch", memory.Scratch())
    storage = Storage(6)
    ones, twos = torch.full((63, 65), 4, dtype=torch.int8), torch.full((63, 65), 8, dtype=torch.int8)

    def levels(stored):
        return c_twins.float_levels(stored, storage, 65, torch.float32)

    first = levels(ones)
    place, view = first.data_ptr(), first[1:].t()
    del first
    second = levels(twos)  # a view of the first is alive
    assert second.data_ptr() != place
    assert bool((view == 1).all())
    assert bool((second == 2).all())
    del view
    assert levels(twos[:40]).data_ptr() == place
    assert bool((levels(twos[:40]) == 2).all())


def test_no_more_is_kept_of_memory_that_was_lent_than_a_bound(monkeypatch):
    monkeypatch.setattr(memory, "NOT_REUSED", 1)
    monkeypatch.setattr(memory, "MOST_KEPT", 4000)
    scratch = memory.Scratch()

    def kept():
        return [block.memory.nbytes for block in scratch.blocks]

    lent = [scratch.borrow((400,)) for _ in range(3)]
    assert kept() == [1600, 1600]  # the third is its borrower's alone
    del lent
    scratch.borrow((100_000,))
    assert kept() == [400_000]  # one of any size
    scratch.borrow((10,), torch.int64)
    assert kept() == [80]


@pytest.mark.parametrize(("bits", "shape"), [(2, (1, 1)), (2, (5, 1030)), (3, (37, 131)), (4, (5, 1025)), (5, (6, 515))])
def test_packing_and_unpacking_are_inverse_and_equal_the_definition(triton_twins, bits, shape):
    width, largest = field_bits(bits), largest_level(bits)
    numbers = torch.randint(-largest, largest + 1, shape, dtype=torch.int8)
    packed = triton_twins.pack_fields(numbers.to(triton_twins.device), width, largest)
    assert torch.equal(packed.cpu(), ops.pack_fields.definition(numbers, width, largest))
    assert torch.equal(triton_twins.unpack_fields(packed, width, largest, shape[1]).cpu(), numbers)


@pytest.mark.gpu
def test_packed_activations_of_more_tokens_than_a_grid_has_rows_are_unpacked():
    numbers = torch.randint(-7, 8, (2, 65_536 * 512 + 9), dtype=torch.int8, device="cuda")
    assert torch.equal(ops.unpack_fields(ops.pack_fields(numbers, 4, 7), 4, 7, numbers.shape[1]), numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("storage", [Storage(2), Storage(3, memory=False)], ids=str)
def test_levels_are_multiplied_by_their_scale_and_rounded_once(backend, storage, dtype):
    stored = random_stored(storage, (9, 65))
    got = backend.float_levels(stored.to(backend.device), storage, 65, dtype, Scaling(number=1.37))
    if got is NotImplemented:
        pytest.skip("left to the definition")
    assert torch.equal(got.cpu(), (storage.levels(stored, 65).float() * 1.37).to(dtype))


@pytest.mark.parametrize("grouped", [False, True])
def test_levels_are_multiplied_by_a_gain_given_as_its_logarithm(backend, grouped):
    storage = Storage(2)
    stored, log_gain = random_stored(storage, (9, 65)), torch.tensor([0.03])
    scales = torch.rand(9, 5).half() + 0.1 if grouped else None
    scaling = Scaling(scales, log_gain, 0.7, 8.0)
    there = Scaling(None if scales is None else scales.to(backend.device), log_gain.to(backend.device), 0.7, 8.0)
    got = backend.float_levels(stored.to(backend.device), storage, 65, torch.float32, there)
    wanted = storage.levels(stored, 65) * 0.7 * math.exp(0.24)
    wanted = wanted if scales is None else wanted * scales.float().repeat_interleave(13, 1)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(ops.float_levels.definition(stored, storage, 65, torch.float32, scaling), wanted, rtol=1e-6,
                               atol=0)


@pytest.mark.parametrize("groups", [1, 5, 65])
@pytest.mark.parametrize("storage", [Storage(4), Storage(2, memory=False)], ids=str)
def test_levels_are_multiplied_by_the_scales_of_their_groups(backend, storage, groups):
    stored = random_stored(storage, (9, 65))
    scales = (torch.rand(9, groups) + 0.1).half()
    got = backend.float_levels(stored.to(backend.device), storage, 65, torch.float32,
                               Scaling(scales.to(backend.device)))
    if got is NotImplemented:
        pytest.skip("left to the definition")
    assert torch.equal(got.cpu(), storage.levels(stored, 65) * scales.float().repeat_interleave(65 // groups, 1))
    assert torch.equal(got.cpu(), ops.float_levels.definition(stored, storage, 65, torch.float32, Scaling(scales)))


def test_factors_that_do_not_divide_the_rows_are_refused(backend, refuses):
    stored = random_stored(Storage(4), (9, 65)).to(backend.device)
    for shape in ((9, 2), (8, 5), (9,), (9, 0), ()):
        with refuses(UsageError, "factors of 9 × 65 levels"):
            backend.float_levels(stored, Storage(4), 65, torch.float32, Scaling(torch.ones(shape, device=backend.device)))
    with refuses(UsageError, "the gain of a weight must be one float"):
        backend.float_levels(stored, Storage(4), 65, torch.float32, Scaling(log_gain=torch.ones(2, device=backend.device)))


@pytest.mark.parametrize("shape", [(1, 64), (63, 65), (20, 1030)], ids=str)
def test_votes_along_the_levels_are_summed_on_their_scales(triton_twins, shape):
    generator = torch.Generator().manual_seed(6)
    votes = torch.randint(-900, 900, shape, generator=generator)
    levels = torch.randint(-7, 8, shape, generator=generator).float() * 0.3
    row, column = (torch.rand(size, generator=generator) * 9e5 + 1e5 for size in shape)
    got = triton_twins.along_levels(*(one.to(triton_twins.device) for one in (votes, levels, row, column)))
    sizes = votes.double() * levels.double() * (65536 / row.double())[:, None] * (65536 / column.double())
    assert float(got) == pytest.approx(float(sizes.sum()), abs=1e-5 * float(sizes.abs().sum()))
    by_definition = ops.along_levels.definition(votes, levels, row, column)
    assert float(got) == pytest.approx(float(by_definition), abs=1e-5 * float(sizes.abs().sum()))
