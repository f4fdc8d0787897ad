"""Damage, by chance: of nests of dicts and lists, of tensors, of safetensors files and of plain bytes.

Everything is drawn from one random.Random, so that a number tells an input again.
"""

import copy
import json
import math
from random import Random
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
          torch.bool]


def deep(levels: int) -> Any:
    nest: Any = 1
    for level in range(levels):
        nest = [nest] if level % 2 else {"list": [nest]}
    return nest


# JSON has all of them (but not every reader): sizes that overflow, names that mean something, depth.
STRANGE: list[Any] = [None, True, False, 0, -1, 1, 2, 255, 2**31, 2**32, 2**63, 2**70, -2**63, 10**400, 0.5, -0.0, 1e-320,
                      1e308, math.nan, math.inf, -math.inf, "", "a", "lr", "tensor", "value", "pairs", "list", "__class__",
                      "optimizer", "step", "\x00", "é\n. " * 60, [], {}, [[]], [1, 2, 3], {"value": 1}, {"tensor": "x"},
                      {"list": []}, {"pairs": [[1]]}, deep(40), deep(110)]


def places(nest: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a nest."""
    found, waiting = [], [nest]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one))
        for key in keys:
            found.append((one, key))
            if isinstance(one[key], (dict, list)):
                waiting.append(one[key])
    return found


def grafted(random: Random, everywhere: list[tuple[Any, Any]]) -> Any:
    """A copy of some part of the nest: the part itself might come to lie inside of itself."""
    container, key = random.choice(everywhere)
    return copy.deepcopy(container[key])


def damaged_nest(nest: Any, random: Random, strange: list[Any] | None = None) -> Any:
    """A nest, changed in place in one to three places."""
    nest = [nest]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        everywhere = places(nest)
        container, key = random.choice(everywhere)
        value = container[key]
        kind = random.randrange(9)
        if kind == 0:
            # A copy: the next change may be to what is put here now, and would be found in all inputs after it.
            container[key] = copy.deepcopy(random.choice(STRANGE if strange is None else strange))
        elif kind == 1 and container is not nest:
            del container[key]
        elif kind == 2 and isinstance(container, list):
            container.insert(key, grafted(random, everywhere))
        elif kind == 3 and isinstance(container, dict):
            name = random.choice(("", "x", "name", "value", key + "x" if isinstance(key, str) else 7))
            container[name] = container.pop(key)
        elif kind == 4:
            other, place = random.choice(everywhere)
            container[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(value)
        elif kind == 5:
            container[key] = random.choice(([value], {"list": [value]}, {"a": value}, [value, value]))
        elif kind == 6 and isinstance(value, (int, float)):
            near = value if abs(value) < 1e300 else 1
            container[key] = random.choice((value + 1, -value, value * 2, float(near), str(value), near * 1e6))
        elif kind == 7 and isinstance(value, str):
            container[key] = random.choice((value[1:], value * 2, value.upper(), value + "\n", 1))
        else:
            container[key] = grafted(random, everywhere)
    return nest[0] if nest else None


def damaged_tensor(tensor: Tensor, random: Random) -> Tensor:
    """A tensor of another type, shape or content."""
    kind = random.randrange(8)
    if kind == 0:
        return tensor.to(random.choice(DTYPES))
    if kind == 1:
        return tensor.reshape(-1)
    if kind == 2:
        return tensor[None]
    if kind == 3:
        return tensor.reshape(-1)[: random.randrange(tensor.numel() + 1)]
    if kind == 4:
        return torch.cat([tensor.reshape(-1)] * 2)
    if kind == 5:
        return torch.zeros([random.choice((0, 1, 2, 5, 33)) for _ in range(random.randrange(4))], dtype=tensor.dtype)
    flat = tensor.clone().reshape(-1)
    if kind == 6 and flat.is_floating_point() and flat.numel():
        flat[random.randrange(len(flat))] = random.choice((math.nan, math.inf, -math.inf, -1.0, 0.0, 3e38, 1e-45))
    elif flat.numel():
        place = random.randrange(flat.view(torch.uint8).numel())
        flat.view(torch.uint8)[place] = random.randrange(2 if flat.dtype is torch.bool else 256)
    return flat.reshape(tensor.shape)


def damaged_bytes(data: bytes, random: Random) -> bytes:
    """Bytes with some flipped, cut off, put in or doubled."""
    new = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        # In the beginning, too, where sizes and names are.
        place = random.randrange(max(1, min(len(new), random.choice((9, 200, 10**9)))))
        kind = random.randrange(5)
        if kind == 0 and new:
            new[place] ^= 1 << random.randrange(8)
        elif kind == 1:
            del new[place:]
        elif kind == 2:
            new[place:place] = bytes(random.randrange(256) for _ in range(random.randrange(9)))
        elif kind == 3:
            del new[place : place + random.randrange(9)]
        else:
            new += new[place : place + 50]
    return bytes(new)


def damaged_header(data: bytes, random: Random) -> bytes:
    """A safetensors file whose header is other JSON than it was."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(damaged_nest(json.loads(data[8 : 8 + size]), random)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def safetensors_of(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
