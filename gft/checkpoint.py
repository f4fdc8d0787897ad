"""Checkpoints: one safetensors file with everything a run needs to go on as if it had never stopped.

    tensors    model.* (integer weights as stored: packed, or one byte with memory), optimizer.*, rng.*
    metadata   the structure around them as JSON: param groups, schedule, step, whatever the caller adds; a checksum

A file is written beside its final name, flushed to disk and renamed over it: whoever kills the process finds either the
old file or the new one, whole. Nothing is ever unpickled. A file is read in two stages: `read_checkpoint` knows that it is
whole and what it holds, `load_checkpoint` that all of it fits, before the first value changes.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gft.errors import UsageError, UsageTypeError, one_line, shortened
from gft.files import written_atomically
from gft.layers import quantized_layers
from gft.layers.reading import check_state
from gft.saved import check_generators, check_optimizer, check_scheduler
from gft.sharding import is_sharded

FORMAT, OLDER = "gft-checkpoint-2", "gft-checkpoint-1"  # whose checksum left out types and shapes
MOST_NESTED = 100  # dicts and lists inside of each other; who keeps more has lost count
PARTS = ("model", "optimizer", "scheduler", "rng", "extra")


class CheckpointError(UsageError):
    """A checkpoint that cannot be used, and why."""


# ---------------------------------------------------------------------------------------------------- structure <-> tensors


def flatten(value: Any, name: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """A nest of dicts, lists, tuples, numbers, strings and tensors -> JSON, with its tensors put into `tensors`."""
    if depth > MOST_NESTED:
        raise UsageError(f"{name[:40]}… is nested deeper than {MOST_NESTED}, which a checkpoint cannot keep; flatten it")
    if is_sharded(value):
        raise UsageError(f"{name} is shared out over ranks, and one file holds whole tensors; save with "
                         "torch.distributed.checkpoint (docs/scaling.md)")
    if isinstance(value, Tensor):
        while name in tensors:  # "a.b" and "a" -> "b" spell the same
            name += "'"
        tensors[name] = value.detach().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int, float)) and key is not None:
                raise UsageTypeError(f"{name} has the key {key!r}, which a checkpoint cannot keep; use strings and numbers")
        # Pairs, since JSON would turn the integer keys of an optimizer's state into strings.
        return {"pairs": [[key, flatten(item, f"{name}.{key}", tensors, depth + 1)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [flatten(item, f"{name}.{index}", tensors, depth + 1) for index, item in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise UsageTypeError(f"{name} holds a {type(value).__name__}, which a checkpoint cannot; keep numbers, strings, "
                         "tensors, lists and dicts of them")


def unflatten(node: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """The inverse of `flatten`. What `flatten` cannot have written raises ValueError."""
    if depth > MOST_NESTED:
        raise ValueError(f"nested deeper than {MOST_NESTED}")
    if not isinstance(node, dict) or len(node) != 1:
        raise ValueError(f"a {type(node).__name__} where a node belongs")
    ((kind, content),) = node.items()
    if kind == "value" and (content is None or isinstance(content, (bool, int, float, str))):
        return content
    if kind == "tensor" and isinstance(content, str) and content in tensors:
        return tensors[content]
    if kind == "pairs" and isinstance(content, list):
        return dict(_pair(pair, tensors, depth) for pair in content)
    if kind in ("list", "tuple") and isinstance(content, list):
        items = [unflatten(item, tensors, depth + 1) for item in content]
        return tuple(items) if kind == "tuple" else items
    raise ValueError(f"a node {kind[:20]!r} that holds a {type(content).__name__}")


def _pair(pair: Any, tensors: Mapping[str, Tensor], depth: int) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], (str, int, float, type(None))):
        raise ValueError(f"a {type(pair).__name__} where a key and its value belong")
    return pair[0], unflatten(pair[1], tensors, depth + 1)


def checksum(tensors: Mapping[str, Tensor], structure: str, version: str = FORMAT) -> int:
    """CRC-32 over all tensors, names, types and shapes as well as bytes, in the order of their names."""
    crc = zlib.crc32(structure.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        mark = name if version == OLDER else f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(mark.encode(), crc))
    return crc


# ---------------------------------------------------------------------------------------------------- random state


def rng_state() -> dict[str, Any]:
    """torch's own generators (dropout uses them; GFT's numbers need only its seed and step)."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


# ---------------------------------------------------------------------------------------------------- save and load


def save_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
                    scheduler: Any = None, **extra: Any) -> Path:
    """Write model, optimizer, scheduler, random state and `extra` (step, data position, …) to one file, atomically."""
    content = {
        "model": dict(model.state_dict()),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "rng": rng_state(),
        "extra": extra,
    }
    tensors: dict[str, Tensor] = {}
    structure = {key: flatten(value, key, tensors) for key, value in content.items()}
    # Copies of what shares memory (tied weights): safetensors stores each tensor by itself.
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in seen and tensor.numel():
            tensors[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    text = json.dumps(structure)
    metadata = {"format": FORMAT, "structure": text, "crc32": str(checksum(tensors, text))}
    with written_atomically(path) as unfinished:
        save_file(tensors, unfinished, metadata)
    return Path(path)


def read_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The content of a checkpoint, checked from end to end: model and extra are dicts, the model's of tensors by name."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; give the file that save_checkpoint wrote")
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:  # type: ignore[attr-defined]
            metadata = file.metadata() or {}
            # Copies: the library's tensors are the file itself, mapped into memory. What another program writes into it
            # later would change a run, and to shorten it would end the process.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut short ({one_line(error)}); restore it from a copy, or start the "
                              "run anew in another folder") from error
    version, text = metadata.get("format"), metadata.get("structure", "")
    if version not in (FORMAT, OLDER):
        raise CheckpointError(f"{path} is a safetensors file but not a checkpoint of gft; load it with "
                              "safetensors.torch.load_file")
    if str(checksum(tensors, text, version)) != metadata.get("crc32"):
        raise CheckpointError(f"{path} is damaged (its checksum does not match); restore it from a copy, or start the "
                              "run anew in another folder")
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    try:
        return _content(text, tensors)
    except (ValueError, RecursionError) as error:  # of json, too: a number of 5,000 digits, a thousand brackets
        raise CheckpointError(f"{path} is not as save_checkpoint writes it ({one_line(error)}); restore it from a "
                              "copy") from error


def _content(text: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a checkpoint's structure says. Raises ValueError for what `save_checkpoint` cannot have written."""
    structure = json.loads(text)
    if not isinstance(structure, dict) or set(structure) != set(PARTS):
        raise ValueError(f"it has not the parts {', '.join(PARTS)}")
    content = {key: unflatten(node, tensors) for key, node in structure.items()}
    for key, kind in (("model", dict), ("optimizer", (dict, type(None))), ("scheduler", (dict, type(None))), ("rng", dict),
                      ("extra", dict)):
        if not isinstance(content[key], kind):
            raise ValueError(f"its {key} is a {type(content[key]).__name__}")
    for key in ("model", "extra"):
        if not all(isinstance(name, str) for name in content[key]):
            raise ValueError(f"its {key} has a key that is no name")
    return content


def _check_fits(path: str | Path, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse another model's checkpoint before the first tensor is copied. How a weight is stored (`_extra_state`), and
    gains that older files lack, are for the layers themselves to read."""
    own = model.state_dict()
    for name in sorted(own.keys() ^ state.keys()):
        if not (name in own and name.endswith("log_gain")):
            raise CheckpointError(f"{path} is of another model: {one_line(name)} is only in the "
                                  f"{'model' if name in own else 'file'}")
    for name in own.keys() & state.keys():
        mine, stored = shortened(own[name]), shortened(state[name])
        if mine != stored and not name.endswith(("_extra_state", "log_gain")):
            raise CheckpointError(f"{path} is of another model: {name} is {stored} in the file and {mine} in the model")
    for name, layer in quantized_layers(model).items():
        check_state(layer, state, f"{name}." if name else "")


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
                    scheduler: Any = None) -> dict[str, Any]:
    """Restore what `save_checkpoint` wrote, in place; returns `extra`. Nothing is changed if the file is damaged, or if a
    part of it fits not: model, optimizer, scheduler and random generators are all asked first.

    With an optimizer torch's random generators are restored, too, so that training goes on as if it had never stopped.
    Without one, as for an evaluation, they stay as they are.
    """
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise UsageError("this model's weights are shared out over ranks, and the file holds whole tensors; load it before "
                         "fully_shard, or use torch.distributed.checkpoint (docs/scaling.md)")
    content = read_checkpoint(path)
    for key, target in (("optimizer", optimizer), ("scheduler", scheduler)):
        if target is not None and content[key] is None:
            raise CheckpointError(f"{path} holds no {key} state; load it without one")
    _check_fits(path, model, content["model"])
    if optimizer is not None:
        check_optimizer(optimizer, content["optimizer"])
        check_generators(content["rng"])
    if scheduler is not None:
        check_scheduler(scheduler, content["scheduler"])
    model.load_state_dict(content["model"])
    if optimizer is not None:
        optimizer.load_state_dict(content["optimizer"])
        set_rng_state(content["rng"])
    if scheduler is not None:
        scheduler.load_state_dict(content["scheduler"])
    return content["extra"]
