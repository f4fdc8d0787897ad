"""Energy on paper: the paper's columns cell by cell, the whole step, and the table of both."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from gft.cli import app
from gft.errors import UsageError
from gft.lab import energy, recipes, tables
from gft.lab.build import build_float_model
from gft.lab.energy import estimate, paper, sheets
from gft.lab.energy import networks as network_of
from gft.lab.energy.estimate import mac_pj
from gft.lab.energy.table import mean_results
from gft.lab.recipe import Integers
from gft.ops import Quantized
from gft.philox import NoiseKey
from gft.rules.lowrank import LowRank
from gft.rules.momentum import Momentum
from gft.rules.orthogonalize import orthogonalized

RESULTS = Path(__file__).parents[2] / "results"
TINY = ["data=digits", "width=24", "depth=3", "batch=32", "steps=40"]


@pytest.fixture(scope="module")
def networks():
    return {table: network_of.networks(table) for table in paper.TABLES}


# ---------------------------------------------------------------------------------------------------- the paper's columns


@pytest.mark.parametrize(("quantize", "bits", "updates", "total_bits", "joules"), [
    ("none", 32, 105e9, 1.72e9, 1.54), ("hidden", 4, 24.08e9, 304.56e6, 0.60), ("hidden", 2, 24.08e9, 203.8e6, 0.57),
    ("all", 4, 18.91e9, 214.4e6, 0.54), ("all", 3, 18.91e9, 160.8e6, 0.54), ("all", 2, 18.91e9, 107.2e6, 0.50)])
def test_accounting_gives_the_papers_columns(quantize, bits, updates, total_bits, joules):
    total, outer, steps = 53_583_872, 3_252_224, 1960
    fp32 = {"none": total, "hidden": outer, "all": 0}[quantize]
    assert energy.updates_estimated(fp32, total - fp32, steps) == pytest.approx(updates, rel=0.015)
    assert energy.bits_total(fp32, total - fp32, bits) == pytest.approx(total_bits, rel=0.015)
    assert energy.energy_estimate_j(fp32, total - fp32, bits, steps) == pytest.approx(joules, abs=0.006)


def test_rows_are_those_of_the_recipes():
    assert len(paper.ROWS) == 28
    recipes = [recipe for table in paper.TABLES for recipe in tables.recipes_of(table)]
    assert [(row.table, row.name, row.bits) for row in paper.ROWS] == [
        (one.table, one.row, one.integers.bits) for one in recipes]
    for row, recipe in zip(paper.ROWS, recipes, strict=True):
        seen = 1 - recipe.model.patch_dropout * (1 - recipe.schedule.whole_images)  # of the patches
        assert 0.95 * row.steps < recipe.schedule.steps * seen <= row.steps


def test_every_cell_of_the_paper_is_met_or_a_listed_slip(networks):
    """From the counts of our own models. A cell counts as met if it prints as the paper's, from these counts or from the
    same counts rounded as the paper rounds them; any other is in SLIPS, with the cause that is really its own."""
    for row, (place, column) in itertools.product(paper.ROWS, enumerate(paper.COLUMNS)):
        ours, total = networks[row.table][row.name].counts, networks[row.table]["Full-Precision"].counts.fp32
        found, slip = paper.verdict(row, column, ours, total), paper.slip_at(row, column)
        if slip is not None:
            assert found == slip.cause, (row, column)
            continue
        assert found in ("exact", "rounded"), (row, column)
        if found == "rounded":  # which must not hide more than rounding does
            assert row.values(*ours)[place] == pytest.approx(paper.read(row.cells[place]).value, rel=0.0035), (row, column)


def test_cells_add_up(networks):
    verdicts = [paper.verdict(row, column, networks[row.table][row.name].counts,
                              networks[row.table]["Full-Precision"].counts.fp32)
                for row in paper.ROWS for column in paper.COLUMNS]
    assert {kind: verdicts.count(kind) for kind in set(verdicts)} == {
        "exact": 45, "rounded": 29, "count": 9, "carried": 20, "cut": 8, "copied": 1}
    # No slip is listed that is at no cell, and none twice.
    cells = [(row.table, row.name, slip.column) for slip in paper.SLIPS for row in paper.ROWS
             if slip.table == row.table and row.name.startswith(slip.rows)]
    assert len(cells) == len(set(cells)) == 38
    assert all(any(cell[0] == slip.table and cell[1].startswith(slip.rows) and cell[2] == slip.column for cell in cells)
               for slip in paper.SLIPS)


def test_verdict_finds_what_is_wrong(networks):
    """Lest the test above pass because it lets everything pass."""
    row = next(row for row in paper.ROWS if row.name == "Quantized 2bit")
    ours, total = networks["mnist-dnn"]["Quantized 2bit"].counts, 53_583_872
    assert paper.verdict(row, "Updates", ours, total) == "rounded"
    for cells, column, found in ((("0", "18.91B", "107.3M", "0.50"), "Bits", "unexplained"),
                                 (("1K", "18.91B", "107.2M", "0.50"), "FP32 params", "count"),
                                 (("0", "18.91B", "107.2M", "0.51"), "Energy", "unexplained"),
                                 (("0", "19B", "107.2M", "0.5"), "Updates", "exact")):
        wrong = paper.Row(row.table, row.name, row.bits, row.steps, row.total, cells)
        assert paper.verdict(wrong, column, ours, total) == found


def test_updates_of_the_dnn_tell_1960_steps():
    row = next(row for row in paper.ROWS if row.name == "Quantized 4bit")
    printed = paper.read(row.cells[1])
    assert printed.matches(1960 * 0.18 * 53.6e6)
    assert not printed.matches(1959 * 0.18 * 53.6e6)
    assert not printed.matches(1960 * 0.1875 * 53.6e6)  # nor does the text's own share


@pytest.mark.parametrize(("text", "value", "unit"), [
    ("24.08B", 24.08e9, 1e7), ("105B", 105e9, 1e9), ("70K", 70e3, 1e4), ("0.60", 0.6, 0.01), ("2.8", 2.8, 0.1), ("0", 0, 1)])
def test_printed_numbers_are_read_with_their_last_digit(text, value, unit):
    printed = paper.read(text)
    assert printed == (pytest.approx(value), pytest.approx(unit))
    assert printed.write(value) == text
    assert printed.matches(value + 0.49 * unit)
    assert not printed.matches(value + 0.51 * unit)


def test_what_the_papers_text_compares():
    """Its ratios, from its own tables: some are of another row than the sentence names (docs/energy.md)."""
    cells = {(row.table, row.name): [paper.read(cell).value for cell in row.cells] for row in paper.ROWS}

    def ratio(table, row, column):
        place = paper.COLUMNS.index(column)
        return cells[table, "Full-Precision"][place] / cells[table, row][place]

    assert ratio("mnist-dnn", "Hybrid 4bit", "Updates") == pytest.approx(4.35, abs=0.02)
    assert ratio("shakespeare-gpt", "Hybrid-1 4bit", "Energy") == pytest.approx(1.78, abs=0.005)
    # "95.6 % … 5.5× more updates and 2.83× higher energy": the accuracy is Hybrid-1's, the ratios are Hybrid-2's.
    assert (ratio("mnist-vit", "Hybrid-2 4bit", "Updates"), ratio("mnist-vit", "Hybrid-2 4bit", "Energy")) == (
        pytest.approx(5.5, abs=0.05), pytest.approx(2.83, abs=0.01))
    assert ratio("mnist-vit", "Hybrid-1 4bit", "Energy") == pytest.approx(1.75, abs=0.01)
    # "3.7× more energy" on Imagenette: no row has it.
    assert max(ratio("imagenette-vit", row.name, "Energy") for row in paper.ROWS if row.table == "imagenette-vit") < 2.9


# ---------------------------------------------------------------------------------------------------- steps and operations


def test_step_energies_are_the_papers_and_not_what_it_lists():
    assert energy.adamw_step_pj() == pytest.approx(14.62)
    assert energy.adamw_step_pj(additions=3) == pytest.approx(14.24)
    assert energy.adamw_step_pj("45nm") == pytest.approx(40.6)
    assert energy.gft_step_pj(2) == pytest.approx(4.8)
    assert energy.gft_step_pj(3) == energy.gft_step_pj(4) == pytest.approx(5.18)
    assert energy.gft_step_pj(2, listed=True) == pytest.approx(3.125 * 0.38)
    assert energy.gft_step_pj(4, listed=True) == pytest.approx(3.125 * 0.38 + 1.31)
    assert energy.gft_step_pj(2, "45nm") == pytest.approx(4.8 / 0.38 * 0.9)


def test_flips_change_the_estimate_by_an_addition_each():
    fp32, quantized, steps = 100, 1000, 50
    flips = 1234
    moved = energy.moved_share(fp32 * steps + flips, fp32, quantized, steps)
    assert moved == pytest.approx(flips / (quantized * steps))
    assumed = energy.energy_estimate_j(fp32, quantized, 2, steps)
    actual = energy.energy_estimate_j(fp32, quantized, 2, steps, moved=moved)
    assert actual - assumed == pytest.approx(0.38e-12 * (flips - 0.375 * quantized * steps))
    assert energy.energy_estimate_j(fp32, quantized, 2, steps, moved=0.375) == pytest.approx(assumed)


def test_estimates_refuse_what_they_have_no_number_for(refuses):
    with refuses(UsageError, "node='5nm': choose one of 7nm, 45nm"):
        energy.adamw_step_pj("5nm")
    with refuses(UsageError, "precision='fp64'"):
        mac_pj("fp64")
    with refuses(UsageError, "moved=1.5"):
        energy.gft_step_pj(2, moved=1.5)
    with refuses(UsageError, "no integer weight"):
        energy.moved_share(10, 1, 0, 10)
    with refuses(UsageError, "no layer 'head'"):
        energy.products(nn.Sequential(nn.Linear(2, 3)), torch.zeros(1, 2), ["head"])


# ---------------------------------------------------------------------------------------------------- the whole step


@pytest.mark.parametrize("name", ["mnist-dnn-fp", "shakespeare-gpt-fp", "mnist-vit-fp"])
def test_products_are_what_torch_counts(name):
    """Forward and backward of the float network, by torch's own counter of operations."""
    from torch.utils.flop_counter import FlopCounterMode

    small = {"dnn": ["width=32", "batch=6"], "gpt": ["width=16", "depth=2", "heads=2", "batch=3"],
             "vit": ["width=16", "depth=2", "heads=2", "batch=3"]}
    recipe = recipes.find(name)
    recipe = recipe.changed(small[recipe.model.name])
    products = network_of.network(recipe).products
    data = network_of.stand_in(recipe.data.name)
    with torch.device("meta"):
        model = build_float_model(recipe, data)
        x = (torch.zeros(recipe.data.batch, 256, dtype=torch.long) if recipe.model.name == "gpt"
             else torch.zeros(recipe.data.batch, *data.shape))
        with FlopCounterMode(display=False) as counted:
            model(x).sum().backward()
    ours = energy.step_energy(products, 0, 0, 32)
    assert ours.total / (mac_pj("fp32") * 1e-12) == pytest.approx(counted.get_total_flops() / 2)
    assert ours.optimizer == 0


def test_whole_step_by_hand():
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    products = energy.products(model, torch.zeros(4, 5), ["2"])
    assert products == [energy.Product("0", 4 * 35, error=False), energy.Product("2", 4 * 21, quantized=True)]
    joules = energy.step_energy(products, 35, 21, 2, "bf16", "45nm")
    bf16, vote = (1.1 + 0.9) * 1e-12, (0.2 + 0.1) * 1e-12
    assert joules.forward == pytest.approx(bf16 * 4 * 56)
    assert joules.error == pytest.approx(bf16 * 4 * 21)
    assert joules.weight == pytest.approx(bf16 * 4 * 35 + vote * 4 * 21)
    assert joules.optimizer == pytest.approx(35 * 40.6e-12 + 21 * 4.8 / 0.38 * 0.9e-12)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7)])
def test_orthogonalizing_takes_the_products_that_torch_counts(shape):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counted:
        orthogonalized([torch.randint(-9, 10, shape, dtype=torch.int32)] * 2)
    assert energy.orthogonalize_j([shape] * 2) == pytest.approx(counted.get_total_flops() / 2 * mac_pj("bf16") * 1e-12)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7), (2, 9)])
def test_momentum_of_low_rank_takes_the_products_that_torch_counts(shape):
    from torch.utils.flop_counter import FlopCounterMode

    kept = LowRank(3)
    votes, mean = [torch.randint(-9, 10, shape, dtype=torch.int32)], [kept.start(*shape, torch.device("cpu"))]
    with FlopCounterMode(display=False) as counted:
        kept.renew(votes, mean, [])
    wanted = counted.get_total_flops() / 2 * mac_pj("fp32") * 1e-12
    integers = Integers("blocks", 2, momentum_rank=3, memory=False)
    assert energy.rule_extras_j(integers, [shape]) == pytest.approx(wanted)


def test_orthogonalizing_is_counted_in_the_optimizers_step_alone():
    recipe = recipes.find("shakespeare-gpt-hybrid2-2bit")
    plain, orthogonal = (network_of.network(one).step(one, "bf16", "7nm")
                         for one in (recipe, recipe.changed(["orthogonalize=true"])))
    block = [(1152, 384), (384, 384), (1536, 384), (384, 1536)]
    assert orthogonal.optimizer - plain.optimizer == pytest.approx(energy.orthogonalize_j(block * 6))
    assert (orthogonal.forward, orthogonal.error, orthogonal.weight) == (plain.forward, plain.error, plain.weight)


def test_momentum_takes_the_operations_that_torch_is_seen_to_do(monkeypatch):
    seen = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            result = operation(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape == (6, 8) and result.is_floating_point():
                seen[operation.overloadpacket.__name__.removesuffix("_")] += 1
            return result

    kept = Momentum(0.9)
    monkeypatch.setattr("gft.ops.operation.twins", lambda device_type: {})  # the definition: torch does not see what C does
    monkeypatch.setattr("gft.ops.momentum.quantize", lambda mean, inverse, largest, key: Quantized(mean * inverse, None))
    with Count():
        kept.renew([torch.ones(6, 8, dtype=torch.int32)], [kept.start(6, 8, torch.device("cpu"))], [NoiseKey(0, 0, 0)])
    assert {"multiply": seen["mul"], "add": seen["add"]} == estimate.MOMENTUM


def test_momentum_costs_a_weight_as_much_wherever_it_is():
    recipe = recipes.find("shakespeare-gpt-hybrid2-2bit")
    plain, momentum = (network_of.network(one).step(one, "bf16", "7nm")
                       for one in (recipe, recipe.changed(["momentum=0.9"])))
    weights = 6 * (1152 + 384 + 1536 + 1536) * 384
    assert momentum.optimizer - plain.optimizer == pytest.approx((9 * 1.31 + 3 * 0.38) * 1e-12 * weights)
    assert (momentum.forward, momentum.error, momentum.weight) == (plain.forward, plain.error, plain.weight)


def test_products_of_quantized_layers_are_seen_without_names():
    import gft

    model = gft.quantize_(nn.Sequential(nn.Conv2d(2, 6, 3, groups=2), nn.Flatten(), nn.Linear(6 * 16, 4)), 4)
    assert energy.products(model, torch.zeros(5, 2, 6, 6)) == [
        energy.Product("0", 5 * 16 * 6 * 9, quantized=True, error=False), energy.Product("2", 5 * 96 * 4, quantized=True)]


def test_the_optimizer_is_a_small_part_of_the_whole(networks):
    """Why docs/energy.md gives two totals."""
    dnn = networks["mnist-dnn"]
    adamw, gft = (network_of.Network.step(dnn[recipe.row], recipe, "fp32", "7nm")
                  for recipe in map(recipes.find, ("mnist-dnn-fp", "mnist-dnn-quantized-2bit")))
    assert adamw.optimizer / gft.optimizer == pytest.approx(3.05, abs=0.01)
    assert adamw.total / gft.total == pytest.approx(1.48, abs=0.01)
    assert adamw.optimizer / adamw.total < 0.015


def test_tables_of_the_paper_are_of_whole_images(networks):
    recipe = recipes.find("imagenette-vit-fp")
    as_trained, by_the_paper = (network_of.Network.step(one, recipe, "fp32", "7nm")
                                for one in (network_of.network(recipe), networks["imagenette-vit"]["Full-Precision"]))
    assert recipe.model.patch_dropout > 0
    assert by_the_paper.optimizer == as_trained.optimizer
    assert by_the_paper.forward > 1.5 * as_trained.forward


def test_a_whole_training_counts_the_whole_images_at_its_end():
    recipe = recipes.find("imagenette-vit-hybrid2-4bit").changed(["whole_images=0.25"])
    few, every, mean = (network_of.Network.step(one, recipe, "fp32", "7nm") for one in (
        network_of.network(recipe), network_of.network(recipe.changed(["patch_dropout=0"])), network_of.over_a_run(recipe)))
    assert mean.optimizer == few.optimizer
    for part in ("forward", "error", "weight"):
        assert getattr(mean, part) == pytest.approx(0.75 * getattr(few, part) + 0.25 * getattr(every, part), rel=1e-6)
    assert mean.forward > 1.5 * few.forward


# ---------------------------------------------------------------------------------------------------- the command


def test_table_is_written_with_its_proof(tmp_path):
    asked = ["energy", "table", "--node", "45nm", "--precision", "bf16", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert all(len(line.rstrip()) <= 80 for line in done.output.splitlines() if not line.startswith(("- ", "Written")))
    written = json.loads((tmp_path / "out" / "energy.json").read_text())
    assert len(written["rows"]) == 28
    assert {"command", "commit", "torch"} <= written["about"].keys()
    assert "--node 45nm --precision bf16" in written["about"]["command"]
    text = (tmp_path / "out" / "energy.md").read_text()
    assert "| Hybrid-2 2bit | 1.03M ≠ 0.53M |" in text
    assert "gft energy table" in text


def test_table_takes_the_flips_of_runs(tmp_path):
    first = json.loads((RESULTS / "mnist-dnn" / "runs.jsonl").read_text().splitlines()[0])
    line = {**first, "recipe": "mnist-dnn-quantized-2bit", "fp32_params": 0, "quantized_params": 1000, "bits": 2,
            "steps": 10, "updates_estimated": 1800.0}
    lines = [{**line, "seed": seed, "updates_actual": updates} for seed, updates in ((0, 100), (1, 300))]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (result,) = mean_results(tmp_path)
    assert result["updates_actual"] == 200
    sheet = sheets.flips_sheet("flips", [result, {**result, "updates_estimated": None}, {**result, "quantized_params": 0}])
    assert len(sheet.rows) == 1
    assert sheet.rows[0][:2] == ["mnist-dnn-quantized-2bit", "0.020"]
    with pytest.raises(UsageError, match="no finished run"):
        mean_results(tmp_path / "nowhere")
