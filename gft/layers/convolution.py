"""QuantConv2d: nn.Conv2d with an integer weight."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from gft.errors import UsageError, UsageTypeError
from gft.layers.layer import QuantLayer, give_back, take_over
from gft.storage import Storage


class QuantConv2d(QuantLayer):
    """nn.Conv2d with an integer weight. The votes on a weight come from all positions of the image it is applied to.

    bits, memory, gain and scales are QuantLinear's. stride, padding ("same" and "valid" too), dilation, groups, bias and
    device are nn.Conv2d's, by name; padding is zeros.
    """

    # Im2col repeats each input kernel-size times; this many elements of it at once bound the scratch.
    UNFOLDED_AT_ONCE = 1 << 25

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int], bits: int = 4, *,
                 memory: bool = True, gain: bool = False, scales: str | int = "tensor", **conv: Any) -> None:
        if "dtype" in conv:
            raise UsageTypeError("QuantConv2d takes no dtype, its weight is integers; call .to(dtype) for its bias and gain")
        device, bias = conv.pop("device", None), conv.pop("bias", False)
        like = nn.Conv2d(in_channels, out_channels, kernel_size, device="meta", bias=bias, **conv)
        self._shape_like(like, Storage(bits, bool(memory)), gain=gain, scales=scales, device=device)
        self.start_("variance")

    def _shape_like(self, conv: nn.Conv2d, storage: Storage, **options: Any) -> None:
        if conv.padding_mode != "zeros":
            raise UsageError(f"padding_mode={conv.padding_mode!r}: QuantConv2d pads with zeros only; leave this layer out")
        super().__init__(tuple(conv.weight.shape), storage, bias=conv.bias is not None, **options)
        self.in_channels, self.out_channels, self.groups = conv.in_channels, conv.out_channels, conv.groups
        self.kernel_size, self.stride, self.dilation = conv.kernel_size, conv.stride, conv.dilation
        self.padding: tuple[int, ...] = (0, 0)
        if conv.padding == "same":
            spans = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            if any(span % 2 for span in spans):
                raise UsageError('padding="same" needs an odd kernel here; give the padding in numbers')
            self.padding = (spans[0] // 2, spans[1] // 2)
        elif not isinstance(conv.padding, str):
            self.padding = conv.padding

    @classmethod
    def from_float(cls, conv: nn.Conv2d, bits: int = 4, *, memory: bool = True, init: str = "keep",
                   gain: bool = False, scales: str | int = "tensor") -> "QuantConv2d":
        """The layer on the grid nearest to `conv`; its bias is taken over as it is."""
        layer = cls.__new__(cls)
        layer._shape_like(conv, Storage(bits, bool(memory)), gain=gain, scales=scales, device=conv.weight.device,
                          dtype=conv.weight.dtype)
        return take_over(layer, conv, init)

    def to_float(self) -> nn.Conv2d:
        """An nn.Conv2d with the float values used in forward."""
        conv = skip_init(nn.Conv2d, self.in_channels, self.out_channels, self.kernel_size, *self._geometry,
                         self.bias is not None, device=self.qweight.device, dtype=self.dtype)
        return give_back(self, conv)

    @property
    def _geometry(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.groups

    def product(self, x: Tensor, levels: Tensor, scale: float) -> Tensor:
        return F.conv2d(x, levels, None, *self._geometry) * scale

    def grad_input(self, grad_output: Tensor, levels: Tensor, scale: float, x_shape: torch.Size) -> Tensor:
        shape = x_shape if len(x_shape) == 4 else (1, *x_shape)
        grad_output = grad_output.view(-1, *grad_output.shape[-3:])
        return torch.nn.grad.conv2d_input(shape, levels, grad_output, *self._geometry).view(x_shape) * scale  # type: ignore[arg-type]

    @property
    def inputs(self) -> int:
        return self.in_channels

    @property
    def geometry(self) -> list[int]:
        return [*self.float_shape, *self.stride, *self.padding, *self.dilation, self.groups]

    def _output_shape(self, x: Tensor) -> torch.Size:
        sizes = zip(x.shape[-2:], self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        return torch.Size((*x.shape[:-3], self.rows, *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)))

    def features_last(self, x: Tensor, features: int) -> Tensor:
        return x.movedim(-3, -1).reshape(-1, features)

    def sequence_length(self, x_shape: torch.Size, y_shape: torch.Size) -> int:
        return y_shape[-2] * y_shape[-1]

    def vote_pieces(self, x: Tensor, x_shape: torch.Size, grad: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        images = x.reshape(-1, *x_shape[-2:], self.in_channels).permute(0, 3, 1, 2)
        positions = grad.shape[0] // len(images)
        at_once = max(1, self.UNFOLDED_AT_ONCE // (self.columns * self.groups * positions))
        columns, rows = self.columns, self.rows // self.groups
        for some, some_grad in zip(images.split(at_once), grad.split(at_once * positions), strict=True):
            patches = self._patches(some)
            for group in range(self.groups):
                out = slice(group * rows, (group + 1) * rows)
                yield out, patches[:, group * columns : (group + 1) * columns], some_grad[:, out]

    def _patches(self, images: Tensor) -> Tensor:
        """(n, channels, h, w) int8 -> (n · positions, channels · kernel) int8: what each output position looked at."""
        columns = F.unfold(images.float(), self.kernel_size, self.dilation, self.padding, self.stride)
        return columns.transpose(1, 2).reshape(-1, columns.shape[1]).to(torch.int8)

    def _shaped_bias(self) -> Tensor:
        assert self.bias is not None
        return self.bias.view(-1, 1, 1)

    def extra_repr(self) -> str:
        return (f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
                f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, {super().extra_repr()}")
