"""gft export: a trained model, from a folder, for another runtime.

A target is a function of a model and a path, found by name when it is asked for, so that none needs what another imports.
Where it has parameters named tokenizer, example_inputs, example_kwargs or dynamic_shapes it is given the folder's own; --set
gives the others, and tokenizer=null none. A size of an example is not fixed in the file, if torch can leave it open.
"""

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gft.errors import UsageError, install_hint
from gft.lab import train
from gft.lab.records import read_object

EXAMPLES = ("example_inputs", "example_kwargs", "dynamic_shapes")  # what targets that trace the model take
SUPPLIED = ("model", "path", "folder", *EXAMPLES)  # parameters of a target that no user sets
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # a folder with one of these has a tokenizer
IMAGE_SIZE, CHANNELS = 224, 3  # of an example, where the model's config does not say
TARGETS = {  # --to: the function, by its module
    "gguf": "gft.export.gguf:to_gguf",
    "onnx": "gft.export.onnx:to_onnx",
    "compressed-tensors": "gft.export.compressed:to_compressed_tensors",
    "hf": "gft.integrations.hf:save",
    "torch": "gft.export.program:to_pt2",
}


@dataclass(frozen=True)
class Source:
    """What a folder holds, and inputs that the model runs on, by place or by name."""

    model: nn.Module
    tokenizer: Any = None
    example_inputs: tuple[Tensor, ...] = ()
    example_kwargs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def dynamic_shapes(self) -> Any:
        """torch is to leave every size open that it can, but those of images, which models fix themselves."""
        def sizes(x: Tensor) -> dict[int, Any]:
            return dict.fromkeys(range(1 if x.is_floating_point() else x.dim()), torch.export.Dim.AUTO)

        return {name: sizes(x) for name, x in self.example_kwargs.items()} or tuple(map(sizes, self.example_inputs))


def export(source: str, to: str, out: Path, settings: list[str]) -> Path:
    """Write the model of a folder for another runtime. What is wrong with the target or its settings is said before the
    model is read."""
    target = find(to)
    chosen = read_settings(to, target, settings)
    loaded = load(source)
    known = inspect.signature(target).parameters
    offered = {name: getattr(loaded, name) for name in ("tokenizer", *EXAMPLES) if name in known}
    traced = "example_inputs" in known
    if traced:
        return_no_cache(loaded.model)
        refuse_examples_that_do_not_run(loaded)
    try:
        target(loaded.model, out, **(offered | chosen))
    except ModuleNotFoundError as missing:
        raise UsageError(f"--to {to} needs {missing.name}; install it with: {install_hint('export')}") from missing
    except RuntimeError as error:
        if not traced:
            raise
        reason = str(error.__cause__ or error).splitlines()[0].rstrip(".")  # torch.onnx hands on that of torch.export
        raise UsageError(f"torch cannot trace this {type(loaded.model).__name__} ({reason}); export it with another --to, "
                         "or change what stands in its way") from error
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
    if (folder / "config.json").is_file() and "model_type" not in read_object(folder / "config.json"):
        model, data, _ = train.load_run(folder, "cpu")
        return Source(model, example_inputs=(next(iter(data.batches(2, seed=0)))[0],))  # torch fixes a size of one
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
        names = transformers.AutoConfig.from_pretrained(source).architectures or ["AutoModel"]
        if not hasattr(transformers, names[0]):
            raise UsageError(f"{source} is a {names[0]}, which this transformers has not; install one that has it, or load "
                             "the model in Python and call the functions of gft.export")
        model = getattr(transformers, names[0]).from_pretrained(source).eval()
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{source} holds no model that transformers can load ({str(error).splitlines()[0].rstrip('.')}); "
                         "give a run folder, or one that save_pretrained wrote") from error
    return Source(model, tokenizer_of(source, transformers), example_kwargs=examples_for(model))


def tokenizer_of(source: str, transformers: Any) -> Any:
    """The tokenizer that is with the model, if there is one."""
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        if not folder.is_dir():  # a model on the hub need not have one
            return None
        raise UsageError(f"the tokenizer of {source} cannot be loaded ({str(error).strip().splitlines()[0].rstrip('.')}); "
                         "mend it, or take its files out of the folder") from error


def examples_for(model: Any) -> dict[str, Tensor]:
    """Inputs of a transformers model, by name: tokens, and images where it takes them."""
    takes, vision = inspect.signature(model.forward).parameters, getattr(model.config, "vision_config", None)
    examples = {name: value for name, value in model.dummy_inputs.items() if name in takes and isinstance(value, Tensor)}
    if "pixel_values" in takes and (vision is not None or model.main_input_name == "pixel_values"):
        vision = vision or model.config
        size = getattr(vision, "image_size", IMAGE_SIZE)
        height, width = (size, size) if isinstance(size, int) else size
        examples["pixel_values"] = torch.zeros(2, getattr(vision, "num_channels", CHANNELS), height, width)
    return examples


def return_no_cache(model: nn.Module) -> None:
    """A graph cannot return a cache of keys and values. Parts of a model may have a config of their own."""
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "use_cache"):
            config.use_cache = False  # type: ignore[union-attr]


def refuse_examples_that_do_not_run(loaded: Source) -> None:
    """A model takes more than tokens and images, or other ones: said before torch traces it, which it would at length."""
    try:
        with torch.no_grad():
            loaded.model(*loaded.example_inputs, **loaded.example_kwargs)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        kind, given = type(loaded.model).__name__, ", ".join(loaded.example_kwargs) or "none"
        raise UsageError(f"a {kind} does not run on the inputs that are made for it here ({given}); export it in Python, "
                         "with inputs of your own") from error
