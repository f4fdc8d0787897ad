"""Python in the README and in the guide runs as it stands, one block after the other, as for a reader who types them."""

import re
from pathlib import Path

import pytest

import gft

pytestmark = pytest.mark.skipif(not hasattr(gft, "Rounding"), reason="needs the new core")

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"```python\n(?!# train\.py)(.*?)```", re.DOTALL)  # train.py is for torchrun: tests/distributed


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_python_of_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = PROGRAM.findall((ROOT / page).read_text())
    assert blocks
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    layers = [module for module in names["model"].modules() if isinstance(module, gft.QuantLinear)]
    assert layers
    for layer in layers:
        assert not layer.levels().is_floating_point()
        assert int(layer.levels().abs().max()) <= 7
