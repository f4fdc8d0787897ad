"""transformers.Trainer: the optimizer of a quantized model, and what to see of it in the log.

Trainer hands an optimizer class only parameters that ask for a gradient, and integer weights do not. A factory it calls
with the model instead: `optimizer_cls_and_kwargs=(HybridFactory, {…})`. `Trainer(optimizers=(gft.Hybrid(…), None))` works
as well.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_pt_utils import get_parameter_names

from gft.errors import UsageError
from gft.hybrid import Hybrid
from gft.integrations.records import record
from gft.layers import dense, quantized
from gft.optim import GFT, LR

# Trainer.get_decay_parameter_names leaves these out of weight decay; and a gain is no weight.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)", r"log_gain"]


class HybridFactory:
    """Builds gft.Hybrid from a model: GFT for its integer weights, AdamW or another torch optimizer for the rest.

    `HybridFactory()(model, gft={"lr": 0.2}, dense={"lr": 6e-4, "weight_decay": 0.1})`: Trainer calls it so. The weight decay
    spares biases, norms and gains, as Trainer's own groups do.
    """

    def __call__(self, model: nn.Module, gft: dict[str, Any] | None = None, dense: dict[str, Any] | None = None,
                 dense_cls: type[Optimizer] = AdamW) -> Hybrid:
        integers = GFT(quantized(model), **(gft or {}))
        groups = decay_groups(model, (dense or {}).get("weight_decay", 0.0))
        return Hybrid(integers, dense_cls(groups, **(dense or {}))) if groups else Hybrid(integers)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The float parameters in two groups: those that weight decay pulls to zero, and biases, norms and gains."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    trained = {id(parameter) for parameter in dense(model)}
    named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in trained]
    groups = [{"params": [p for name, p in named if name in decayed], "weight_decay": weight_decay},
              {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def optimizer_cls_and_kwargs(args: Any, lr: float = LR, **gft_settings: Any) -> tuple[type[HybridFactory], dict[str, Any]]:
    """For `Trainer(…, optimizer_cls_and_kwargs=…)`. `lr` and further settings (rule, vote, seed) are gft.GFT's; those of
    AdamW are read from the TrainingArguments: learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon. Trainer's
    schedule drives both rates."""
    if not hasattr(args, "adam_beta1"):
        raise UsageError("give the TrainingArguments first: optimizer_cls_and_kwargs(args, lr=0.2)")
    adamw = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "betas": (args.adam_beta1, args.adam_beta2),
             "eps": args.adam_epsilon}
    return HybridFactory, {"gft": {"lr": lr, **gft_settings}, "dense": adamw}


class Statistics(TrainerCallback):
    """Puts flips, zeros, edges and bytes (`gft.integrations.records`) into Trainer's own log, whenever that logs:

        trainer.add_callback(hf.Statistics(trainer))

    They are in `trainer.state.log_history`, and go wherever `report_to` sends it: W&B, MLflow, TensorBoard.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None,
                    optimizer: Any = None, **kwargs: Any) -> None:
        trainer = self._trainer()
        if trainer is None or model is None or not control.should_log:
            return
        with torch.no_grad():
            trainer.log(record(model, [] if optimizer is None else [optimizer]))
        control.should_log = True  # trainer.log takes the wish for fulfilled, and the loss would not be logged
