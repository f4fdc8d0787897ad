"""Which layers add to a residual stream, and how many branches do, as the model's structure tells.

    x = x + out(attention(q(n), k(n), v(n)))     n = norm(x)      q, k, v read the stream, out adds to it
    x = x + down(silu(gate(m)) · up(m))          m = norm(x)      gate, up read it, down adds to it

What B branches add to the stream adds up: at first all their moves follow one and the same gradient, so in a step the
stream moves B times as far as by one of them. Layers that read it are not so: what they change passes through the layer that
adds. So beyond 12 branches, layers that add take their moves by 12/B (rules/rounding.py); fewer need no slowing.

Nothing in a module says that its output is added to something. What is taken for a stream is a list of at least two like
blocks with norms in them, as every implementation of a transformer has it. The stream is as wide as what a block's first
matrix reads, and the matrices that give as much out add to it. Of attention's q, k, v and out several may both read and give
it: of these the last adds, and none in a part of a block where another layer gives as much out of something else.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from gft.layers.layer import QuantLayer
from gft.layers.linear import QuantLinear
from gft.layers.twins import is_transposed_linear


class Matrix(NamedTuple):
    """A linear layer, float or integer, by its place in a model."""

    name: str
    inputs: int
    outputs: int


class Place(NamedTuple):
    """blocks.3.attention.out, seen from the list "blocks"."""

    stack: str  # blocks
    block: str  # 3
    inside: str  # attention.out


def count_branches(model: nn.Module) -> dict[str, int]:
    """Name -> how many branches add to the stream that this linear layer adds to; of layers that add to none nothing."""
    matrices = list(_matrices(model))
    found: dict[str, int] = {}
    normed = {place[:2] for name, module in model.named_modules() if is_norm(module) for place in _places(name)}
    for blocks in _stacks(matrices, normed):
        adding = [_adding(block) for block in blocks]
        branches = sum(len(set(parts.values())) for parts in adding)
        found |= {name: branches for parts in adding for name in parts}
    return found


def tell_branches(model: nn.Module) -> None:
    """Tell the integer layers of a whole model, where nobody has told them otherwise."""
    branches = count_branches(model)
    for name, module in model.named_modules():
        if isinstance(module, QuantLayer) and module.branches is None:
            module.branches = branches.get(name)


def is_norm(module: nn.Module) -> bool:
    """A normalisation layer, torch's own or another's (LayerNorm, BatchNorm2d, LlamaRMSNorm)? The word "norm" must end or be
    followed by another word: Normalize prepares images."""
    return re.search(r"[Nn]orm(?![a-z])", type(module).__name__) is not None


def _matrices(model: nn.Module) -> Iterator[Matrix]:
    module: Any
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, QuantLinear)):
            yield Matrix(name, module.in_features, module.out_features)
        elif is_transposed_linear(module):  # (inputs, outputs)
            yield Matrix(name, *module.weight.shape)


def _places(name: str) -> Iterator[Place]:
    """All lists in which a layer lies, the outermost first."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdecimal():
            yield Place(".".join(parts[:at]), part, ".".join(parts[at + 1 :]))


def _stacks(matrices: list[Matrix], normed: set[tuple[str, ...]]) -> Iterator[list[list[Matrix]]]:
    """The lists of like blocks, each as its blocks' matrices. A layer belongs to the outermost list in which at least two
    blocks are alike; blocks are of several matrices and, as (stack, block), among those with a norm."""
    by_stack: dict[str, dict[str, list[tuple[str, Matrix]]]] = {}
    for matrix in matrices:
        for place in _places(matrix.name):
            by_stack.setdefault(place.stack, {}).setdefault(place.block, []).append((place.inside, matrix))
    taken: list[str] = []
    for stack in sorted(by_stack, key=lambda name: name.count(".") if name else -1):
        blocks = [block for number, block in by_stack[stack].items() if len(block) > 1 and (stack, number) in normed]
        kinds = Counter(tuple((inside, matrix.inputs, matrix.outputs) for inside, matrix in block) for block in blocks)
        inner = any(stack == outer or stack.startswith(f"{outer}.") or not outer for outer in taken)
        if not inner and any(count > 1 for count in kinds.values()):
            taken.append(stack)
            yield [[matrix for _, matrix in block] for block in blocks]


def _adding(block: list[Matrix]) -> dict[str, str]:
    """The layers of a block that add to the stream, each with its branch: the part of the block that it ends (experts end
    one together), or its own name where it is in none."""
    prefix = _common_prefix([matrix.name for matrix in block])
    width = block[0].inputs
    giving = [(matrix, _part(matrix.name, prefix)) for matrix in block if matrix.outputs == width]
    ended = {part for matrix, part in giving if part and matrix.inputs != width}
    last = {part: matrix.name for matrix, part in giving if matrix.inputs == width}
    return {matrix.name: part or matrix.name for matrix, part in giving
            if matrix.inputs != width or (part not in ended and matrix.name == last[part])}


def _common_prefix(names: list[str]) -> int:
    """Of how many parts the name of the block is that all these layers lie in."""
    split = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(parts) > shared and parts[shared] == split[0][shared] for parts in split):
        shared += 1
    return shared


def _part(name: str, prefix: int) -> str:
    """blocks.3.attention.out -> attention; encoder.block.3.layer.0.SelfAttention.o -> layer.0; a layer of its own: ""."""
    inside = name.split(".")[prefix:]
    if len(inside) == 1:
        return ""
    return ".".join(inside[:2]) if inside[1].isdecimal() else inside[0]
