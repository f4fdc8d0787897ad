"""What `make dist` has built: complete, and enough to train with in an environment that has nothing else.

Installing needs an index of packages, so these tests are no part of `make test`.
"""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = """
import torch
from torch import nn
import gft

assert "site-packages" in gft.__file__, gft.__file__
torch.manual_seed(0)
model = gft.quantize_(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)), bits=2)
optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.2), torch.optim.AdamW(gft.dense(model), lr=1e-2))
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=100)
teacher = torch.randn(20, 5)
for _ in range(100):
    x = torch.randn(128, 20)
    loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
    optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
print(loss.item())
"""


def built(pattern):
    files = sorted((ROOT / "dist").glob(pattern))
    if not files:
        pytest.skip("nothing is built; run make dist")
    assert len(files) == 1
    return files[0]


def test_the_wheel_has_the_library_with_its_c_source_and_nothing_else():
    names = zipfile.ZipFile(built("*.whl")).namelist()
    c_source = {f"gft/ops/native/{name}" for name in ("native.c", "noise.h", "votes.h")}
    assert {"gft/__init__.py", "gft/py.typed", *c_source} <= set(names)
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gft").rglob("*.py")}
    assert sources <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gft", "gft_torch"}
    assert not any("__pycache__" in name for name in names)


def test_the_sdist_has_tests_and_documentation():
    names = [name.partition("/")[2] for name in tarfile.open(built("*.tar.gz")).getnames()]
    assert {"gft/ops/native/native.c", "gft/py.typed", "tests/dist/test_wheel.py", "docs/guide.md", "mkdocs.yml", "Makefile",
            "constraints.txt", "examples/train_from_scratch.py", "LICENSE", "pyproject.toml"} <= set(names)


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_environment(tmp_path):
    wheel = built("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    bin = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin")

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
        return done.returncode, done.stdout, done.stderr

    subprocess.run([bin / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel], check=True, cwd=tmp_path)
    code, said, error = run(bin / "python", "-c", TRAIN)
    assert code == 0, error
    assert float(said) < 1.0
    code, said, error = run(bin / "gft", "demo")
    assert code == 1
    assert "pip install 'gft-torch[lab]'" in error
