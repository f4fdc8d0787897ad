"""What convolutions need, patches, votes of groups, channels_last weights: Triton gives the definitions' integers."""

import math

import pytest
import torch
from kernel_cases import random_stored

import gft
from gft import ops
from gft.errors import UsageError
from gft.ops import Window
from gft.storage import Storage

# name -> (images, channels, window): sizes, positions, kernel, stride, padding, dilation
WINDOWS = {
    "3×3, rows of whole words": (3, 2, Window((6, 8), (6, 8), (3, 3), (1, 1), (1, 1), (1, 1))),
    "rows of two words of eight, dilated by more": (2, 2, Window((5, 16), (5, 16), (3, 3), (1, 1), (2, 9), (2, 9))),
    "rows of eight from rows of sixteen": (2, 2, Window((4, 16), (3, 8), (2, 9), (1, 1), (0, 0), (1, 1))),
    "narrow, rows of one word": (2, 2, Window((4, 4), (4, 4), (3, 3), (1, 1), (1, 1), (1, 1))),
    "3×3, rows of 7": (3, 2, Window((7, 7), (7, 7), (3, 3), (1, 1), (1, 1), (1, 1))),
    "no padding, rows of words from rows of 10": (2, 2, Window((5, 10), (3, 8), (3, 3), (1, 1), (0, 0), (1, 1))),
    "padded beyond the kernel": (2, 2, Window((3, 4), (9, 12), (3, 5), (1, 1), (4, 6), (1, 1))),
    "wide rows, dilated by more than a word": (2, 2, Window((4, 12), (4, 12), (3, 3), (1, 1), (2, 6), (2, 6))),
    "a stem: 7×7, stride 2": (2, 2, Window((16, 14), (8, 7), (7, 7), (2, 2), (3, 3), (1, 1))),
    "1×1, stride 2": (3, 2, Window((8, 8), (4, 4), (1, 1), (2, 2), (0, 0), (1, 1))),
    "all differ": (3, 2, Window((10, 9), (8, 6), (3, 5), (1, 2), (1, 3), (2, 1))),
    "1d": (3, 2, Window((17,), (6,), (4,), (3,), (2,), (1,))),
    "1d causal, rows of words": (5, 2, Window((24,), (28,), (5,), (1,), (4,), (1,))),
    "3d": (2, 2, Window((5, 6, 4), (5, 2, 8), (2, 3, 1), (1, 2, 1), (1, 0, 2), (2, 1, 1))),
    "3d, words": (2, 2, Window((3, 4, 8), (3, 4, 8), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1))),
    "one image of an odd size": (1, 1, Window((3, 3), (3, 3), (3, 3), (1, 1), (1, 1), (1, 1))),
}
windows = pytest.mark.parametrize("case", WINDOWS)


def random_images(count, channels, window, seed=3):
    shape = count * math.prod(window.sizes), channels
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def tokens_last(q):
    return q.t().contiguous().t()


@windows
def test_patches_are_what_the_definition_says(triton_twins, case):
    count, channels, window = WINDOWS[case]
    images = random_images(count, channels, window)
    wanted = ops.patches.definition(images, window)
    got = triton_twins.patches(tokens_last(images).to(triton_twins.device), window)
    assert torch.equal(got.cpu(), wanted)
    assert got.stride(0) == 1  # positions side by side
    assert got.stride(1) % 16 == 0
    assert wanted.any()


@pytest.mark.parametrize("case", ["3×3, rows of whole words", "3×3, rows of 7"])
def test_patches_do_not_depend_on_how_many_positions_a_program_has(triton_twins, case, monkeypatch):
    monkeypatch.setattr("gft.ops.triton.windows.BLOCK", 16)
    monkeypatch.setattr("gft.ops.triton.grids.MOST", 3)
    count, channels, window = WINDOWS[case]
    images = random_images(count, channels, window)
    got = triton_twins.patches(images.to(triton_twins.device), window)
    assert torch.equal(got.cpu(), ops.patches.definition(images, window))


@pytest.mark.parametrize("case", ["3×3, rows of whole words", "3×3, rows of 7", "1d"])
def test_patches_of_some_images_are_read_where_they_lie(triton_twins, case):
    """A part of the images is a view whose channels are as far apart as those of all."""
    count, channels, window = WINDOWS[case]
    images = tokens_last(random_images(count + 2, channels, window).to(triton_twins.device))
    seen = math.prod(window.sizes)
    part = images[seen : (count + 1) * seen]
    assert torch.equal(triton_twins.patches(part, window).cpu(), ops.patches.definition(part.cpu().contiguous(), window))


@windows
def test_depthwise_votes_are_the_definitions(triton_twins, case):
    count, channels, window = WINDOWS[case]
    dtype = torch.int64 if len(window.sizes) == 1 else torch.int32
    images = random_images(count, channels, window)
    rows = channels * 2
    single = random_images(count, rows, window._replace(sizes=window.positions), seed=4)
    before = torch.randint(-99, 99, (rows, window.places), dtype=dtype)
    patches = ops.patches.definition(images, window).long().unflatten(1, (channels, window.places))
    wanted = before + torch.einsum("nr,nrk->rk", single.long(), patches.repeat_interleave(2, 1)).to(dtype)
    assert torch.equal(ops.depthwise_votes.definition(single, images, window, before.clone()), wanted)
    into = before.clone().to(triton_twins.device)
    single, images = (tokens_last(q).to(into.device) for q in (single, images))
    got = triton_twins.depthwise_votes(single, images, window, into)
    assert got is into
    assert torch.equal(into.cpu(), wanted)


BY_ROWS = {
    "steps of 64 in images of 128": (3, 2, Window((16, 8), (16, 8), (3, 3), (1, 1), (1, 1), (1, 1))),
    "an image is one step": (5, 3, Window((8, 8), (8, 8), (3, 3), (1, 1), (1, 1), (1, 1))),
    "steps of 128, dilated, columns at a stride": (2, 2, Window((18, 31), (16, 16), (2, 3), (1, 2), (1, 1), (3, 1))),
    "more columns than a tile": (2, 15, Window((8, 16), (8, 16), (3, 3), (1, 1), (1, 1), (1, 1))),
    "padded beyond the kernel, many steps": (9, 1, Window((2, 8), (8, 16), (3, 5), (1, 1), (4, 6), (1, 1))),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", BY_ROWS)
def test_rows_of_a_kernel_read_the_same_patches(triton_twins, case, dtype):
    count, channels, window = BY_ROWS[case]
    images = random_images(count, channels, window)
    single = random_images(count, 5, window._replace(sizes=window.positions), seed=4)
    rows = window.by_rows()
    made = ops.patches.definition(images, rows)
    whole = ops.patches.definition(images, window)
    assert torch.equal(ops.RowPatches(made, window).whole(), whole)
    before = torch.randint(-99, 99, (5, channels * window.places), dtype=dtype)
    wanted = before + single.int().T @ whole.int()
    assert torch.equal(ops.row_votes.definition(single, made, window, before.clone()), wanted)
    made = triton_twins.patches(images.to(triton_twins.device), rows)
    into, squares = before.clone().to(made.device), torch.rand(2, 7, device=made.device)
    mean = ops.MeanSquare(squares, len(single), torch.zeros(7, device=made.device), False)
    for means in ((), (mean, mean)):
        into.copy_(before)
        assert triton_twins.row_votes(single.to(made.device), made, window, into, means) is into
        assert torch.equal(into.cpu(), wanted)
    assert torch.allclose(mean.mean, squares.sum(0) / len(single))


@windows
def test_only_whole_steps_are_read_by_rows(case):
    """By which the product's loads begin at whole words, and no step reaches into the next image."""
    window = WINDOWS[case][2]
    assert window.by_rows() is None
    assert window._replace(positions=(64,) * len(window.sizes), stride=(2,) * len(window.sizes)).by_rows() is None


def test_patches_of_rows_that_do_not_belong_to_the_positions_are_refused(triton_twins, refuses):
    window = BY_ROWS["an image is one step"][2]
    q = torch.zeros(160, 3, dtype=torch.int8, device=triton_twins.device)
    into = torch.zeros(3, 9, dtype=torch.int32, device=triton_twins.device)
    with refuses(UsageError, "160 patches of rows on .* and 160 positions on .* are not of images of 8 × 8 positions"):
        triton_twins.row_votes(q, q, window, into)
    with refuses(UsageError, "the votes to add to must be 3 × 9"):
        triton_twins.row_votes(q[:128], q, window, into[:2])
    made = tokens_last(q)
    assert triton_twins.row_votes(q[:128], q, window, into) is NotImplemented  # not positions side by side
    assert triton_twins.row_votes(q[:128], made.int(), window, into) is NotImplemented
    assert triton_twins.row_votes(q[:128], made, window, into) is into


def test_windows_over_what_is_not_images_are_refused(triton_twins, refuses):
    window = WINDOWS["3×3, rows of 7"][2]
    q = torch.zeros(50, 3, dtype=torch.int8, device=triton_twins.device)
    with refuses(UsageError, "50 positions are not images of 7 × 7"):
        triton_twins.patches(q, window)
    into = torch.zeros(6, 9, dtype=torch.int32, device=triton_twins.device)
    with refuses(UsageError, "6 rows of 48 positions on .* do not belong to 3 channels of 49"):
        triton_twins.depthwise_votes(q[:48].repeat(1, 2), q[:49], window, into)
    with refuses(UsageError, "the votes must be 6 × 9"):
        triton_twins.depthwise_votes(q[:49].repeat(1, 2), q[:49], window, into[:5])
    assert triton_twins.patches(q[:49].to(torch.int16), window) is NotImplemented
    assert triton_twins.patches(q[:0], window) is NotImplemented


# ---------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", [37, 1100])
def test_votes_are_added_to_those_there_are(triton_twins, tokens, dtype, monkeypatch):
    monkeypatch.setattr("gft.ops.triton.votes.MOST_TOKENS_A_SPLIT", 512)
    device, generator = triton_twins.device, torch.Generator().manual_seed(2)
    grad_output, x = (torch.randint(-127, 128, (n, tokens + 48), dtype=torch.int8, generator=generator) for n in (40, 72))
    grad_output, x = (q[:, 16 : 16 + tokens].t() for q in (grad_output, x))  # a part of longer rows
    before = torch.randint(-99, 99, (43, 72), dtype=dtype)
    wanted = before.clone()
    wanted[2:42] += (grad_output.int().T @ x.int()).to(dtype)
    assert torch.equal(ops.votes_product.definition(grad_output, x, before.clone()[2:42]), wanted[2:42])
    into = before.clone().to(device)
    triton_twins.votes_product(grad_output.to(device), x.to(device), into[2:42])
    assert torch.equal(into.cpu(), wanted)


def test_votes_to_add_to_of_another_shape_are_refused(triton_twins, refuses):
    q = torch.ones(8, 5, dtype=torch.int8, device=triton_twins.device)
    with refuses(UsageError, "the votes to add to must be 5 × 5"):
        triton_twins.votes_product(q, q, torch.zeros(5, 6, dtype=torch.int32, device=q.device))
    assert triton_twins.votes_product(q, q, torch.zeros(5, 5, device=q.device)) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(3, 37, 5, 9), (4, 1100, 2, 18)], ids=str)
def test_groups_vote_in_one_launch(triton_twins, shape, dtype, monkeypatch):
    monkeypatch.setattr("gft.ops.triton.votes.MOST_TOKENS_A_SPLIT", 512)
    groups, tokens, rows, columns = shape
    generator = torch.Generator().manual_seed(2)
    grad_output, x = (torch.randint(-127, 128, (tokens, groups * n), dtype=torch.int8, generator=generator)
                      for n in (rows, columns))
    wanted = ops.grouped_votes_product.definition(*(q.unflatten(1, (groups, -1)).transpose(0, 1) for q in (grad_output, x)),
                                                  dtype)
    for lie in (tokens_last, torch.Tensor.contiguous):
        parts = [lie(q).to(triton_twins.device).unflatten(1, (groups, -1)).transpose(0, 1) for q in (grad_output, x)]
        got = triton_twins.grouped_votes_product(*parts, dtype)
        assert got.dtype is dtype
        assert torch.equal(got.cpu(), wanted)


def test_groups_of_different_tokens_are_refused(triton_twins, refuses):
    q = torch.ones(2, 8, 5, dtype=torch.int8, device=triton_twins.device)
    with refuses(UsageError, r"groups of grad_output and x must be of the same tokens"):
        triton_twins.grouped_votes_product(q, q[:, 1:], torch.int32)


# ---------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("places", [9, 4, 49])
@pytest.mark.parametrize("storage", [Storage(2, False), Storage(3, False), Storage(2), Storage(4, inertia=False)], ids=str)
def test_a_weight_is_read_out_channels_last(triton_twins, storage, places):
    channels = 67 if places == 4 else 5
    stored = random_stored(storage, (3, channels * places))
    groups = (torch.rand(3, channels) + 0.1).half()
    for factors, number in ((None, 1.0), (None, 1.37), (groups, 1.0)):
        for dtype in (torch.float32, torch.float16):
            there = ops.Scaling(None if factors is None else factors.to(triton_twins.device), number=number)
            got = triton_twins.float_levels(stored.to(triton_twins.device), storage, channels * places, dtype, there, places)
            here = ops.Scaling(factors, number=number)
            plain = ops.float_levels.definition(stored, storage, channels * places, dtype, here)
            assert torch.equal(got.cpu(), plain.view(3, channels, places).mT.flatten(1))
            assert torch.equal(got.cpu(), ops.float_levels.definition(stored, storage, channels * places, dtype, here,
                                                                      places))


def test_places_that_do_not_divide_the_columns_are_refused(triton_twins, refuses):
    stored = random_stored(Storage(4), (3, 10)).to(triton_twins.device)
    with refuses(UsageError, "10 columns are not channels of 9 places each"):
        triton_twins.float_levels(stored, Storage(4), 10, torch.float32, places=9)


def test_c_leaves_weights_that_are_channels_last_to_the_definition(c_twins):
    stored = random_stored(Storage(4), (3, 18))
    assert c_twins.float_levels(stored, Storage(4), 18, torch.float32, places=9) is NotImplemented


# ---------------------------------------------------------------------------------------------------- whole layers

LAYERS = {
    "3×3": lambda: gft.QuantConv2d(3, 6, 3, padding=1),
    "by rows": lambda: gft.QuantConv2d(3, 6, 3, padding=1),
    "by rows, transposed": lambda: gft.QuantConvTranspose2d(3, 6, 3, padding=1),
    "1×1": lambda: gft.QuantConv2d(3, 6, 1),
    "two groups": lambda: gft.QuantConv2d(4, 6, 3, groups=2),
    "eight groups": lambda: gft.QuantConv2d(16, 8, 2, groups=8),
    "depthwise": lambda: gft.QuantConv2d(8, 16, 2, padding=1, groups=8),
    "transposed": lambda: gft.QuantConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1),
    "transposed, depthwise": lambda: gft.QuantConvTranspose2d(8, 8, 2, stride=2, groups=8),
}


SIGNS = [("depthwise", gft.Sign()), ("3×3", gft.Sign(per="sequence")), ("by rows", gft.Sign()),
         ("by rows", gft.Sign(per="sequence"))]


@pytest.mark.parametrize(("kind", "vote"), [*((kind, gft.Int8()) for kind in LAYERS), *SIGNS], ids=str)
def test_a_layer_casts_the_same_votes_through_tritons_twins(triton_twins, kind, vote, monkeypatch):
    """Of two backward passes, with images unfolded a few at a time."""
    votes = []
    for through_triton in (False, True):
        torch.manual_seed(1)
        layer = LAYERS[kind]()
        layer.UNFOLDED_AT_ONCE = 500
        optimizer = gft.GFT(gft.quantized(layer), vote=vote)
        device = torch.device(triton_twins.device if through_triton else "cpu")
        layer.to(device)
        sizes = (8, 8) if kind.startswith("by rows") else (3, 4)
        layer.UNFOLDS_BY_ROWS_ON = device.type if through_triton else "none"
        with monkeypatch.context() as patch:
            if through_triton:
                patch.setattr("gft.ops.operation.twins", lambda _: triton_twins.twins)
            for number in range(2):
                generator = torch.Generator().manual_seed(number)
                # Whole numbers, which layers on both devices round and multiply alike.
                x = torch.randint(-3, 4, (2, layer.in_channels, *sizes), generator=generator).float().to(device)
                x = x.to(memory_format=torch.channels_last)
                y = layer(x)
                y.backward(torch.randint(-3, 4, y.shape, generator=generator).float().to(device))
        votes.append(layer.votes.votes.cpu())
        optimizer.release()
    assert torch.equal(*votes)
    assert votes[0].any()
