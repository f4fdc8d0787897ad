"""Lightning around a quantized model: both ways to optimize, exact resume, statistics, and right counts in its summary."""

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_network import TinyNet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")
import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

import gft
from gft.integrations.lightning import CountedSummary, ModelSummary, RichModelSummary, Statistics
from gft.layers import quantized_layers

STEPS = 6


class Lit(pl.LightningModule):
    """A TinyNet with two integer layers."""

    def __init__(self, manual: bool = False, memory: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = gft.quantize_(TinyNet(), 2, lambda m, name: ".mlp." in name, memory=memory)
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> gft.Hybrid:
        return hybrid_of(self.net)


def hybrid_of(model: nn.Module) -> gft.Hybrid:
    return gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.3, seed=3), torch.optim.AdamW(gft.dense(model), lr=1e-2))


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(8 * STEPS, 6, generator=generator), torch.randint(5, (8 * STEPS,), generator=generator))
    return DataLoader(data, 8)


def trainer_of(folder: Path, epochs: int = 1, **settings: Any) -> Any:
    return pl.Trainer(**{"max_epochs": epochs, "accelerator": "cpu", "default_root_dir": folder, "logger": False,
                         "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
                         **settings})


def fit(model: Any, trainer: Any, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer.fit(model, loader(), **settings)
    return trainer


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning_trains_to_the_weights_of_a_plain_loop(tmp_path, manual):
    plain, model = Lit(), Lit(manual)
    optimizer = hybrid_of(plain.net)
    for x, y in loader():
        optimizer.zero_grad()
        F.cross_entropy(plain.net(x), y).backward()
        optimizer.step()
    fit(model, trainer_of(tmp_path))
    assert same_weights(model, plain)
    assert not same_weights(model, Lit())


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
def test_lightning_resumed_from_its_checkpoint_ends_with_the_same_weights(tmp_path, memory):
    whole, first, second = (Lit(memory=memory) for _ in range(3))
    fit(whole, trainer_of(tmp_path, 2))
    fit(first, trainer_of(tmp_path, 1)).save_checkpoint(tmp_path / "half.ckpt")  # after an epoch: a loader starts anew
    fit(second, trainer_of(tmp_path, 2), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert same_weights(second, whole)
    assert not same_weights(first, whole)


def test_statistics_are_in_lightning_s_log(tmp_path):
    logger = CSVLogger(tmp_path, name="log")
    model = Lit()
    trainer = fit(model, trainer_of(tmp_path, logger=logger, log_every_n_steps=2, callbacks=[Statistics()]))
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    assert [row["step"] for row in rows if row["loss"]] == ["1", "3", "5"]
    rows = [row for row in rows if row["gft/zeros"]]
    assert [row["step"] for row in rows] == ["1", "3", "5"]
    levels = torch.cat([layer.levels().reshape(-1) for layer in quantized_layers(model).values()])
    assert float(rows[-1]["gft/zeros"]) == pytest.approx((levels == 0).float().mean().item())
    assert float(rows[-1]["gft/flips"]) == trainer.optimizers[0].optimizers[0].flips() > 0


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
def test_the_summary_counts_weights_not_bytes_and_integers_as_trainable(memory):
    model, whole = Lit(memory=memory), sum(p.numel() for p in TinyNet().parameters())
    gains = len(quantized_layers(model))
    integers = sum(layer.rows * layer.columns for layer in quantized_layers(model).values())
    summary = CountedSummary(model, max_depth=3)
    assert summary.total_parameters == whole + gains
    assert summary.trainable_parameters == whole + gains - integers  # nobody trains the integers yet
    optimizer = hybrid_of(model.net)
    assert summary.trainable_parameters == whole + gains
    assert summary.param_nums[summary.layer_names.index("net")] == whole + gains
    assert summary.param_nums[summary.layer_names.index("net.block.mlp")] == 33 * 24 * 2 + 33 + gains
    assert summary.model_size * 1e6 == sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    del optimizer


def test_lightning_prints_the_right_counts_in_both_tables(tmp_path, capsys, caplog):
    with caplog.at_level("INFO", "lightning.pytorch"):
        fit(Lit(memory=False), trainer_of(tmp_path, 1, enable_model_summary=True, callbacks=[ModelSummary()]))
    assert "1.9 K     Trainable params\n0         Non-trainable params" in caplog.text
    pytest.importorskip("rich")
    fit(Lit(memory=False), trainer_of(tmp_path, 1, enable_model_summary=True, callbacks=[RichModelSummary()]))
    assert "Non-trainable params: 0" in capsys.readouterr().out


@pytest.mark.parametrize("ours", [Statistics, ModelSummary, RichModelSummary])
@pytest.mark.parametrize("first", [True, False], ids=["before it", "after it"])
def test_lightning_s_average_of_integers_is_refused_before_it_begins(tmp_path, refuses, ours, first):
    model, average = Lit(memory=False), pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    before = [parameter.clone() for parameter in model.parameters()]
    with refuses(ValueError, r"StochasticWeightAveraging would average the bytes.*gft\.averaged\(model\)"):
        fit(model, trainer_of(tmp_path, 2, callbacks=[ours(), average] if first else [average, ours()]))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
