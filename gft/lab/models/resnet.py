"""Residual networks of convolutions (He et al. 2015): a stem, four stages of blocks, a linear head.

    ResNet()                                                                             ResNet-18, for images of 32×32
    ResNet(classes=1000, blocks=(3, 4, 6, 3), block=Bottleneck, stem=large_image_stem)   ResNet-50, for 224×224
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 64  # pixels a side, from which on a stem makes images smaller
STAGES = 4


def channels_last(x: Tensor) -> Tensor:
    """On a GPU images in the order in which tensor cores multiply them, which layers after it keep to. Weights stay as they
    are, so that checkpoints and the optimizers' state do."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


def normed(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image's size but for the stride, and batch norm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """x + conv(relu(conv(x))), each convolution followed by batch norm; a 1×1 convolution where the shape changes."""

    expansion = 1  # outputs for each channel inside

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        changes = stride != 1 or inputs != width
        self.shortcut = normed(inputs, width, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """x + a 3×3 convolution between two of 1×1, which make the channels a quarter of the block's outputs for it."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.narrow = normed(inputs, width, 1)
        self.middle = normed(width, width, 3, stride)
        self.widen = normed(width, outputs, 1)
        changes = stride != 1 or inputs != outputs
        self.shortcut = normed(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.middle(F.relu(self.narrow(x))))
        return F.relu(self.widen(y) + self.shortcut(x))


def small_image_stem(channels: int, width: int) -> nn.Sequential:
    """For 32×32: keeps the image's size."""
    return nn.Sequential(*normed(channels, width, 3), nn.ReLU())


def large_image_stem(channels: int, width: int) -> nn.Sequential:
    """For 224×224: makes each side a quarter."""
    return nn.Sequential(*normed(channels, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))


class ResNet(nn.Module):
    """By default ResNet-18: two blocks a stage, 64 to 512 channels, 11 million weights in its blocks."""

    def __init__(self, channels: int = 3, classes: int = 10,
                 width: int = 64,  # of the first stage; each next has twice as many channels
                 blocks: Sequence[int] = (2, 2, 2, 2),  # of each stage
                 block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
                 stem: Callable[[int, int], nn.Module] = small_image_stem) -> None:
        super().__init__()
        self.stem = stem(channels, width)
        inputs, body = width, []
        for stage, count in enumerate(blocks):
            for number in range(count):
                body.append(block(inputs, width << stage, 2 if stage and not number else 1))
                inputs = block.expansion * (width << stage)
        self.blocks = nn.Sequential(*body)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(channels_last(self.stem(channels_last(x)))).mean((2, 3)))


def resnet_for(shape: tuple[int, ...],  # (channels, size, size) of an image
               classes: int, width: int = 64,
               depth: int = 2) -> ResNet:  # blocks a stage
    """The ResNet of four stages for images of some size; with the defaults ResNet-18."""
    channels, *sides = shape
    stem = large_image_stem if min(sides) >= LARGE else small_image_stem
    return ResNet(channels, classes, width, [depth] * STAGES, stem=stem)
