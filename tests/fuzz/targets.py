"""What is fed with damaged inputs, and what must hold of it: it takes them, or refuses them in one sentence and has changed
nothing. Each target is a class with `damaged(random)`, an input, `feed(input)`, and `valid`, the files damage begins with.
"""

import copy
import json
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from mutations import damaged_bytes, damaged_header, damaged_nest, damaged_tensor, safetensors_of
from torch import Tensor, nn

import gft
from gft.checkpoint import FORMAT, checksum, flatten, read_checkpoint
from gft.errors import UsageError

MEMORY = Path("/dev/shm")
STRANGE_OBJECTS: list[Any] = [None, True, 0, -1, 1.5, float("nan"), "a", [], {}, (), [[]], {"a": 1}, 2**70, b"x", object(),
                              torch.zeros(3), torch.zeros(()), torch.full((2, 2), torch.nan), torch.zeros(0),
                              torch.tensor(-5), torch.tensor(True), torch.zeros(3, device="meta"),
                              torch.zeros(24).to_sparse()]


class Broken(AssertionError):
    """What must not happen."""


def refuses(act: Callable[[], Any]) -> bool:
    """Was it refused? Then in one sentence of our own; any other error is for the caller to see."""
    try:
        act()
    except UsageError as error:
        message = str(error)
        if "\n" in message or ". " in message or len(message) > 500 or not message:
            raise Broken(f"not one sentence: {message!r}") from error
        return True
    return False


class Run:
    """A small model with layers of several kinds, its optimizers, and its schedule."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(gft.QuantLinear(6, 8, 3, gain=True), nn.Tanh(),
                                   gft.QuantLinear(8, 7, 2, memory=False, scales="row"), nn.Linear(7, 4, bias=False))
        self.optimizer = gft.Hybrid(gft.GFT(gft.quantized(self.model), lr=0.2, seed=3),
                                    torch.optim.AdamW(gft.dense(self.model), lr=1e-2))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 6)).square().sum().backward()
        self.optimizer.step()
        # The schedule takes none: torch's divides by whatever number a file says.

    def state(self) -> list[Any]:
        return [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict(), torch.get_rng_state()]


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, NaN and all."""
    if isinstance(one, Tensor):
        alike = isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and (torch.equal(one, other) or one.tolist().__repr__() == other.tolist().__repr__())
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


class Checkpoint:
    """load_checkpoint of a file: its structure, its tensors, its header or its bytes are not as they were."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.path, whole = (Path(self.folder.name) / name for name in ("damaged.safetensors", "whole.safetensors"))
        self.run = Run()
        self.run.step()
        gft.save_checkpoint(whole, self.run.model, self.run.optimizer, self.run.scheduler, step=1, text=["a", {"b": 2.5}])
        self.data, self.whole = whole.read_bytes(), whole
        self.valid = [self.data]
        content = read_checkpoint(whole)
        self.tensors: dict[str, Tensor] = {}
        self.text = json.dumps({key: flatten(value, key, self.tensors) for key, value in content.items()})
        self.summed = b"".join(_summed(name, self.tensors[name]) for name in sorted(self.tensors))
        size = int.from_bytes(self.data[:8], "little")
        self.header, self.rest = json.loads(self.data[8 : 8 + size]), self.data[8 + size :]
        self.before = copy.deepcopy(self.run.state())

    def with_structure(self, text: str) -> bytes:
        """The same file with another structure and a right checksum: else nothing behind it would be reached."""
        metadata = {"format": FORMAT, "structure": text, "crc32": str(zlib.crc32(self.summed, zlib.crc32(text.encode())))}
        header = json.dumps({**self.header, "__metadata__": metadata}).encode()
        return len(header).to_bytes(8, "little") + header + self.rest

    def damaged(self, random: Random) -> bytes:
        kind = random.random()
        if kind < 0.1:
            return damaged_bytes(self.data, random)
        if kind < 0.25:
            return damaged_header(self.data, random)
        if kind < 0.4:
            tensors = dict(self.tensors)
            for name in random.sample(sorted(tensors), random.choice((1, 1, 2))):
                tensors[name] = damaged_tensor(tensors[name], random)
            crc = str(checksum(tensors, self.text))
            return safetensors_of(tensors, {"format": FORMAT, "structure": self.text, "crc32": crc})
        if kind < 0.45:
            place = random.randrange(len(self.text))
            put_in = random.choice(("[" * 9999, '{"list":[' * 9999, "9" * 5000, "\x00", '"'))
            return self.with_structure(self.text[:place] + put_in + self.text[place:])
        return self.with_structure(json.dumps(damaged_nest(json.loads(self.text), random)))

    def feed(self, data: bytes) -> bool:
        run = self.run
        self.path.write_bytes(data)
        refused = refuses(lambda: gft.load_checkpoint(self.path, run.model, run.optimizer, run.scheduler))
        if refused:
            if not same(run.state(), self.before):
                raise Broken("it was refused, and something has changed")
        elif data != self.data:
            refuses(run.step)  # values may be nonsense, but nothing else breaks
            self.run = Run()  # as it was, without what a schedule may have taken over beyond its own
            gft.load_checkpoint(self.whole, self.run.model, self.run.optimizer, self.run.scheduler)
        return refused


def _summed(name: str, tensor: Tensor) -> bytes:
    """What the checksum is taken over of a tensor."""
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


class Safetensors(Checkpoint):
    """read_checkpoint, to which a file is bytes at first."""

    def damaged(self, random: Random) -> bytes:
        return damaged_bytes(self.data, random) if random.random() < 0.5 else damaged_header(self.data, random)

    def feed(self, data: bytes) -> bool:
        self.path.write_bytes(data)
        return refuses(lambda: read_checkpoint(self.path))


class State:
    """Hybrid.load_state_dict, and with it GFT's and AdamW's, of a nest that holds anything."""

    valid: tuple[bytes, ...] = ()  # no file, so none of bytes

    def __init__(self) -> None:
        self.run = Run()
        self.run.step()
        self.good = copy.deepcopy(self.run.optimizer.state_dict())
        self.before = copy.deepcopy(self.run.state())

    def damaged(self, random: Random) -> Any:
        nest = copy.deepcopy(self.good)
        if random.random() < 0.4:
            part = random.choice(nest["optimizers"])["state"]
            state = part[random.choice(sorted(part))]
            name = random.choice(sorted(name for name in state if isinstance(state[name], Tensor)))
            state[name] = damaged_tensor(state[name], random)
            return nest
        return damaged_nest(nest, random, STRANGE_OBJECTS)

    def feed(self, state: Any) -> bool:
        run = self.run
        refused = refuses(lambda: run.optimizer.load_state_dict(state))
        if refused:
            if not same(run.state(), self.before):
                raise Broken("it was refused, and something has changed")
        else:
            refuses(run.step)
            self.run = Run()
            self.run.model.load_state_dict(self.before[0])
            self.run.optimizer.load_state_dict(self.good)
            self.run.scheduler.load_state_dict(copy.deepcopy(self.before[2]))
        return refused


class Config:
    """config.json of a run folder, as `gft eval` reads it."""

    def __init__(self) -> None:
        from gft.lab.recipes import RECIPES

        self.folder = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.path = Path(self.folder.name) / "config.json"
        self.texts = [json.dumps({**recipe.config(), "seed": 1}) for recipe in list(RECIPES.values())[::5]]
        self.valid = [text.encode() for text in self.texts]

    def damaged(self, random: Random) -> bytes:
        text = random.choice(self.texts)
        if random.random() < 0.3:
            return damaged_bytes(text.encode(), random)
        return json.dumps(damaged_nest(json.loads(text), random)).encode()

    def feed(self, data: bytes) -> bool:
        from gft.lab.train import recipe_of

        self.path.write_bytes(data)
        return refuses(lambda: recipe_of(self.path.parent))


TARGETS: dict[str, Callable[[], Any]] = {"checkpoint": Checkpoint, "safetensors": Safetensors, "state": State,
                                          "config": Config}


def quiet() -> None:
    """Numbers without sense make torch and gft warn, rightly."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
