"""The kernels equal the torch definitions bit for bit: Triton's through its interpreter here and on the device where there
is one (then the definition runs on the CPU and the kernel on the GPU, so both claims are tested at once), C's on the CPU."""

import os
import random
import subprocess
import sys

import pytest
import torch

from gft import grid as gft_grid
from gft import kernels, philox, step, vote
from gft.grid import Grid, field_bits, largest_level
from gft.kernels import native

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["triton", "c"])
def twin(request):
    """A module of kernels and the device its tensors must be on."""
    if request.param == "triton":
        pytest.importorskip("triton")
        return pytest.importorskip("gft.kernels.fused"), DEVICE
    if native.library() is None:
        pytest.skip("no C compiler here")
    return native, "cpu"


SHAPES = [pytest.param((1, 64), id="row"), pytest.param((63, 65), id="odd"), pytest.param((130, 257), id="blocks"),
          pytest.param((131, 72), id="eights"), pytest.param((8, 1024), id="whole")]
TOKENS = [*SHAPES, pytest.param((256, 128), id="even"),
          pytest.param((1029, 8), id="chunks")]
STREAM = {"seed": 2**63 + 5, "step": 77, "stream": 4, "call": 2}
# of rounding_factors
AT_FIRST = {"clip": step.CLIP, "most_halvings": step.MOST_HALVINGS, "running": None, "step": 0, "own_size": False}
FORMS = [pytest.param(2, False, id="2bit-packed"), pytest.param(2, True, id="2bit-memory"),
         pytest.param(3, False, id="3bit-packed"), pytest.param(4, True, id="4bit-memory"),
         pytest.param(5, False, id="5bit-packed"), pytest.param(8, False, id="8bit-packed")]
MOVES = [pytest.param(*form.values, rule, 90, id=f"{form.id}-{rule}") for form in FORMS for rule in ("rounding", "topk")]
MOVES += [pytest.param(bits, True, "rounding", step.FOLLOW_ALL, id=f"{bits}bit-memory-no inertia") for bits in (2, 4)]


def random_votes(shape, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    size = 200 if dtype is torch.int32 else 2**40
    return (torch.randn(shape, generator=generator) * size).to(dtype)


@pytest.mark.parametrize("shape", TOKENS)
@pytest.mark.parametrize("kind", ["ternary", "int4", "int8"])
def test_quantize_kernel_equals_definition(twin, shape, kind):
    kernel, device = twin
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    x[0, 3] = 1e25  # its square is too large for float32
    rms = torch.rand(shape[1], generator=torch.Generator().manual_seed(4)) + 0.1
    rms[5] = 0
    expected = vote.quantize(x, kind, rms, philox.noise16(x.numel(), **STREAM))
    code = vote.CODES[kind]
    counted = torch.tensor(5, device=device)
    got, square = kernel.quantize(x.to(device), vote.fixed_point_factor(code, rms.to(device)), counted,
                                  largest=code.largest, largest_squared=vote.LARGEST_SQUARED, **STREAM)
    assert torch.equal(got.cpu(), expected)
    assert expected.any()
    torch.testing.assert_close(square.cpu(), vote.mean_square(x), rtol=1e-5, atol=0)
    assert int(counted) == 5 + 3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "memory", "rule", "follow"), MOVES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_move_kernel_equals_definition(twin, shape, bits, memory, rule, follow, dtype):
    kernel, device = twin
    grid = Grid(bits, *shape, memory)
    top = largest_level(bits)
    stored = grid.store(torch.randint(-top, top + 1, shape, generator=torch.Generator().manual_seed(2)))
    votes = random_votes(shape, dtype)
    noise = philox.noise16(votes.numel(), **STREAM).view(shape)
    old = grid.values(stored)
    if rule == "rounding":
        shift = step.square_shift(int(votes.abs().max()), *shape)
        factors, _ = step._factors(votes, 0.5, grid.resolution(follow < step.FOLLOW_ALL) * 65536.0, shift)
        factors = factors._replace(quiet=0 if grid.memory_bits else 0.07)
        new = step.rounding(old, votes, noise, factors, grid.limit, grid.memory_bits, follow, grid.lowest)
        settings = factors._asdict() | {"row": factors.row.to(device), "column": factors.column.to(device)}
    else:
        bounds = step.topk_bounds(votes, 0.35)
        assert bounds is not None
        new = step.topk(old, votes, noise, bounds, 0.02, grid.unit, grid.limit, grid.lowest)
        settings = step.topk_bounds(votes.to(device), 0.35)._asdict() | {"p_min": step.least_chance(0.02)}  # type: ignore[union-attr]
    moved = stored.clone().to(device)
    flips = torch.zeros((), dtype=torch.int64, device=device)
    kernel.move(moved, votes.to(device), shape[1], flips, follow=follow, **grid.form, **settings, **STREAM)
    assert torch.equal(moved.cpu(), grid.from_values(new))
    assert int(flips) == int((grid.value_levels(new) != grid.value_levels(old)).sum())
    assert not torch.equal(new, old)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("silent", [False, True], ids=["", "a silent row and column"])
@pytest.mark.parametrize("number", [0, 1, 6, 300], ids="step {}".format)
@pytest.mark.parametrize("own_size", [False, True], ids=["", "own size"])
def test_rounding_factors_kernel_equals_definition(twin, shape, dtype, silent, number, own_size):
    kernel, device = twin
    votes = random_votes(shape, dtype)
    if silent:
        votes[0] = votes[:, 3] = 0
    lr, worth = 0.3, 8 * 65536.0
    shift = step.square_shift(int(votes.abs().max()), *shape)
    assert (shift > 0) == (dtype is torch.int64 and bool(votes.any()))
    running = None
    if number:
        earlier = random_votes(shape, dtype, seed=9)
        running = step.rounding_factors(earlier, lr, 8)[1]
        running[-2] = 0  # a column that was silent before
    expected, squares = step._factors(votes, lr, worth, shift, step.Squares(running, number, own_size))
    row, column, cap, renewed = kernel.rounding_factors(
        votes.to(device), lr, worth, shift, clip=step.CLIP, most_halvings=step.MOST_HALVINGS,
        running=running if running is None else running.to(device), step=number, own_size=own_size)
    assert torch.equal(renewed.cpu(), squares)
    assert float(cap) == expected.cap
    assert torch.equal(row.cpu(), expected.row)
    assert torch.equal(column.cpu(), expected.column)
    if not number:
        assert (expected.row == 0).any() == silent


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_c_kernels_give_the_same_whatever_the_threads(threads, monkeypatch):
    if native.library() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(native, "LEAST_A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.randn(300, 77, generator=torch.Generator().manual_seed(3))
    code = vote.CODES["int8"]
    q, square = native.quantize(x, vote.fixed_point_factor(code, torch.ones(77)), largest=127, largest_squared=1e15,
                                **STREAM)
    assert torch.equal(q, vote.quantize(x, "int8", torch.ones(77), philox.noise16(x.numel(), **STREAM)))
    sums = torch.stack([piece.double().square().sum(0) for piece in x.split(native.ROWS_OF_SQUARES)]).sum(0)
    assert torch.equal(square, (sums / 300).float())
    votes, grid = random_votes((131, 77), torch.int32), Grid(2, 131, 77, memory=False)
    factors, _ = step._factors(votes, 0.5, 65536.0, 2)
    row, column, cap, _ = native.rounding_factors(votes, 0.5, 65536.0, 2, **AT_FIRST)
    assert torch.equal(row, factors.row)
    assert torch.equal(column, factors.column)
    assert cap == factors.cap
    stored = grid.store(torch.randint(-1, 2, (131, 77), generator=torch.Generator().manual_seed(2)))
    new = step.rounding(grid.values(stored), votes, philox.noise16(votes.numel(), **STREAM).view(131, 77), factors, 1)
    flips = torch.zeros((), dtype=torch.int64)
    native.move(stored, votes, 77, flips, packed_width=2, top_level=1, memory_bits=0, follow=256, **factors._asdict(),
                        **STREAM)
    assert torch.equal(grid.values(stored), new)
    assert int(flips) > 0


@pytest.mark.parametrize("bits", [2, 4, 7])
def test_float_levels_and_whole_numbers_are_converted_exactly(bits):
    grid = Grid(bits, 63, 65, memory=True)
    stored = torch.randint(-grid.limit, grid.limit + 1, (63, 65), dtype=torch.int8)
    assert torch.equal(grid.float_levels(stored, torch.float32), grid.levels(stored).float())
    if native.library() is not None:
        whole = torch.randint(-(2**24), 2**24, (63, 65))
        assert torch.equal(native.as_int32(whole.float()), whole.int())


def test_twin_of_names_the_kernels_of_a_device():
    assert kernels.twin_of(torch.zeros(1)) in (native, None)
    assert kernels.twin_of(torch.zeros(1, device="meta")) is None
    assert (kernels.twin_of(torch.zeros(1)) is None) == (native.library() is None)


@pytest.mark.parametrize("settings", [{"GFT_NATIVE": "0"}, {"CC": "/nowhere/cc"}], ids=["switched off", "no compiler"])
def test_training_goes_on_without_a_compiler(settings, tmp_path):
    program = """
import torch, gft
from gft.kernels import native
torch.manual_seed(0)
layer = gft.QuantLinear(20, 9, bits=3)
optimizer = gft.GFT(gft.quantized(layer), lr=0.5)
before = layer.weight.clone()
layer(torch.randn(8, 20)).square().mean().backward()
optimizer.step()
print(native.library(), not torch.equal(before, layer.weight))
"""
    environment = {**os.environ, **settings, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "True"]
    assert not done.stderr


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
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
@pytest.mark.parametrize("shape", [(384, 48), (67, 130)], ids=["whole", "odd"])
def test_many_layers_that_move_together_on_gpu_equal_the_cpu(shape, memory):
    import gft

    states = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layers = [gft.QuantLinear(*shape, bits=2 + number % 2, memory=memory).to(device) for number in range(35)]
        optimizer = gft.GFT([layer.weight for layer in layers], lr=0.4, seed=9)
        for number in range(3):
            for place, layer in enumerate(layers):
                if place != number + 5:  # one of them hears nothing
                    votes = random_votes(shape[::-1], torch.int32, seed=100 * number + place)
                    layer.weight.ballot.votes, layer.weight.ballot.tokens = votes.to(device), 1
            optimizer.step()
        states.append([(layer.weight.cpu(), *(value.cpu() for value in optimizer.state[layer.weight].values()
                                              if isinstance(value, torch.Tensor))) for layer in layers])
    for one, other in zip(*states, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


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


# ---------------------------------------------------------------------------------------------------- Triton alone


@pytest.fixture
def fused():
    pytest.importorskip("triton")
    return pytest.importorskip("gft.kernels.fused")


@pytest.mark.parametrize("shape", [(1, 64, 1), (37, 24, 8), (131, 130, 257), (1100, 40, 72), (2048, 128, 136)], ids=str)
def test_votes_kernel_is_the_exact_product(fused, shape):
    tokens, rows, columns = shape
    generator = torch.Generator().manual_seed(2)
    delta, x = (torch.randint(-127, 128, (tokens, n), dtype=torch.int8, generator=generator) for n in (rows, columns))
    expected = delta.int().T @ x.int()
    assert torch.equal(fused.votes_product(delta.to(DEVICE), x.to(DEVICE)).cpu(), expected)


@pytest.mark.parametrize(("sequences", "sequence"), [(1, 7), (5, 50), (3, 128), (40, 2), (6, 197), (9, 256)])
@pytest.mark.parametrize("shape", [(24, 8), (70, 131)], ids=str)
def test_sequence_votes_kernel_equals_definition(fused, sequences, sequence, shape):
    generator = torch.Generator().manual_seed(2)
    delta, x = (torch.randint(-3, 4, (sequences * sequence, n), dtype=torch.int8, generator=generator) for n in shape)
    expected, _ = vote._sequence_tally(x, delta, sequence)
    assert torch.equal(fused.sequence_votes(delta.to(DEVICE), x.to(DEVICE), sequence).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "memory"), FORMS)
def test_levels_kernel_equals_definition(fused, bits, memory, dtype):
    grid, top = Grid(bits, 37, 131, memory), largest_level(bits)
    levels = torch.randint(-top, top + 1, (37, 131), generator=torch.Generator().manual_seed(2))
    rest = torch.randint(-(grid.unit // 2), max(grid.unit // 2, 1), (37, 131))
    stored = grid.from_values((levels * grid.unit + rest).clamp(-128, 127).to(torch.int8))
    got = fused.float_levels(stored.to(DEVICE), 131, dtype, **grid.form)
    assert torch.equal(grid.levels(stored), levels)
    assert torch.equal(got.cpu(), grid.levels(stored).to(dtype))


def test_numbers_on_the_device_give_the_same_bits(fused):
    """A captured CUDA graph reads the step and lr from the device's memory."""
    votes, grid = random_votes((63, 65), torch.int32), Grid(4, 63, 65, True)
    stored = grid.store(torch.zeros(63, 65, dtype=torch.int8))
    wide = {"packed_width": 0, "top_level": 7, "memory_bits": 4, "follow": 90}

    def moved(lr, number):
        row, column, cap, _ = fused.rounding_factors(votes.to(DEVICE), lr, 90000.0, 0, **AT_FIRST)
        new, flips = stored.clone().to(DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
        fused.move(new, votes.to(DEVICE), 65, flips, **wide, row=row, column=column, cap=cap, **(STREAM | {"step": number}))
        return new.cpu()

    def on_device(number):
        return torch.tensor(number, device=DEVICE)

    one = moved(0.3, 77)
    assert one.any()
    assert torch.equal(one, moved(on_device(0.3), on_device(77)))
    assert not moved(on_device(0.0), 77).any()


def a_layer(fused, draw, shape, bits, memory, running):
    """A layer with votes, and what the definitions make of it: (fused.Layer, step -> stored, squares, flips)."""
    grid, stream = Grid(bits, *shape, memory), draw.randrange(0, 99, 3)
    stored = grid.from_values(torch.randint(grid.lowest, grid.limit + 1, shape).to(torch.int8))
    votes = random_votes(shape, draw.choice([torch.int32, torch.int64]), seed=draw.randrange(99))
    shift = step.square_shift(int(votes.abs().max()), *shape)
    worth = step.worth_of(draw.choice([0.3, 1.7]), grid.resolution(True), 0.0 if grid.memory_bits else 0.6)
    squares = step.rounding_factors(random_votes(shape, votes.dtype, seed=9), 1.0, 8)[1] if running else None
    own_size = running and not memory

    def defined(lr, number, follow, seed, call):
        factors, renewed = step._factors(votes, lr, worth, shift, step.Squares(squares, number, own_size))
        noise = philox.noise16(votes.numel(), seed=seed, step=number, stream=stream, call=call).view(shape)
        factors, old = factors._replace(quiet=0.0 if grid.memory_bits else 0.15), grid.values(stored)
        new = step.rounding(old, votes, noise, factors, grid.limit, grid.memory_bits, follow, grid.lowest)
        return grid.from_values(new), renewed, int((grid.value_levels(new) != grid.value_levels(old)).sum())

    return fused.Layer(stored=stored.clone().to(DEVICE), votes=votes.to(DEVICE), worth=worth, stream=stream, shift=shift,
                       running=None if squares is None else squares.to(DEVICE), quiet=0.0 if grid.memory_bits else 0.15,
                       own_size=own_size, **grid.form), defined


KINDS = [((3, 24), 2, True, True), ((3, 24), 2, True, False), ((3, 24), 4, False, False), ((3, 24), 4, False, True),
         ((5, 9), 3, True, True), ((5, 9), 2, False, False), ((2, 72), 8, False, False), ((1, 1), 4, True, True)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("number", "follow"), [(0, 90), (6, 90), (6, step.FOLLOW_ALL)])
def test_layers_that_move_together_equal_each_by_its_definition(fused, seed, number, follow, monkeypatch):
    monkeypatch.setattr(fused.alike, "MOST_LAYERS", 3)
    draw = random.Random(seed)
    kinds = draw.choices(KINDS[:4], k=5) + draw.choices(KINDS, k=draw.randrange(4))
    layers, definitions = zip(*[a_layer(fused, draw, *kind) for kind in kinds], strict=True)
    told = fused.round_together(layers, 0.4, clip=step.CLIP, most_halvings=step.MOST_HALVINGS, follow=follow,
                                seed=2**63 + 5, step=number, call=1)
    flips = 0
    for layer, (squares, flipped), defined in zip(layers, told, definitions, strict=True):
        expected = defined(0.4, number, follow, 2**63 + 5, 1)
        assert torch.equal(layer.stored.cpu(), expected[0])
        assert torch.equal(squares.cpu(), expected[1])
        assert int(flipped) == expected[2]
        flips += expected[2]
    assert flips > 0


@pytest.mark.parametrize("lr", [0.0, 0.4])
def test_layers_that_move_together_read_numbers_on_the_device(fused, lr):
    """As a captured CUDA graph has them."""
    layer, defined = a_layer(fused, random.Random(1), (3, 24), 2, True, True)
    (told,) = fused.round_together([layer], torch.tensor(lr, device=DEVICE), clip=step.CLIP, follow=90, seed=7, call=0,
                                   most_halvings=step.MOST_HALVINGS, step=torch.tensor(6, device=DEVICE))
    expected = defined(torch.tensor(lr), 6, 90 if lr else 0, 7, 0)  # at a lr of 0 nothing follows
    assert torch.equal(layer.stored.cpu(), expected[0])
    assert torch.equal(told.squares.cpu(), expected[1])
    assert int(told.flips) == expected[2]
    assert (expected[2] > 0) == (lr > 0)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


def test_a_step_launches_by_kinds_of_layers_and_not_by_layers(fused, monkeypatch):
    counted, draw = [], random.Random(0)
    for module, name in (("factors", "_squares_kernel"), ("factors", "_factors_kernel"), ("update", "_move_kernel")):
        counted.append(Counted(getattr(getattr(fused, module), name)))
        monkeypatch.setattr(getattr(fused, module), name, counted[-1])
    monkeypatch.setattr(draw, "choice", lambda choices: choices[0])  # all votes int32
    shapes = [(9, 3), (3, 3), (12, 3), (3, 12)] * 6
    layers = [a_layer(fused, draw, shape, 2, True, True)[0] for shape in shapes]
    fused.round_together(layers, 0.4, clip=step.CLIP, most_halvings=7, follow=90, seed=1, step=6, call=0)
    assert [one.launches for one in counted] == [4, 4, 4]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_shared_launches_hold_each_layer_once_and_no_two_kinds(fused, most, monkeypatch):
    monkeypatch.setattr(fused.alike, "MOST_LAYERS", most)
    kinds = random.Random(most).choices("abc", weights=[7, 2, 1], k=12)
    shared = fused.alike.shared_launches(kinds)
    assert sorted(number for numbers in shared for number in numbers) == list(range(12))
    assert all(len({kinds[number] for number in numbers}) == 1 for numbers in shared)
    assert len(shared) == sum(-(-kinds.count(kind) // most) for kind in set(kinds))
    assert [fused.alike.padded(numbers)[: len(numbers)] for numbers in shared] == [tuple(numbers) for numbers in shared]
    assert {len(fused.alike.padded([0] * count)) for count in range(1, 9)} == {1, 2, 4, 8}


CUTS = [pytest.param((64, 128, 128, 4, 3, 9), id="tokens split"), pytest.param((128, 64, 64, 4, 3, 1), id="not split"),
        pytest.param((64, 64, 32, 4, 2, 40), id="many programs")]


@pytest.mark.parametrize("tokens", [1056, 1100], ids=["whole steps", "a rest"])
@pytest.mark.parametrize("cut", CUTS)
def test_votes_are_the_same_however_the_product_is_cut(fused, cut, tokens, monkeypatch):
    monkeypatch.setattr(fused.votes, "cut_for", lambda rows, columns, tokens: fused.votes.Cut(*cut))
    monkeypatch.setattr(fused.votes, "LEAST_TOKENS_A_SPLIT", 64)
    generator = torch.Generator().manual_seed(2)
    delta, x = (torch.randint(-127, 128, (tokens, n), dtype=torch.int8, generator=generator) for n in (70, 130))
    assert torch.equal(fused.votes_product(delta.to(DEVICE), x.to(DEVICE)).cpu(), delta.int().T @ x.int())


@pytest.fixture
def c():
    if native.library() is None:
        pytest.skip("no C compiler here")
    return native


@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 3, 5), (37, 8, 48), (131, 130, 257), (1100, 70, 97)], ids=str)
@pytest.mark.parametrize("instruction", [True, False], ids=["bytes", "floats"])
def test_c_votes_are_the_exact_product(c, shape, instruction, monkeypatch):
    tokens, rows, columns = shape
    generator = torch.Generator().manual_seed(2)
    delta, x = (torch.randint(-127, 128, (tokens, n), dtype=torch.int8, generator=generator) for n in (rows, columns))
    delta[:, 0] = x[:, 0] = -127
    if not instruction:
        monkeypatch.setattr(c.library(), "gft_panel_columns", lambda: 0)
    got = c.votes_product(delta, x)
    assert got.dtype is torch.int32
    assert torch.equal(got, delta.int().T @ x.int())


@pytest.mark.parametrize(("bits", "memory"), FORMS)
@pytest.mark.parametrize("gain", [20000.0, 2.0**28], ids=["small moves", "moves across the grid"])
def test_c_move_equals_definition_over_several_blocks(c, bits, memory, gain):
    shape = (3, 4101)
    grid, votes = Grid(bits, *shape, memory), random_votes(shape, torch.int32)
    torch.manual_seed(2)
    old = torch.randint(grid.lowest, grid.limit + 1, shape, dtype=torch.int8)
    stored, factors = grid.from_values(old.clone()), step._factors(votes, 1.0, gain, 0)[0]
    new = step.rounding(old, votes, philox.noise16(votes.numel(), **STREAM).view(shape), factors, grid.limit,
                        grid.memory_bits, 90, grid.lowest)
    flips = torch.zeros((), dtype=torch.int64)
    c.move(stored, votes, shape[1], flips, follow=90, **grid.form, **factors._asdict(), **STREAM)
    assert torch.equal(stored, grid.from_values(new))
    assert int(flips) == int((grid.value_levels(new) != grid.value_levels(old)).sum()) > 0


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**30], ids=["squares fit 32 bits", "squares do not", "with a shift"])
def test_c_rounding_factors_equal_definition_for_large_votes(c, size):
    votes = random_votes((5, 4101), torch.int32).clamp(-size, size)
    votes[2, 3], votes[4, 4100] = size, -size
    shift = step.square_shift(size, 5, 4101)
    assert (shift > 0) == (size == 2**30)
    expected, _ = step._factors(votes, 0.5, 65536.0, shift)
    row, column, cap, _ = c.rounding_factors(votes, 0.5, 65536.0, shift, **AT_FIRST)
    assert torch.equal(row, expected.row)
    assert torch.equal(column, expected.column)
    assert cap == expected.cap


def test_c_float_levels_lie_in_kept_memory_only_once(c, monkeypatch):
    monkeypatch.setattr(c, "FRESH", 1)
    monkeypatch.setattr(c, "_scratch", c._Scratch())
    ones, twos = torch.full((63, 65), 4, dtype=torch.int8), torch.full((63, 65), 8, dtype=torch.int8)
    first = c.float_levels(ones, 2)
    place, view = first.data_ptr(), first[1:].t()
    del first
    second = c.float_levels(twos, 2)  # a view of the first is alive
    assert second.data_ptr() != place
    assert bool((view == 1).all())
    assert bool((second == 2).all())
    del view
    assert c.float_levels(twos[:40], 2).data_ptr() == place
    assert bool((c.float_levels(twos[:40], 2) == 2).all())


def test_c_kernels_are_built_without_tuning_where_the_compiler_knows_none(c, monkeypatch, tmp_path):
    monkeypatch.setattr(c, "TUNINGS", (("-march=of-no-machine",), ()))
    assert c._build(os.environ.get("CC", "cc"), tmp_path).stat().st_size > 0


@pytest.mark.parametrize("shape", TOKENS)
def test_signs_of_the_kernel_equal_the_definition(fused, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).round()
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    counted = torch.tensor(0, device=DEVICE)
    q, _ = fused.quantize(x.to(DEVICE), None, counted, largest=1, largest_squared=vote.LARGEST_SQUARED, **STREAM)
    assert torch.equal(q.cpu(), vote.quantize(x, "sign"))
    assert int(counted) == 3


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(1, 1), (37, 131), (5, 2050)], ids=str)
def test_pack_kernels_are_inverse_and_equal_the_definition(fused, bits, shape):
    top = largest_level(bits)
    levels = torch.randint(-top, top + 1, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    packed = fused.pack(levels.to(DEVICE), field_bits(bits), top)
    assert torch.equal(packed.cpu(), gft_grid.pack(levels, bits))
    again = fused.float_levels(packed, shape[1], torch.int8, packed_width=field_bits(bits), top_level=top, memory_bits=0)
    assert torch.equal(again.cpu(), levels)


@pytest.mark.parametrize("ceiling", [0, 3, 255, 256, 70000, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_kth_largest_is_that_of_a_sort(fused, ceiling, dtype):
    generator = torch.Generator().manual_seed(4)
    votes = torch.randint(-ceiling, ceiling + 1, (63, 130), dtype=dtype, generator=generator)
    ordered = votes.abs().flatten().sort(descending=True).values
    for count in (1, 2, 77, 4000, 63 * 130):
        assert int(fused.kth_largest(votes.to(DEVICE), ceiling, count)) == int(ordered[count - 1])
    count = torch.tensor(500, device=DEVICE)
    assert int(fused.kth_largest(votes.to(DEVICE), ceiling, count)) == int(ordered[499])
