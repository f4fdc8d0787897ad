"""Train 2-bit weights by Lightning: return gft.Hybrid from configure_optimizers, and add two callbacks.

    python examples/lightning_module.py --steps 300                       a small CNN on scikit-learn's 8 x 8 digits
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import gft
from gft.integrations.lightning import ModelSummary, Statistics


class Digits(pl.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                                 nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
                                 nn.Linear(32 * 16, 10))
        gft.quantize_(self.net, bits=2)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = gft.Hybrid(gft.GFT(gft.quantized(self), lr=0.2),              # the integers
                               torch.optim.AdamW(gft.dense(self), lr=3e-3))       # norms, biases, gains
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="lightning-runs", help="the folder for logs")
    settings = parser.parse_args()
    pl.seed_everything(0)

    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    training, test = random_split(data, [0.8, 0.2])

    logger = CSVLogger(settings.out)
    trainer = pl.Trainer(max_steps=settings.steps, accelerator="auto", devices=1, logger=logger, enable_progress_bar=False,
                         log_every_n_steps=max(settings.steps // 4, 1), enable_checkpointing=False,
                         callbacks=[Statistics(), ModelSummary()])  # flips, zeros, bytes; weights counted as weights
    model = Digits(settings.steps)
    trainer.fit(model, DataLoader(training, 64, shuffle=True))
    found = trainer.validate(model, DataLoader(test, 512), verbose=False)[0]
    print(Path(logger.log_dir, "metrics.csv").read_text())
    print(f"accuracy {found['accuracy']:.1%} with weights in {model.net[0].levels().unique().tolist()}")


if __name__ == "__main__":
    main()
