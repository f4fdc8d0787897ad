"""The fused kernels equal the torch definitions bit for bit: through Triton's interpreter here, on the device where there
is one (then the definition runs on the CPU and the kernel on the GPU, so both claims are tested at once)."""

import pytest
import torch

from gft import philox, step, vote
from gft.grid import Grid, field_bits, largest_level

pytest.importorskip("triton")
fused = pytest.importorskip("gft.kernels.fused")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [pytest.param((1, 64), id="row"), pytest.param((63, 65), id="odd"), pytest.param((130, 257), id="blocks")]
TOKENS = [*SHAPES, pytest.param((131, 72), id="eights"), pytest.param((1029, 8), id="chunks")]
STREAM = {"seed": 2**63 + 5, "step": 77, "stream": 4, "call": 2}
FORMS = [pytest.param(2, False, id="2bit-packed"), pytest.param(2, True, id="2bit-memory"),
         pytest.param(3, False, id="3bit-packed"), pytest.param(4, True, id="4bit-memory"),
         pytest.param(5, False, id="5bit-packed"), pytest.param(8, False, id="8bit-packed")]


def random_votes(shape, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    size = 200 if dtype is torch.int32 else 2**40
    return (torch.randn(shape, generator=generator) * size).to(dtype)


@pytest.mark.parametrize("shape", TOKENS)
@pytest.mark.parametrize("kind", ["ternary", "int4", "int8"])
def test_quantize_kernel_equals_definition(shape, kind):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    x[0, 3] = 1e25  # its square is too large for float32
    rms = torch.rand(shape[1], generator=torch.Generator().manual_seed(4)) + 0.1
    rms[5] = 0
    expected = vote.quantize(x, kind, rms, philox.noise16(x.numel(), **STREAM))
    code = vote.CODES[kind]
    got, square, not_finite = fused.quantize(x.to(DEVICE), rms.to(DEVICE), unit=code.unit, largest=code.largest,
                                             smallest_rms=vote.SMALLEST_RMS, largest_squared=vote.LARGEST_SQUARED,
                                             **STREAM)
    assert torch.equal(got.cpu(), expected)
    assert expected.any()
    torch.testing.assert_close(square.cpu(), vote.mean_square(x), rtol=1e-5, atol=0)
    assert int(not_finite) == 3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "memory"), FORMS)
@pytest.mark.parametrize("rule", ["rounding", "topk"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_move_kernel_equals_definition(shape, bits, memory, rule, dtype):
    grid = Grid(bits, *shape, memory)
    top = largest_level(bits)
    stored = grid.store(torch.randint(-top, top + 1, shape, generator=torch.Generator().manual_seed(2)))
    votes = random_votes(shape, dtype)
    noise = philox.noise16(votes.numel(), **STREAM).view(shape)
    old = grid.values(stored)
    if rule == "rounding":
        factors = step.rounding_factors(votes, 0.4, grid.resolution)
        new = step.rounding(old, votes, noise, factors, grid.limit, grid.memory_bits, follow=90)
        settings = step.rounding_factors(votes.to(DEVICE), 0.4, grid.resolution)._asdict()
    else:
        bounds = step.topk_bounds(votes, 0.35)
        assert bounds is not None
        new = step.topk(old, votes, noise, bounds, 0.02, grid.unit, grid.limit)
        settings = step.topk_bounds(votes.to(DEVICE), 0.35)._asdict() | {"p_min": step.least_chance(0.02)}  # type: ignore[union-attr]
    moved = stored.clone().to(DEVICE)
    flips = fused.move(moved, votes.to(DEVICE), shape[1], packed_width=0 if memory else field_bits(bits), top_level=top,
                       memory_bits=grid.memory_bits, follow=90, **settings, **STREAM)
    assert torch.equal(moved.cpu(), grid.from_values(new))
    assert int(flips) == int((grid.value_levels(new) != grid.value_levels(old)).sum())
    assert not torch.equal(new, old)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("silent", [False, True], ids=["", "a silent row and column"])
def test_rounding_factors_kernel_equals_definition(shape, dtype, silent):
    votes = random_votes(shape, dtype)
    if silent:
        votes[0] = votes[:, 3] = 0
    expected = step.rounding_factors(votes, 0.37, 8)
    gain = expected.cap / step.CLIP
    row, column = fused.rounding_factors(votes.to(DEVICE), gain)
    assert torch.equal(row.cpu(), expected.row)
    assert torch.equal(column.cpu(), expected.column)
    assert (expected.row == 0).any() == silent


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [7, 256, 150_000], ids=["few", "batch", "more than int32 holds"])
def test_tally_on_gpu_equals_cpu(tokens):
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-127, 128, (tokens, 37), generator=generator, dtype=torch.int8)
    delta = torch.randint(-127, 128, (tokens, 19), generator=generator, dtype=torch.int8)
    x[:, 0] = delta[:, 0] = 127
    assert torch.equal(vote.tally(x.cuda(), delta.cuda(), 127).cpu(), vote.tally(x, delta, 127))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["rounding", "topk"])
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
def test_same_votes_give_same_weights_on_gpu_and_cpu(rule, memory):
    import gft

    weights = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layer = gft.QuantLinear(130, 67, bits=3, memory=memory).to(device)
        optimizer = gft.GFT(gft.quantized(layer), lr=0.4, rule=rule, seed=9)
        for step_number in range(5):
            layer.weight.ballot.votes = random_votes((67, 130), torch.int32, seed=step_number).to(device)
            layer.weight.ballot.tokens = 1
            optimizer.step()
        weights.append(layer.weight.detach().cpu())
    assert torch.equal(*weights)


@pytest.mark.gpu
@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in_backward"])
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
def test_training_on_gpu_under_autocast_learns_and_stays_on_the_grid(in_backward, memory):
    import gft

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 96), torch.nn.ReLU(), torch.nn.Linear(96, 96), torch.nn.ReLU(),
                                torch.nn.Linear(96, 5)).cuda()
    gft.quantize_(model, 3, memory=memory)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), in_backward=in_backward), torch.optim.AdamW(gft.dense(model)))
    teacher = torch.randn(20, 5, device="cuda")
    losses = []
    for _ in range(150):
        x = torch.randn(256, 20, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    for layer in (model[0], model[2], model[4]):
        assert layer.levels().abs().max() <= 3
        assert layer.weight.element_size() * layer.weight.numel() == pytest.approx(
            layer.in_features * layer.out_features * (1 if memory else 0.5), rel=0.01)
