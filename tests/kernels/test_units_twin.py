"""Votes of several layers as floats, and floats as whole numbers of a unit: Triton's are the definition's."""

import pytest
import torch
from kernel_cases import aligned, random_votes

from gft import ops
from gft.ops.places import Places, told_by


@pytest.mark.parametrize("by_table", [False, True], ids=["by their addresses", "by a table"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "votes_dtype"), [((33, 70), torch.int32), ((9, 130), torch.int64), ((1, 1), torch.int32)],
                         ids=str)
def test_votes_of_several_layers_are_one_tensor_of_floats(triton_twins, monkeypatch, shape, votes_dtype, dtype, by_table):
    monkeypatch.setattr("gft.ops.triton.alike.MOST_LAYERS", 3)  # so that two launches take the four
    votes = [random_votes(shape, votes_dtype, seed) for seed in range(4)]
    there = [aligned(one.to(triton_twins.device)) for one in votes]
    places = Places(there)
    if by_table:
        with told_by(places):
            got = triton_twins.as_floats(there, dtype)
        assert places.whole
    else:
        got = triton_twins.as_floats(there, dtype)
    wanted = ops.as_floats.definition(votes, dtype)
    if dtype is torch.bfloat16 and triton_twins.device.type == "cpu":  # the interpreter cuts off where a device rounds
        wanted = (ops.as_floats.definition(votes, torch.float32).view(torch.int32) & -65536).view(torch.float32).to(dtype)
    assert torch.equal(got.cpu(), wanted)


def test_votes_of_other_shapes_or_types_are_left_to_the_definition(triton_twins):
    votes = [torch.ones(3, 4, dtype=dtype, device=triton_twins.device) for dtype in (torch.int32, torch.int64)]
    assert triton_twins.as_floats(votes, torch.float32) is NotImplemented
    assert triton_twins.as_floats(votes[:1], torch.float64) is NotImplemented
    assert triton_twins.as_floats([votes[0][:0]], torch.float32) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(3, 65, 130), (1, 1, 7), (2, 64, 64), (2, 9, 1)], ids=str)
def test_floats_are_whole_numbers_of_a_unit(triton_twins, shape, turned, dtype):
    x = torch.randn(shape, dtype=dtype)
    x[0, 0, 0] = 2.5  # of ties the even one
    x = x.mT.contiguous().mT if turned else x
    per_unit = torch.tensor([1.0, 2.0**20 / 7, 333.3])[: len(x)]
    wanted = ops.in_units.definition(x, per_unit)
    got = triton_twins.in_units(x.to(triton_twins.device), per_unit.to(triton_twins.device))
    assert got.is_contiguous()
    assert torch.equal(got.cpu(), wanted)
    assert wanted[0, 0, 0] == 2


def test_what_lies_in_neither_order_has_no_kernel(triton_twins):
    x = torch.randn(4, 6, 10, device=triton_twins.device)[:, ::2]
    assert triton_twins.in_units(x, torch.ones(4, device=x.device)) is NotImplemented
    assert torch.equal(ops.in_units(x, torch.ones(4, device=x.device)).cpu(), x.round().int().cpu())
