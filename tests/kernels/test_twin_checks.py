"""What a twin is handed is checked before C or Triton sees its address: no number of a wrong tensor is read or written."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_cases import KEY, on, random_job, random_stored, random_votes

from gft import ops
from gft.errors import UsageError
from gft.ops.operation import Operation
from gft.storage import Storage

STORAGE = Storage(4, False)


@pytest.fixture
def job(backend):
    return on(backend.device, random_job(STORAGE, (6, 10), running=True))


def plan_of(job):
    return on(job.votes.device, ops.rounding_plan.definition(on("cpu", job), 0.5)[0])


@pytest.mark.parametrize("running", [(17 - 10,), (256,), (17, 1)], ids=str)
def test_second_moments_of_another_layer_are_refused(backend, job, running, refuses):
    """They came with the state_dict of a narrower layer, and C wrote beyond their end."""
    wrong = torch.ones(running, device=backend.device)
    with refuses(UsageError, "running second moments must be 17 of float32"):
        backend.rounding_plan(replace(job, running=wrong), 0.5)
    assert bool((wrong == 1).all())


def test_second_moments_of_another_type_are_refused(backend, job, refuses):
    with refuses(UsageError, "running second moments must be 17 of float32 .* but is 17 of float64"):
        backend.rounding_plan(replace(job, running=job.running.double()), 0.5)


def test_a_learning_rate_of_several_numbers_is_refused(backend, job, refuses):
    with refuses(UsageError, "lr must be one number"):
        backend.rounding_plan(job, torch.ones(2, device=backend.device))


@pytest.mark.parametrize(("name", "shape", "dtype"), [("row", (5, 1), torch.float32), ("row", (6, 1), torch.float64),
                                                      ("column", (1, 9), torch.float32), ("column", (10,), torch.float32)])
def test_factors_of_another_weight_are_refused(backend, job, name, shape, dtype, refuses):
    plan = replace(plan_of(job), **{name: torch.ones(shape, dtype=dtype, device=backend.device)})
    before = job.stored.clone()
    with refuses(UsageError, f"the plan's {name} factors must be"):
        backend.round_weights(job.stored, job.votes, STORAGE, plan, KEY)
    assert torch.equal(job.stored, before)


@pytest.mark.parametrize("rule", ["round_weights", "topk_weights"])
@pytest.mark.parametrize("wrong", [lambda s: s[:, :4], lambda s: s[:5], lambda s: s.view(torch.int8), lambda s: s.flatten()],
                         ids=["too few bytes", "too few rows", "another type", "no matrix"])
def test_stored_weights_that_do_not_fit_their_votes_are_refused(backend, job, rule, wrong, refuses):
    plan = plan_of(job) if rule == "round_weights" else on(backend.device, ops.topk_plan(job.votes.cpu(), 0.5))
    stored = wrong(job.stored).contiguous()
    before = stored.clone()
    with refuses(UsageError, "stored weight"):
        getattr(backend, rule)(stored, job.votes, STORAGE, plan, KEY)
    assert torch.equal(stored, before)


@pytest.mark.parametrize("bound", [torch.tensor([3, 4]), torch.tensor(3, dtype=torch.int32), torch.tensor(3.0)], ids=str)
def test_bounds_that_are_not_one_whole_number_are_refused(backend, job, bound, refuses):
    plan = on(backend.device, replace(ops.topk_plan(job.votes.cpu(), 0.5), least=bound))
    with refuses(UsageError, "the plan's least vote must be one number of int64"):
        backend.topk_weights(job.stored, job.votes, STORAGE, plan, KEY)


@pytest.mark.parametrize("factors", [torch.ones(7), torch.ones(9, dtype=torch.float64), torch.ones(1), torch.ones(9, 1)],
                         ids=["too few", "another type", "one", "a matrix"])
def test_factors_that_are_not_one_for_each_feature_are_refused(backend, factors, refuses):
    bad = torch.tensor(3, device=backend.device)
    with refuses(UsageError, "the factors must be 9 of float32"):
        backend.quantize(torch.full((4, 9), torch.nan, device=backend.device), factors.to(backend.device), 7, KEY, bad)
    assert int(bad) == 3


@pytest.mark.parametrize("bad", [torch.tensor(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.tensor(0.0)],
                         ids=str)
def test_a_counter_that_is_not_one_int64_is_refused(backend, bad, refuses):
    values, factors = torch.ones(4, 9, device=backend.device), torch.ones(9, device=backend.device)
    with refuses(UsageError, "the count of what is not finite must be one number of int64"):
        backend.quantize(values, factors, 7, KEY, bad.to(backend.device))


def test_values_that_are_no_matrix_are_refused(backend, refuses):
    with refuses(UsageError, "two dimensions"):
        backend.quantize(torch.ones(2, 3, 4, device=backend.device), torch.ones(4, device=backend.device), 7, KEY)


def test_products_of_different_tokens_are_refused(backend, refuses):
    grad_output, x = (torch.ones(n, 5, dtype=torch.int8, device=backend.device) for n in (8, 7))
    with refuses(UsageError, "grad_output has 8 tokens .* but x has 7"):
        backend.votes_product(grad_output, x)


def test_levels_of_rows_of_another_length_are_refused(backend, refuses):
    stored = torch.zeros(3, 10, dtype=torch.int8, device=backend.device)
    with refuses(UsageError, "the stored weight of 11 columns must be 3 × 11 of int8"):
        backend.float_levels(stored, Storage(4), 11, torch.float32)


def test_what_only_triton_takes_is_refused(triton_twins, refuses):
    device = triton_twins.device
    packed = torch.zeros(2, 4, dtype=torch.uint8, device=device)
    with refuses(UsageError, "9 fields of 4 bits take 5 bytes a row but there are 4"):
        triton_twins.unpack_fields(packed, 4, 7, 9)
    with refuses(UsageError, "the stored weight of 9 columns must be 2 × 5 of uint8"):
        triton_twins.linear(torch.ones(1, 9, device=device), packed, STORAGE)
    both = torch.ones(8, 5, dtype=torch.int8, device=device)
    with refuses(UsageError, "8 tokens are not sequences of 3"):
        triton_twins.sequence_votes(both, both, 3)


def test_a_step_of_several_numbers_is_refused(triton_twins, refuses):
    steps = replace(KEY, step=torch.zeros(0, dtype=torch.int64, device=triton_twins.device))
    values, factors = torch.ones(4, 9, device=triton_twins.device), torch.ones(9, device=triton_twins.device)
    with refuses(UsageError, "must be one number"):
        triton_twins.quantize(values, factors, 7, steps)


def test_weights_that_move_together_are_all_checked_before_one_moves(triton_twins, refuses):
    jobs = [on(triton_twins.device, random_job(STORAGE, (6, 10), running=True)) for _ in range(2)]
    jobs[1] = replace(jobs[1], running=jobs[1].running[:9])
    before = jobs[0].stored.clone()
    with refuses(UsageError, "running second moments"):
        triton_twins.round_many(jobs, 0.5)
    assert torch.equal(jobs[0].stored, before)


@pytest.mark.gpu
def test_tensors_of_two_devices_are_refused(triton_twins, refuses):
    job = on("cuda", random_job(STORAGE, (6, 10), running=True))
    with refuses(UsageError, "on cuda:0 here but is 17 of float32 on cpu"):
        triton_twins.rounding_plan(replace(job, running=job.running.cpu()), 0.5)
    with refuses(UsageError, "on cuda:0 but the stored weight|the votes are .* on cpu"):
        triton_twins.round_weights(job.stored, job.votes.cpu(), STORAGE, plan_of(job), KEY)


# ---------------------------------------------------------------------------------------------------- what they decline


def test_what_a_twin_does_not_serve_it_declines(backend, job):
    device, float_values = backend.device, torch.ones(4, 9, device=backend.device)
    factors = torch.ones(9, device=device)
    assert backend.quantize(float_values.double(), factors, 7, KEY) is NotImplemented
    assert backend.quantize(float_values[:0], factors, 7, KEY) is NotImplemented
    assert backend.float_levels(job.stored, STORAGE, 10, torch.float64) is NotImplemented
    assert backend.votes_product(float_values, float_values) is NotImplemented
    short = replace(job, votes=job.votes.to(torch.int16))
    plan = plan_of(job)
    assert backend.rounding_plan(short, 0.5) is NotImplemented
    assert backend.round_weights(job.stored, short.votes, STORAGE, plan, KEY) is NotImplemented
    empty = torch.zeros(0, 10, dtype=torch.int32, device=device)
    assert backend.rounding_plan(replace(job, votes=empty, running=None), 0.5) is NotImplemented
    bounds = on(device, ops.topk_plan(job.votes.cpu(), 0.5))
    assert backend.topk_weights(job.stored, short.votes, STORAGE, bounds, KEY) is NotImplemented


def test_what_c_does_not_serve_it_declines(c_twins):
    assert c_twins.quantize(torch.ones(4, 9), None, 1, KEY) is NotImplemented
    assert c_twins.float_levels(random_stored(STORAGE, (3, 9)), STORAGE, 9, torch.bfloat16) is NotImplemented


def test_what_triton_does_not_serve_it_declines(triton_twins):
    device = triton_twins.device
    assert triton_twins.pack_fields(torch.zeros(2, 3, 4, dtype=torch.int8, device=device), 2, 1) is NotImplemented
    assert triton_twins.pack_fields(torch.zeros(2, 3, dtype=torch.int16, device=device), 2, 1) is NotImplemented
    assert triton_twins.unpack_fields(torch.zeros(3, dtype=torch.uint8, device=device), 2, 1, 12) is NotImplemented
    assert triton_twins.kth_largest(torch.zeros(0, dtype=torch.int32, device=device), 3, 1) is NotImplemented
    stored = random_stored(STORAGE, (3, 9)).to(device)
    for x in (torch.ones(17, 9), torch.ones(0, 9), torch.ones(2, 9, dtype=torch.float64)):
        assert triton_twins.linear(x.to(device), stored, STORAGE) is NotImplemented
    assert triton_twins.linear(torch.ones(2, 9, device=device), stored[:0], STORAGE) is NotImplemented


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_operations_take_weights_without_elements(shape):
    storage = Storage(3, False)
    job = ops.RoundingJob(random_stored(storage, shape), random_votes(shape), storage, KEY, 1.0, 1)
    plan, moments = ops.rounding_plan(job, 0.5)
    assert moments.shape == (6,)
    assert int(ops.round_weights(job.stored, job.votes, storage, plan, KEY)) == 0


def test_twins_have_the_operations_names_and_parameters(backend):
    operations = {name: getattr(ops, name) for name in ops.__all__ if isinstance(getattr(ops, name), Operation)}
    assert set(backend.twins) <= set(operations)
    for name, twin in backend.twins.items():
        assert list(inspect.signature(twin).parameters) == list(inspect.signature(operations[name].definition).parameters)


def test_no_python_function_of_the_backends_takes_more_than_eight_parameters():
    root = Path(ops.__file__).parent
    for path in [*root.glob("*.py"), *root.glob("*/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(one) for one in node.decorator_list):
                assert len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) <= 8, (path.name, node.name)
