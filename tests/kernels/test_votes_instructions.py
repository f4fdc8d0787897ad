"""The exact product of votes in C, by every instruction that votes.h knows: this machine's own, where that is AMX the one
below it, and emulated ones.

Emulated (emulated.h) on an ARM processor only: it can compile the code for both families, and x86 cannot.
"""

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from gft import ops
from gft.ops.native import build, threads

ARM = platform.machine() in ("aarch64", "arm64")
# How many tokens an instruction sums, how many columns its tiles have, and what makes the compiler believe it is there.
EMULATED = {"AVX-512 VNNI": (4, 48, "-D__AVX512VNNI__"), "AVX VNNI": (4, 24, "-D__AVXVNNI__"),
            "SMMLA": (8, 16, "-DEMULATE_SMMLA")}

# tokens, rows, columns: single ones, whole tiles, one more and one less, and more tokens than are packed at once.
SHAPES = [(1, 1, 1), (4, 4, 16), (8, 8, 48), (5, 3, 17), (7, 1, 100), (9, 100, 1), (2, 65, 15), (511, 9, 49), (513, 65, 25),
          (1027, 130, 33)]
BELOW_AMX = "not AMX"
MOST_TOKENS = (2**31 - 1) // 127**2  # whose votes int32 is sure to hold


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The library for an instruction, by its name."""
    libraries = {}

    def library(instruction):
        if instruction not in libraries:
            path = tmp_path_factory.mktemp("built") / "native.so"
            command = [*build._compiler(), "-O1", *build.FLAGS[1:]]
            if instruction == BELOW_AMX:
                command += [*build.TUNINGS[0], *build.WITHOUT_TILES]
            else:
                header = Path(__file__).with_name("emulated.h")
                command += [EMULATED[instruction][-1], "-fno-strict-aliasing", "-include", str(header)]
            subprocess.run([*command, "-o", str(path), str(build.SOURCE), "-lm"], check=True)
            libraries[instruction] = build._loaded(path)
        return libraries[instruction]

    return library


@pytest.fixture(params=["its own", BELOW_AMX, *EMULATED])
def twins(request, built, c_twins, monkeypatch):
    """C's products of bytes, by this instruction."""
    if request.param == BELOW_AMX and not build.has_tiles():
        pytest.skip("the machine's own")
    if request.param in EMULATED and not ARM:
        pytest.skip("emulated on ARM only")
    if request.param != "its own":
        library = built(request.param)
        if request.param in EMULATED:
            assert (library.gft_group_tokens(), library.gft_panel_columns()) == EMULATED[request.param][:2]
        monkeypatch.setattr(threads, "library", lambda: library)
    return c_twins


@pytest.fixture
def instruction(twins):
    """C's product of votes."""
    return twins.votes_product


def random_bytes(tokens, *features):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(-128, 128, (tokens, n), generator=generator).to(torch.int8) for n in features]


@pytest.mark.parametrize("threads", [1, 3])
def test_votes_are_exact_in_odd_shapes(instruction, threads, monkeypatch):
    monkeypatch.setattr("gft.ops.native.threads.LEAST_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for tokens, rows, columns in SHAPES:
        grad_output, x = random_bytes(tokens, rows, columns)
        votes = instruction(grad_output, x)
        assert votes.dtype is torch.int32
        assert torch.equal(votes, grad_output.int().T @ x.int()), (tokens, rows, columns)
        assert torch.equal(votes, ops.votes_product.definition(grad_output, x))


@pytest.mark.parametrize("sign", [1, -1])
def test_votes_are_exact_up_to_the_bounds_of_int32(instruction, sign):
    """Every product is the largest there is, so sums reach the end of int32, in whole tiles and at the edge of one."""
    x = torch.full((MOST_TOKENS, 3), 127, dtype=torch.int8)
    grad_output = torch.full((MOST_TOKENS, 5), 127 * sign, dtype=torch.int8)
    assert bool((instruction(grad_output, x) == sign * MOST_TOKENS * 127**2).all())


def test_matrices_that_do_not_lie_row_by_row_are_taken_as_they_are_meant(instruction):
    grad_output, x = random_bytes(70, 40, 40)
    expected = grad_output[::2].int().T @ x.T[:35].int()
    assert torch.equal(instruction(grad_output[::2], x.T[:35]), expected)


@pytest.mark.skipif(not ARM, reason="of an ARM processor")
def test_a_processor_with_dot_products_uses_them(c_twins):
    """asimddp is Linux' name for SDOT, i8mm for SMMLA."""
    features = build._processor().split()
    expected = 8 if "i8mm" in features else 4 if "asimddp" in features else 0
    if "asimddp" not in features:
        pytest.skip("this processor is not asked by /proc/cpuinfo, or has none")
    assert threads.functions().gft_group_tokens() == expected


@pytest.mark.parametrize("dtype", [ops.INT8, ops.FIXED], ids=["int8", "fixed"])
def test_tokens_are_multiplied_exactly_in_odd_shapes(twins, dtype):
    for tokens, outputs, features in SHAPES:
        rounded = ops.round_tokens(torch.randn(tokens, features), dtype)
        levels = torch.randint(-127, 128, (outputs, features), dtype=torch.int8)
        wanted = (rounded.q.double() @ levels.double().t()).float() * rounded.scale[:, None]
        for lie in (levels, levels.t().contiguous().t()):
            assert torch.equal(twins.multiply_tokens(rounded, lie, torch.float32), wanted), (tokens, outputs, features)
