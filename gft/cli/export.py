"""gft export: a trained model, from a folder, for another runtime.

A target is a function of a model and a path, found by name when it is asked for, so that none needs what another imports.
Where it has parameters named tokenizer or example_inputs it is given the folder's own; --set gives the others, and
tokenizer=null none.
"""

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gft.errors import UsageError, install_hint
from gft.lab import train
from gft.lab.records import read_json

SUPPLIED = ("model", "path", "folder", "example_inputs")  # parameters of a target that no user sets
TARGETS = {  # --to: the function, by its module
    "gguf": "gft.export.gguf:to_gguf",
    "onnx": "gft.export.onnx:to_onnx",
    "compressed-tensors": "gft.export.compressed:to_compressed_tensors",
    "hf": "gft.integrations.hf:save",
    "torch": "gft.export.program:to_pt2",
}


@dataclass(frozen=True)
class Source:
    """What a folder holds."""

    model: nn.Module
    tokenizer: Any
    example_inputs: tuple[Tensor, ...]


def export(source: str, to: str, out: Path, settings: list[str]) -> Path:
    """Write the model of a folder for another runtime. What is wrong with the target or its settings is said before the
    model is read."""
    target = find(to)
    chosen = read_settings(to, target, settings)
    loaded = load(source)
    known = inspect.signature(target).parameters
    offered = {"tokenizer": loaded.tokenizer, "example_inputs": loaded.example_inputs}
    offered = {name: value for name, value in offered.items() if name in known}
    if "example_inputs" in offered and hasattr(loaded.model, "config"):
        loaded.model.config.use_cache = False  # type: ignore[union-attr]  # a graph cannot return a cache of keys and values
    try:
        target(loaded.model, out, **(offered | chosen))
    except ModuleNotFoundError as missing:
        raise UsageError(f"--to {to} needs {missing.name}; install it with: {install_hint('export')}") from missing
    return out


def find(to: str) -> Callable[..., Any]:
    """The function behind --to."""
    if to not in TARGETS:
        raise UsageError(f"--to {to}: choose one of {', '.join(TARGETS)}")
    module, _, function = TARGETS[to].partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("gft"):
            raise UsageError(f"--to {to} is not part of this gft; install a newer one") from missing
        raise UsageError(f"--to {to} needs {missing.name}; install it with: {install_hint('export')}") from missing


def read_settings(to: str, target: Callable[..., Any], settings: list[str]) -> dict[str, Any]:
    """["ternary=TQ1_0", …] -> {"ternary": "TQ1_0", …}, if the target has such parameters. Numbers and true, false and null
    are read as in JSON, anything else is text."""
    parameters = inspect.signature(target).parameters.values()
    known = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD and one.name not in SUPPLIED]
    chosen: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in known:
            raise UsageError(f"--set {setting}: give KEY=VALUE, where --to {to} has the keys {', '.join(known) or 'none'}")
        try:
            chosen[name] = json.loads(text)
        except json.JSONDecodeError:
            chosen[name] = text
    return chosen


def load(source: str) -> Source:
    """The model of a run folder, or of one that transformers' save_pretrained wrote, or a name that it finds on its hub."""
    folder = Path(source)
    if (folder / "config.json").is_file() and "model_type" not in read_json(folder / "config.json"):
        model, data, _ = train.load_run(folder, "cpu")
        return Source(model, None, (next(iter(data.batches(1, seed=0)))[0],))
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UsageError(f"{source} has no config.json; give a run folder, or one that save_pretrained wrote")
    if not folder.is_dir() and source.count("/") != 1:
        raise UsageError(f"{source} is neither a folder nor the name of a model on the hub, which has the form owner/name")
    return load_pretrained(source)


def load_pretrained(source: str) -> Source:
    try:
        importlib.import_module("gft.integrations.hf")  # tells transformers how integer weights are read
        import transformers
    except ModuleNotFoundError as missing:
        raise UsageError(f"{source} is a model of transformers, which needs {missing.name}; install it with: "
                         f"{install_hint('hf')}") from missing
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    except (OSError, ValueError) as error:
        raise UsageError(f"{source} holds no causal language model that transformers can load "
                         f"({str(error).splitlines()[0].rstrip('.')}); give a run folder, or one that save_pretrained wrote"
                         ) from error
    folder, tokenizer = Path(source), None
    if not folder.is_dir() or (folder / "tokenizer.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    return Source(model, tokenizer, (model.dummy_inputs["input_ids"],))
