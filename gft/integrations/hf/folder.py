"""A folder to publish: packed integer weights, config.json, and a model card that says where they come from."""

import platform
import shlex
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_utils import PreTrainedModel

import gft
from gft.errors import UsageError
from gft.files import written_atomically
from gft.integrations.hf.quantizer import GftQuantizer, attach
from gft.integrations.records import weights_of
from gft.layers import quantized_layers


def save(model: nn.Module, folder: str | Path, *, pack: bool = True, base_model: str | None = None,
         command: str | list[str] | None = None, tokenizer: Any = None, **save_pretrained: Any) -> Path:
    """Write a folder that `from_pretrained` loads to the same logits, with a model card; returns it. Nothing is uploaded.

    pack: True leaves out the votes that training keeps in a byte's low bits: 0.25 B a weight at 2 bits, 0.5 B at 3 and 4.
        The levels, and with them the logits, are the same; whoever trains on starts with `memory=False`. False keeps all.
    base_model, command: for the card: what the model was made from, and by what command (a list is sys.argv).
    tokenizer: saved beside the model.
    """
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"hf.save takes a transformers model, not {type(model).__name__}; use gft.save_checkpoint")
    if save_pretrained.get("push_to_hub"):
        raise UsageError("hf.save uploads nothing; look the folder through and upload it with huggingface_hub")
    if not quantized_layers(model):
        raise UsageError("no quantized layer in this model; call gft.quantize_(model, bits=…) first")
    folder = Path(folder)
    attach(model)
    quantizer = model.hf_quantizer
    assert isinstance(quantizer, GftQuantizer)
    quantizer.pack = pack
    try:
        model.save_pretrained(folder, **save_pretrained)
    finally:
        attach(model)  # what it is in memory, not in the folder
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    with written_atomically(folder / "README.md") as unfinished:
        Path(unfinished).write_text(model_card(model, folder, base_model, command))
    return folder


def model_card(model: PreTrainedModel, folder: Path, base_model: str | None, command: str | list[str] | None) -> str:
    """README.md of a folder that is written already, whose files are measured."""
    layers = quantized_layers(model)
    bits = sorted({layer.bits for layer in layers.values()})
    count, integers = weights_of(model)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    names = " and ".join(f"{b}-bit" for b in bits)
    rows = {
        "weights": f"{count:,}, of which {integers:,} ({integers / count:.1%}) are {names} integers",
        "file": f"{size:,} bytes, {8 * size / count:.2f} bits a weight over all",
        "base model": base_model or "none given",
        "command": f"`{shlex.join(command) if isinstance(command, list) else command}`" if command else "none given",
        "made with": f"gft {gft.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
                     f"Python {platform.python_version()}",
    }
    head = ["---", "library_name: transformers", *([f"base_model: {base_model}"] if base_model else []),
            "tags:", "- gft", "- quantized", *[f"- {b}-bit" for b in bits], "---"]
    auto = next((name for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageClassification",
                                   "AutoModelForSequenceClassification") if name.removeprefix("AutoModel") in
                 type(model).__name__), "AutoModel")
    body = [f"# {folder.name}", "", f"A {type(model).__name__} with {names} integer weights.", "", "```python",
            "import gft.integrations.hf", f"from transformers import {auto}", "",
            f'model = {auto}.from_pretrained("{folder.name}")', "```", "",
            "Without the first line transformers refuses the folder.", "", "| | |", "|---|---|",
            *[f"| {key} | {value} |" for key, value in rows.items()]]
    return "\n".join([*head, "", *body, ""])
