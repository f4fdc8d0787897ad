"""Lightning: statistics in its log, and a summary that counts integer weights as what they are.

    Trainer(callbacks=[Statistics(), ModelSummary()])

Automatic and manual optimization take `gft.Hybrid` as any optimizer.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.model_summary.model_summary import LayerSummary
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from torch import nn

from gft.errors import UsageError
from gft.integrations.records import model_bytes, record, weights_of
from gft.layers import quantized_layers


class _KeepsIntegers(callbacks.Callback):
    """What all callbacks here see to before training begins."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        averages = any(isinstance(one, callbacks.StochasticWeightAveraging) for one in getattr(trainer, "callbacks", ()))
        if averages and quantized_layers(pl_module):
            raise UsageError("StochasticWeightAveraging would average the bytes of integer weights; leave it out and use "
                             "gft.averaged(model), which averages what they stand for")


class Statistics(_KeepsIntegers):
    """Logs flips, zeros, edges and bytes (`gft.integrations.records`) to the trainer's loggers, as often as the trainer logs
    (`log_every_n_steps`)."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logged = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step, every = trainer.global_step, getattr(trainer, "log_every_n_steps", 0)  # 0: it logs nothing
        if every and step // every > self._logged // every:
            self._logged = step
            numbers = record(pl_module, trainer.optimizers)
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=step - 1)  # the number by which Lightning logs this step's loss


class _CountedLayer(LayerSummary):
    @property
    def num_parameters(self) -> int:
        return weights_of(self._module)[0]


class CountedSummary(Summary):
    """Lightning's summary of a model with integer weights: a packed byte counts as the weights it holds, weights that
    gft.GFT trains count as trainable, and the size is the one in memory."""

    def summarize(self) -> dict[str, LayerSummary]:
        return {name: _CountedLayer(summary._module) if quantized_layers(summary._module) else summary
                for name, summary in super().summarize().items()}

    @property
    def total_parameters(self) -> int:
        return weights_of(self._model)[0]

    @property
    def trainable_parameters(self) -> int:
        floats = sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)
        return floats + sum(layer.rows * layer.columns for layer in trained_layers(self._model))

    @property
    def model_size(self) -> float:
        return model_bytes(self._model) / 1e6


class _Counted(_KeepsIntegers, callbacks.ModelSummary):
    def _summary(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Summary:  # type: ignore[override]
        return CountedSummary(pl_module, max_depth=self._max_depth)


class ModelSummary(_Counted):
    """Lightning's ModelSummary with right counts; it takes the place of the trainer's own."""


class RichModelSummary(_Counted, callbacks.RichModelSummary):
    """The same as a rich table."""


def trained_layers(model: nn.Module) -> list[Any]:
    """The layers whose weights an optimizer moves."""
    return [layer for layer in quantized_layers(model).values() if layer.votes is not None]
