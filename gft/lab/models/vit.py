"""The paper's vision transformer: width 512, depth 12, MLP 2048, with a class token and learned positions."""

import math

import torch
from torch import Tensor, nn

from gft.errors import UsageError
from gft.lab.models.transformer import Block

POSITIONS = ("random", "waves")
# About as large as what the patches themselves come to: with the usual 0.02 the network first has to find out where
# anything is (docs/lab-notes.md).
POSITIONS_RMS = 0.5


class ViT(nn.Module):
    """(batch, channels, size, size) -> (batch, classes).

    The paper's "ViT-Lx16" has 37,869,578 parameters on 28×28 with patch 4, and 38,329,866 on 224×224 with patch 16; its
    quantized layers have no bias (`gft.quantize_(..., bias=False)`).

    positions: what the learned positions start as, "random" or "waves" (`waves`).
    """

    def __init__(self, shape: tuple[int, ...],  # (channels, size, size) of an image
                 classes: int, patch: int = 16, width: int = 512, depth: int = 12, heads: int = 8, dropout: float = 0.0,
                 positions: str = "random") -> None:
        super().__init__()
        channels, size, _ = shape
        if size % patch:
            raise UsageError(f"patch={patch} does not divide the image size {size}; choose one that does")
        if positions not in POSITIONS:
            raise UsageError(f"positions={positions!r}: choose one of {', '.join(POSITIONS)}")
        self.side = side = size // patch
        patches = side**2
        self.seen_in_training = patches
        self.patches = nn.Linear(channels * patch**2, width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        start = torch.randn(1, patches + 1, width) * POSITIONS_RMS
        if positions == "waves":
            start[:, 1:] = waves(side, width)
        self.positions = nn.Parameter(start)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, True, False, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.patches:  # they keep torch's own start
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.head.weight)  # every class equally likely at first

    def drop_patches(self, share: float) -> None:
        """From now on training leaves out this share of an image's patches, other ones each time; at 0 none (PatchDropout,
        Liu et al. 2022). A step costs that much less, and many cheap steps teach more than few dear ones where images are
        few. The last steps should leave none out, so that they see images as evaluation does."""
        self.seen_in_training = max(1, round(self.side**2 * (1 - share)))

    @property
    def sees_whole_images(self) -> bool:
        return self.seen_in_training == self.side**2

    def forward(self, images: Tensor) -> Tensor:
        cut, places = in_patches(images, self.side), self.positions[0, 1:]
        if self.training and self.seen_in_training < len(places):
            seen = some_of(len(places), self.seen_in_training, images)
            image = torch.arange(len(images), device=images.device)[:, None]
            x, places = cut[image, seen // self.side, seen % self.side], places[seen]  # the others are not even read
        else:
            x = cut.flatten(1, 2)
        x = self.patches(x.flatten(2)) + places
        first = self.class_token + self.positions[:, :1]
        x = self.dropout(torch.cat([first.expand(len(x), -1, -1), x], 1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def in_patches(images: Tensor,  # (batch, channels, size, size)
               side: int) -> Tensor:  # (batch, side, side, channels, patch, patch)
    """The same memory, seen as patches."""
    return images.unflatten(3, (side, -1)).unflatten(2, (side, -1)).permute(0, 2, 4, 1, 3, 5)


def some_of(patches: int, count: int, images: Tensor) -> Tensor:  # (batch, count) int64
    """Which patches of each image are seen, chosen at random."""
    return torch.rand(len(images), patches, device=images.device).argsort(1)[:, :count]


def waves(side: int, width: int) -> Tensor:  # (side², width)
    """Sines and cosines of a patch's column and row, of wavelengths from 2π to 20,000π patches (Beyer et al. 2022).

    Neighbours look alike from the start, so that few images need not teach where the patches are.
    """
    if width % 4:
        raise UsageError(f"positions=waves needs a width that 4 divides, not {width}; choose another, or positions=random")
    speed = 10000 ** -torch.linspace(0, 1, width // 4)
    angle = torch.arange(side)[:, None] * speed  # (side, width / 4)
    along = torch.cat([angle.sin(), angle.cos()], 1)  # (side, width / 2)
    return POSITIONS_RMS * math.sqrt(2) * torch.cat([along.repeat(side, 1), along.repeat_interleave(side, 0)], 1)
