"""Kernels compile for a GPU that is not there. The interpreter runs Python, and so takes much that the compiler refuses."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gft.ops.triton import factors, momentum, noise, units, update

def check(kernel, types, constants, options=dict(launch_pdl=True)):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    fixed = {(place,): constants[name] for place, name in enumerate(kernel.arg_names) if name in constants}
    compile(ASTSource(kernel, signature, fixed, {}), target=GPUTarget("cuda", 90, 32),
            options=dict(num_warps=4, **options))

table = dict(OVERLAPS=True, TABLE=True, WIDE=False)
check(factors._squares_kernel, dict(votes="*i64", sums="*i64"),
      dict(SHIFTED=False, WARPS=4, ROWS=8, WIDTH=1, TIMES=4, **table))
check(factors._factors_kernel,
      dict(sums="*i64", running=("*fp32",) * 2, step="*i64", moments="*fp32", factors="*fp32", lr="*fp32",
           lr_scale=("fp32",) * 2, clip="fp32", multiples=("fp32",) * 6, shares=("fp32",) * 6),
      dict(LR_ON_DEVICE=True, RUNNING=True, RESCALE_STEP=False, SUITED=True, MOST_HALVINGS=7, BLOCK=512, OVERLAPS=True))
check(update._move_kernel,
      dict(stored=("*i8",) * 2, votes="*i64", flips="*i64", row_factor="*fp32", column_factor="*fp32", cap="*fp32",
           threshold_share="*fp32", least="*i64", largest="*i64", seed="i64", step="*i64", noise_stream=("i32",) * 2),
      dict(TOPK=False, THRESHOLD=True, SUITED=True, PACKED=False, WIDTH=8, LARGEST=7, MEMORY_BITS=4, SPARE_BITS=0,
           INERTIA=True, BY_EIGHTS=True, EVEN=True, ROWS=4, EIGHTHS=128, **table))
types = dict(stored=("*i8",) * 2, scale=("*fp32",) * 2, amax="*i32", moves="*i32", share="fp32", rest="fp32", bound="fp32",
             seed="i64", step="*i64", noise_stream=("i32",) * 2)
exact, tile = dict(enable_fp_fusion=False), dict(ROWS=16, COLUMNS=64)
for by_table, votes in ((True, "*i64"), (False, ("*i32",) * 2)):
    told = dict(TABLE=by_table, WIDE=False, **tile)
    check(momentum._amax_kernel, {**types, "votes": votes}, dict(TIMES=8, **told), exact)
    check(momentum._renew_kernel, {**types, "votes": votes, "amax": "*fp32"}, dict(BY_EIGHTS=True, **told), exact)
    check(units._floats_kernel, dict(votes=votes, floats="*bf16"), dict(TABLE=by_table, WIDE=False, BLOCK=1024), {})
for turned in (True, False):
    check(units._units_kernel, dict(x="*bf16", per_unit="*fp32", numbers="*i32"), dict(TURNED=turned, TILE=64), exact)
check(noise._draw_kernel, dict(numbers="*i32", count="i64", first="i64", seed="i64", step="*i64"), dict(COUNTERS=128), {})
print("compiled")
"""


def test_kernels_compile_without_a_gpu():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=240,
                          check=False)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
