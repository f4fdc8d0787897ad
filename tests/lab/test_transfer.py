"""One lr for all widths and depths: what is trained, and what its table shows."""

import pytest

from gft.errors import UsageError
from gft.lab import pages, recipes, transfer
from gft.lab.tuning import TRANSFER, tuning_of
from gft.optim import LR

SMALL = ["data=verses", "context=16", "vocabulary=none", "batch=4", "steps=2", "warmup=1", "eval_every=2", "precision=fp32"]


def test_sizes_differ_in_width_and_depth_and_in_what_adds_up_over_the_width():
    small, wide, deep = (recipes.find(f"transfer-{size}-gft-4bit") for size in ("64x4", "1024x4", "64x24"))
    assert (deep.model.width, deep.model.depth, deep.model.heads) == (64, 24, 2)
    assert (wide.dense.lr, small.dense.lr, deep.dense.lr) == (0.002, 0.008, 0.008)
    assert {recipes.find(f"transfer-{size}-gft-2bit").integers.lr for size in transfer.SIZES} == {LR}
    assert transfer.place_of("transfer-64x24-gft-2bit-packed") == ("64x24", "gft-2bit-packed")
    with pytest.raises(UsageError, match="is no recipe of transfer"):
        transfer.place_of("transfer-63x24-gft-2bit")


def test_every_rate_is_trained_and_the_table_marks_the_best_and_how_far_the_default_is_from_it(tmp_path):
    assert tuning_of("transfer") is TRANSFER
    TRANSFER.tune(tmp_path, ["gft-4bit"], ["64x4"], ["lr=0,0.2", "steps=2,3"], SMALL, device="cpu")
    TRANSFER.tune(tmp_path, ["gft-4bit"], ["64x4"], ["lr=0.2", "own_warmup=0"], SMALL, device="cpu")
    header, _, *lines, without, _, about = pages.transfer(tmp_path).splitlines()
    assert "| tokens a step | steps | lr 0 | lr 0.2 |" in header
    for line, steps in zip(lines, ("2", "3"), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:4] == ["4 bit", "64×4", "4 × 16", steps]
        assert sum(cell.startswith("**") for cell in cells) == 1
        losses = [float(cell.strip("*")) for cell in cells[4:6]]
        assert float(cells[6].strip("%")) == pytest.approx(100 * (losses[1] / min(losses) - 1), abs=0.1)
    assert without.startswith("| 4 bit, `warmup=0` | 64×4 | 4 × 16 | 2 |  | **")
    assert about.startswith("n = 1, seed 0, commit")
    assert pages.transfer(tmp_path / "nowhere").startswith("Not run yet")
