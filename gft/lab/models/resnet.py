"""A ResNet for small images: a 3×3 stem, four stages of basic blocks, as in He et al. 2015 for CIFAR but wider."""

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """x + conv(relu(conv(x))), each convolution followed by batch norm; a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 at width 64 and two blocks a stage: 64 to 512 channels, 11 million weights in its blocks."""

    def __init__(self, channels: int = 3, classes: int = 10, width: int = 64, blocks: int = 2, stages: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        inputs, body = width, []
        for stage in range(stages):
            for block in range(blocks):
                outputs = width << stage
                body.append(BasicBlock(inputs, outputs, 2 if stage and not block else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*body)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))
