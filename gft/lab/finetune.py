"""Fine-tuning: a trained float network to 4, 3 and 2 bits, by every start and method from the same network.

    float    AdamW trains a ResNet on photographs from scratch
    start    the layers of its blocks become integers: nearest levels on one scale ("keep"), on the scales that lose least
             ("fit"), or rounded for their outputs on some batches (GPTQ); one scale a tensor, a row or a group
    method   gft: GFT trains the integers, one byte a weight.  ste: AdamW trains float weights behind the same levels and the
             same scales, whose gradient passes straight through the rounding: 12 B a weight
    both     for the same few steps, on the same batches; what is not on the grid is trained by AdamW with the same settings

Every row is the accuracy on the validation split right after the start, and after the fine-tuning.
"""

import copy
import csv
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import gft
from gft.errors import UsageError
from gft.files import make_folder, sentence_for
from gft.initialize import in_levels
from gft.lab import data as datasets
from gft.lab.models.resnet import ResNet
from gft.lab.provenance import commit, device_name
from gft.layers import quantized_layers
from gft.ops import times_factors

CALIBRATION = 4  # batches for GPTQ
DENSE_LR = {"float": 1e-3, "tune": 1e-4}  # AdamW's, of what is not on the grid
WEIGHT_DECAY = 0.05


@dataclass(frozen=True)
class Plan:
    """What is trained, and for how long."""

    data: str = "imagenette-32"
    width: int = 64
    blocks: int = 2
    batch: int = 256
    float_steps: int = 1400
    steps: int = 234
    augment: str = "light"
    seed: int = 0


@dataclass(frozen=True)
class Trial:
    """One way from the float network to integers."""

    bits: int
    init: str  # keep, fit or gptq
    scales: str | int
    method: str = "gft"  # or ste
    lr: float = 0.02  # of the weights on the grid
    memory: bool = True


@dataclass(frozen=True)
class Outcome:
    """What became of it, in % of the validation split."""

    trial: Trial
    float_accuracy: float
    at_start: float
    tuned: float
    seconds: float


# ---------------------------------------------------------------------------------------------------- training


def in_body(module: nn.Module, name: str) -> bool:
    """Stem and head stay float, as is usual: few weights, sensitive ones."""
    return name.startswith("blocks.")


@torch.no_grad()
def accuracy(model: nn.Module, data: datasets.Dataset) -> float:
    """On the validation split, in %."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in data.evaluation_batches("val", 500))
    model.train()
    return 100 * right / len(data.val[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> None:
    """Cross-entropy, rates falling linearly to 0, products in bf16 on a GPU."""
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    device = next(model.parameters()).device
    model.train()
    for _ in range(steps):
        x, y = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY)


def float_network(plan: Plan, data: datasets.Dataset, device: torch.device) -> nn.Module:
    """The network that all trials start from."""
    torch.manual_seed(plan.seed)
    model = ResNet(data.shape[0], data.classes, plan.width, [plan.blocks] * 4).to(device)
    train(model, adamw(model.parameters(), DENSE_LR["float"]), data.batches(plan.batch, plan.seed, augment=plan.augment),
          plan.float_steps)
    return model


# ---------------------------------------------------------------------------------------------------- straight through


class OnGrid(nn.Module):
    """A float weight rounded to levels and scales; where it is on the grid its gradient passes straight through."""

    scale: Tensor

    def __init__(self, scale: Tensor, largest: int) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.largest = largest

    def forward(self, weight: Tensor) -> Tensor:
        flat = weight.reshape(len(weight), -1)
        positions = in_levels(flat, self.scale)
        rounded = times_factors(positions.round().clamp(-self.largest, self.largest), self.scale)
        inside = positions.abs() <= self.largest + 0.5
        return torch.where(inside, flat + (rounded - flat).detach(), rounded).view_as(weight)


def straight_through_(model: nn.Module, start: nn.Module) -> nn.Module:
    """Put the float layers of `model` behind the levels and scales of `start`, the same network on the grid: each float
    weight is moved into the cell of its level, and only as far as that takes."""
    for name, layer in quantized_layers(start).items():
        module = model.get_submodule(name)
        flat, levels = module.weight.detach().reshape(layer.rows, -1), layer.levels().view(layer.rows, -1)  # type: ignore[operator]
        inside = levels + (in_levels(flat, layer.scale) - levels).clamp(-0.49, 0.49)
        module.weight.data.copy_(times_factors(inside, layer.scale).view(module.weight.shape))  # type: ignore[union-attr,arg-type]
        parametrize.register_parametrization(module, "weight", OnGrid(layer.scale.clone(), layer.storage.largest))
    return model


# ---------------------------------------------------------------------------------------------------- a trial


def started(plan: Plan, trial: Trial, network: nn.Module, data: datasets.Dataset) -> nn.Module:
    """A copy of the float network with its blocks on the grid."""
    init: Any = trial.init
    if trial.init == "gptq":
        batches = data.batches(plan.batch, plan.seed + 1)
        init = gft.GPTQ([next(batches)[:1] for _ in range(CALIBRATION)])
    return gft.quantize_(copy.deepcopy(network), trial.bits, in_body, memory=trial.memory, init=init, scales=trial.scales,
                         gain=False)


def run(plan: Plan, trial: Trial, network: nn.Module, data: datasets.Dataset, float_accuracy: float) -> Outcome:
    """Start, measure, train, measure."""
    began = time.perf_counter()
    model = started(plan, trial, network, data)
    if trial.method == "ste":
        model = straight_through_(copy.deepcopy(network), model)
        latent = [parameter for name, parameter in model.named_parameters() if name.endswith("weight.original")]
        chosen = {id(parameter) for parameter in latent}
        others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
        optimizer: torch.optim.Optimizer = gft.Hybrid(torch.optim.AdamW(latent, lr=trial.lr, weight_decay=0.0),
                                                      adamw(others, DENSE_LR["tune"]))
    elif trial.method == "gft":
        optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=trial.lr, seed=plan.seed),
                               adamw(gft.dense(model), DENSE_LR["tune"]))
    else:
        raise UsageError(f"method={trial.method!r}: choose gft or ste")
    at_start = accuracy(model, data)
    train(model, optimizer, data.batches(plan.batch, plan.seed + 2, augment=plan.augment), plan.steps)
    return Outcome(trial, float_accuracy, at_start, accuracy(model, data), time.perf_counter() - began)


def study(plan: Plan, trials: list[Trial], device: torch.device, say: Callable[[str], None]) -> Iterator[Outcome]:
    """All trials from one float network."""
    data = datasets.load(plan.data)
    if not isinstance(data, datasets.Dataset) or len(data.shape) != 3:
        raise UsageError(f"data={plan.data} has no images; choose imagenette-32 or digits-images")
    data = data.to(device)
    network = float_network(plan, data, device)
    reached = accuracy(network, data)
    say(f"float: {reached:.2f} %")
    for trial in trials:
        outcome = run(plan, trial, network, data, reached)
        say(f"{trial.bits} bit, {trial.init}, scales={trial.scales}, {trial.method} lr={trial.lr:g}: "
            f"{outcome.at_start:.2f} -> {outcome.tuned:.2f} % ({outcome.seconds:.0f} s)")
        yield outcome


STARTS = (("keep", "tensor"), ("fit", "tensor"), ("fit", "row"), ("fit", 64), ("gptq", "row"))
LRS = {"gft": (0.01, 0.02, 0.05, 0.1), "ste": (3e-5, 1e-4, 3e-4)}


def trials_of(bits: tuple[int, ...] = (2, 3, 4)) -> list[Trial]:
    """Every start at one lr, then several lr from the best start, of both methods."""
    by_start = [Trial(one, init, scales) for one in bits for init, scales in STARTS]
    by_rate = [Trial(one, "gptq", "row", method, lr) for one in bits for method, rates in LRS.items() for lr in rates]
    return list(dict.fromkeys(by_start + by_rate))


def group_that_fits(trial: Trial, width: int) -> Trial:
    """Rows of narrow networks are shorter than 64: a group must divide them."""
    return replace(trial, scales=width) if isinstance(trial.scales, int) and width % trial.scales else trial


def known(file: Path, plan: Plan) -> set[Trial]:
    """The trials of this plan that a CSV file has already: a study that was stopped goes on."""
    if not file.exists():
        return set()
    try:
        with open(file, newline="", encoding="utf-8") as lines:
            rows = [row for row in csv.DictReader(lines) if row["plan"] == json.dumps(asdict(plan))]
        return {Trial(int(row["bits"]), row["init"], int(row["scales"]) if row["scales"].isdecimal() else row["scales"],
                      row["method"], float(row["lr"]), row["memory"] == "True") for row in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise UsageError(f"{file} is not the file of such a study ({type(error).__name__}); mend it, or give another --out"
                         ) from error


def append(outcomes: list[Outcome], plan: Plan, file: Path, device: torch.device, command: str) -> None:
    """Add outcomes to a CSV file, each with all that it takes to repeat it."""
    about = {"plan": json.dumps(asdict(plan)), "command": command, "commit": commit(), "device": device_name(device),
             "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    rows = [{**asdict(outcome.trial), "float": round(outcome.float_accuracy, 2), "at_start": round(outcome.at_start, 2),
             "tuned": round(outcome.tuned, 2), "seconds": round(outcome.seconds, 1), **about} for outcome in outcomes]
    make_folder(file.parent)
    is_new = not file.exists()
    with sentence_for(file), open(file, "a", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
