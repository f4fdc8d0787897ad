"""The README's Python runs as it stands, and leaves integers behind."""

import re
from pathlib import Path

import gft

README = Path(__file__).parent.parent / "README.md"


def test_readme_snippets_run_and_train():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 3  # the last is for torchrun: test_distributed.py
    names: dict = {}
    exec(blocks[0], names)
    assert float(names["loss"].detach()) < 1.0  # it starts near log(5) = 1.6
    levels = names["model"][1].mlp[0].levels()
    assert set(levels.unique().tolist()) <= set(range(-7, 8))
    names["model"] = gft.dequantize_(names["model"])
    exec(blocks[1], names)
    assert names["optimizer"].param_groups[0]["lr"] == 0.75
