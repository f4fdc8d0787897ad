"""A plain convolutional network, as first ones on digits are: convolutions and pooling, a hidden linear layer, a head."""

from torch import Tensor, nn

from gft.errors import UsageError
from gft.lab.models.resnet import channels_last


class CNN(nn.Module):
    """(batch, channels, size, size) -> (batch, classes).

    `depth` times a 3×3 convolution, batch norm, ReLU and a pooling that halves each side, with `width` channels at first and
    twice as many after each; then a linear layer of four times `width`, batch norm, ReLU, and the head. `blocks` is all but
    the first convolution and the head.
    """

    def __init__(self, shape: tuple[int, ...],  # (channels, size, size) of an image
                 classes: int, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        channels, height, across = shape
        if min(height, across) >> depth < 1:
            raise UsageError(f"depth={depth} halves images of {height}×{across} to nothing; give at most "
                             f"{min(height, across).bit_length() - 1}")
        self.stem = pooled(channels, width)
        features = (width << (depth - 1)) * (height >> depth) * (across >> depth)
        self.blocks = nn.Sequential(*(pooled(width << stage, width << (stage + 1)) for stage in range(depth - 1)),
                                    nn.Flatten(), nn.Linear(features, 4 * width, bias=False), nn.BatchNorm1d(4 * width),
                                    nn.ReLU())
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(channels_last(self.stem(channels_last(x)))))


def pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
                         nn.MaxPool2d(2))
