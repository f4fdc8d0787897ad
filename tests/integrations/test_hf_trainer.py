"""transformers.Trainer and accelerate around a quantized model: same weights, exact resume, statistics in the log."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from hf_models import quantized_llama, tokens
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments, get_linear_schedule_with_warmup

import gft
from gft.integrations import hf
from gft.layers import quantized_layers

STEPS = 4


def dataset() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in tokens(4 * STEPS)]


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(**{
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2,
        "weight_decay": 0.1, "save_strategy": "no", "logging_steps": 2, "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "dataloader_pin_memory": False, **settings})


def trainer_of(model: nn.Module, args: TrainingArguments, **settings: Any) -> Trainer:
    settings = settings or {"optimizer_cls_and_kwargs": hf.optimizer_cls_and_kwargs(args, lr=0.3, seed=7)}
    return Trainer(model=model, args=args, train_dataset=dataset(), **settings)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_captured_step_takes_the_batches_of_a_loader_by_name(device):
    """What a collator makes of a dataset, its mask included; the last steps on a GPU are replayed."""
    losses = []
    for captured in (False, True):
        model = quantized_llama(4).train().to(device)
        optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.3, seed=7),
                               torch.optim.AdamW(gft.dense(model), lr=2**-7, capturable=device == "cuda"))

        def step(model=model, optimizer=optimizer, **batch: torch.Tensor) -> torch.Tensor:
            loss = model(**batch).loss
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            return loss

        take = gft.Captured(step, optimizer) if captured else step
        rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens(4 * 7)]
        losses.append([take(**{name: one.to(device) for name, one in batch.items()}).item()
                       for batch in DataLoader(rows, 4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4 if device == "cuda" else 0)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "packed"])
def test_trainer_resumed_from_its_checkpoint_ends_with_the_same_weights(tmp_path, memory):
    whole, first, second = (quantized_llama(2, memory) for _ in range(3))
    assert trainer_of(whole, arguments(tmp_path / "whole")).train().metrics["train_loss"] > 0
    args = arguments(tmp_path / "parts", save_strategy="steps", save_steps=2)
    trainer = trainer_of(first, args)
    trainer.add_callback(StopAt(2))
    trainer.train()
    assert not same_weights(first, whole)
    trainer_of(second, args).train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert same_weights(second, whole)
    assert not same_weights(second, quantized_llama(2, memory))


def test_the_factory_and_a_ready_optimizer_train_alike(tmp_path):
    one, other = quantized_llama(), quantized_llama()
    args = arguments(tmp_path)
    trainer_of(one, args).train()
    optimizer = hf.HybridFactory()(other, gft={"lr": 0.3, "seed": 7}, dense={"lr": 1e-2, "weight_decay": 0.1})
    trainer_of(other, args, optimizers=(optimizer, None)).train()
    assert same_weights(one, other)


def test_the_factory_decays_what_trainer_decays_and_no_gain(tmp_path):
    model = quantized_llama(2, attention_bias=True)
    args = arguments(tmp_path)
    trainer = trainer_of(model, args)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, gft.Hybrid)
    integers, decayed, spared = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert integers == {f"{name}.qweight" for name in quantized_layers(model)}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    theirs = set(trainer.get_decay_parameter_names(model)) & trained
    assert decayed == {name for name in theirs if not name.endswith("log_gain")}
    assert spared == trained - decayed
    assert "model.norm.weight" in spared
    assert [group.get("weight_decay") for group in optimizer.param_groups] == [None, 0.1, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 1e-2, 1e-2]


def test_trainer_s_own_optimizer_would_leave_the_integers_alone_and_says_so(tmp_path):
    model = quantized_llama()
    before = {name: layer.qweight.clone() for name, layer in quantized_layers(model).items()}
    with pytest.warns(UserWarning, match="has no optimizer and stays as it is"):
        Trainer(model=model, args=arguments(tmp_path), train_dataset=dataset()).train()
    assert all(torch.equal(layer.qweight, before[name]) for name, layer in quantized_layers(model).items())


def test_settings_of_the_factory_are_checked_before_training(tmp_path, refuses):
    with refuses(gft.UsageError, "give the TrainingArguments first"):
        hf.optimizer_cls_and_kwargs(0.1)
    with refuses(gft.UsageError, "no quantized layer in this model"):
        hf.HybridFactory()(nn.Linear(2, 2))


# ---------------------------------------------------------------------------------------------------- what is logged


def train_and_report(folder: Path, report_to: str) -> tuple[nn.Module, Trainer]:
    model = quantized_llama(2)
    trainer = trainer_of(model, arguments(folder, report_to=[report_to] if report_to else [], run_name="tiny"))
    trainer.add_callback(hf.Statistics(trainer))
    trainer.train()
    return model, trainer


def test_statistics_are_in_the_history_of_trainer(tmp_path):
    model, trainer = train_and_report(tmp_path, "")
    history = [row for row in trainer.state.log_history if "gft/zeros" in row]
    assert [row["step"] for row in history] == [2, 4]
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [2, 4]  # beside Trainer's own record
    layers, last = quantized_layers(model).values(), history[-1]
    levels = torch.cat([layer.levels().reshape(-1) for layer in layers])
    assert math.isclose(last["gft/zeros"], (levels == 0).float().mean().item(), rel_tol=1e-5)
    assert math.isclose(last["gft/edges"], (levels.abs() == 1).float().mean().item(), rel_tol=1e-5)
    assert last["gft/flips"] == trainer.optimizer.optimizer.optimizers[0].flips() > history[0]["gft/flips"] > 0
    assert 0 < last["gft/flip_rate"] < 1
    assert last["gft/weight_bytes"] == levels.numel() + 4 * len(layers)
    assert last["gft/model_bytes"] == sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


def test_statistics_reach_tensorboard(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    _, trainer = train_and_report(tmp_path, "tensorboard")
    logged = events.EventAccumulator(str(next((tmp_path / "runs").rglob("events*")).parent)).Reload()
    expected = [row["gft/flips"] for row in trainer.state.log_history if "gft/flips" in row]
    assert [event.value for event in logged.Scalars("train/gft/flips")] == expected


def test_statistics_reach_weights_and_biases_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true",
                        "WANDB_CACHE_DIR": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    _, trainer = train_and_report(tmp_path / "out", "wandb")
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert summary["train/gft/flips"] == [row for row in trainer.state.log_history if "gft/flips" in row][-1]["gft/flips"]
    assert list(tmp_path.rglob("*.wandb"))  # written by its own client


def test_statistics_reach_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    _, trainer = train_and_report(tmp_path / "out", "mlflow")
    mlflow.end_run()
    run = mlflow.search_runs(search_all_experiments=True, output_format="list")[0]
    assert run.data.metrics["gft/flips"] == [row for row in trainer.state.log_history if "gft/flips" in row][-1]["gft/flips"]


# ---------------------------------------------------------------------------------------------------- accelerate


def hybrid_of(model: nn.Module) -> gft.Hybrid:
    return gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.3, seed=3), torch.optim.AdamW(gft.dense(model), lr=1e-2))


def prepared(model: nn.Module, accelerator: Any = None) -> tuple[Any, ...]:
    """A model, its optimizer, its batches and its schedule, by accelerate if there is one."""
    optimizer = hybrid_of(model)
    parts = model, optimizer, DataLoader(list(tokens(4 * STEPS)), 4), get_linear_schedule_with_warmup(optimizer, 1, STEPS)
    return parts if accelerator is None else accelerator.prepare(*parts)


def loop(parts: tuple[Any, ...], accelerator: Any = None, steps: range = range(STEPS)) -> None:
    model, optimizer, loader, scheduler = parts
    model.train()
    for index, batch in enumerate(loader):
        if index not in steps:
            continue
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        scheduler.step()


def test_accelerate_trains_to_the_weights_of_a_plain_loop_and_resumes(tmp_path):
    from accelerate import Accelerator

    plain, whole, first, second = (quantized_llama(2, attention_bias=True) for _ in range(4))
    loop(prepared(plain))
    accelerator = Accelerator(cpu=True)
    loop(prepared(whole, accelerator), accelerator)
    assert same_weights(whole, plain)
    accelerator.free_memory()
    parts = prepared(first, accelerator)
    loop(parts, accelerator, range(2))
    accelerator.save_state(os.fspath(tmp_path))
    accelerator.free_memory()
    parts = prepared(second, accelerator)
    accelerator.load_state(os.fspath(tmp_path))
    assert same_weights(first, second)
    loop(parts, accelerator, range(2, STEPS))
    assert same_weights(second, plain)
    accelerator.free_memory()
