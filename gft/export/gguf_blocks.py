"""Integer weights as the blocks of a GGUF file: which formats there are, and how each lays out its bytes.

A block is a run of a row's columns that share one float16 scale d, and stands for the weights q · d. llama.cpp's own
quantizers look for q and d in float weights; here both are known, so the levels are written as they are:

    TQ2_0   ternary, 2 bits each       256 columns, 66 bytes    2.06 bits a weight
    TQ1_0   ternary, five in a byte    256 columns, 54 bytes    1.69
    Q2_0    ternary, 2 bits each        64 columns, 18 bytes    2.25
    Q4_0    -8..7                       32 columns, 18 bytes    4.5
    Q8_0    -128..127                   32 columns, 34 bytes    8.5
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gft.storage import pack_fields

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    """A type of tensor in a GGUF file.

    number: what the file calls it (enum ggml_type in ggml.h). The gguf package need not know it; its 0.19 has no
        Q2_0 yet.
    columns, bytes: of one block; floats are blocks of one.
    largest: levels from -largest to largest fit; 0 for floats, which take any.
    file_type: what a file is called whose weights are mostly of this type (general.file_type).
    codes: (blocks, columns) int8 levels -> (blocks, bytes - 2) their bytes, without d; None for floats.
    scale_last: d follows the levels instead of leading them.
    """

    name: str
    number: int
    columns: int
    bytes: int
    largest: int = 0
    file_type: int = 0
    codes: Callable[[Tensor], Tensor] | None = None
    scale_last: bool = False

    @property
    def is_float(self) -> bool:
        return self.codes is None

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return int(np.prod(shape)) // self.columns * self.bytes

    def encode(self, levels: Tensor,  # (rows, columns) int8
               scales: Tensor) -> Bytes:  # (rows, blocks) float32
        """The bytes of levels · scales. Nothing is rounded, if the scales are float16 numbers."""
        assert self.codes is not None
        d = scales.to(torch.float16).reshape(-1, 1).view(torch.uint8)
        codes = self.codes(levels.reshape(-1, self.columns))
        return torch.cat((codes, d) if self.scale_last else (d, codes), 1).numpy()


def two_bits_apart(blocks: Tensor) -> Tensor:
    """Bits 2l and 2l + 1 of byte m of each 32 hold column 32 l + m of 128."""
    codes = (blocks + 1).to(torch.uint8).view(len(blocks), -1, 4, 32)
    return (codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6).flatten(1)


def base_three(blocks: Tensor) -> Tensor:
    """Five digits of base 3 in a byte, as the fraction 0.d1 d2 d3 d4 d5 of 256, rounded up: multiplying by 3 then brings
    one digit after the other above the point. 160 columns lie in 32 bytes, 80 in 16, the last 16, four to a byte, in 4."""
    digits = (blocks + 1).to(torch.int16)
    packed = []
    for start, count, width in ((0, 5, 32), (160, 5, 16), (240, 4, 4)):
        part = digits[:, start : start + count * width].reshape(len(blocks), count, width)
        number = torch.zeros(len(blocks), width, dtype=torch.int32)
        for place in range(5):
            number = number * 3 + (part[:, place] if place < count else 0)
        packed.append((number * 256 + 242) // 243)
    return torch.cat(packed, 1).to(torch.uint8)


def two_bits(blocks: Tensor) -> Tensor:
    """Four neighbours in a byte, the first lowest."""
    return pack_fields(blocks, 2, 1)


def nibbles(blocks: Tensor) -> Tensor:
    """Column m in the low half of byte m, column 16 + m in the high half."""
    codes = (blocks + 8).to(torch.uint8)
    return codes[:, :16] | codes[:, 16:] << 4


def whole_bytes(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.uint8)


FORMATS = {each.name: each for each in (
    Format("F32", 0, 1, 4),
    Format("F16", 1, 1, 2),
    Format("BF16", 30, 1, 2),
    Format("TQ2_0", 35, 256, 66, 1, 37, two_bits_apart, scale_last=True),
    Format("TQ1_0", 34, 256, 54, 1, 36, base_three, scale_last=True),
    Format("Q2_0", 42, 64, 18, 1, 41, two_bits),
    Format("Q4_0", 2, 32, 18, 7, 2, nibbles),
    Format("Q8_0", 8, 32, 34, 127, 7, whole_bytes),
)}
TERNARY = ("TQ2_0", "TQ1_0", "Q2_0")
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def as_float(tensor: Tensor, name: str) -> NDArray[np.generic]:
    """A float tensor in the type "F32", "F16" or "BF16", which numpy does not know and takes as 16 bits."""
    tensor = tensor.detach().to("cpu", FLOATS[name]).contiguous()
    return (tensor.view(torch.int16) if name == "BF16" else tensor).numpy()
