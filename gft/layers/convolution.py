"""Convolutions with an integer weight, over one, two or three dimensions, and their transposes.

    votes of a convolution             q(grad_output)^T · patches(q(x))        (out, in · kernel)
    votes of a transposed convolution  q(x)^T · patches(q(grad_output))        (in, out · kernel)

A patch is what one position looked at (ops/windows.py).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_input, conv2d_input, conv3d_input
from torch.nn.utils import skip_init

from gft import ops
from gft.errors import UsageError, UsageTypeError
from gft.layers.layer import QuantLayer, give_back, take_over
from gft.product import convolve, memory_format_of
from gft.storage import Storage
from gft.votes import Seen


class QuantConvolution(QuantLayer):
    """What all convolutions share. The votes on a weight come from all positions of the image it is applied to."""

    float_type: ClassVar[type[Any]]  # the layer of torch that it stands for
    dims: ClassVar[int]  # along how many dimensions the kernel moves

    _last_window: tuple[tuple[int, ...], ops.Window] | None = None  # sizes of x, and how the kernel moved over it

    # Patches repeat each input kernel-size times; this many elements of them at once bound the scratch.
    UNFOLDED_AT_ONCE = 1 << 27
    UNFOLDS_BY_ROWS_ON = "cuda"  # whose kernel reads such patches as they are
    GROUPS_TOGETHER = 8  # so many groups or more (depthwise) are one batched product, fewer a product each

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | Sequence[int], bits: int = 4, *,
                 memory: bool | str = True, gain: bool = False, scales: str | int = "tensor", **conv: Any) -> None:
        if "dtype" in conv:
            raise UsageTypeError(f"{type(self).__name__} takes no dtype, its weight is integers; call .to(dtype) for its "
                                 "bias and gain")
        device, bias = conv.pop("device", None), conv.pop("bias", False)
        like = self.float_type(in_channels, out_channels, kernel_size, device="meta", bias=bias, **conv)
        self._shape_like(like, Storage.as_asked(bits, memory), gain=gain, scales=scales, device=device)
        self.start_("variance")

    def _shape_like(self, conv: Any, storage: Storage, **options: Any) -> None:
        QuantLayer.__init__(self, tuple(conv.weight.shape), storage, **options)
        self.in_channels, self.out_channels, self.groups = conv.in_channels, conv.out_channels, conv.groups
        self.kernel_size, self.stride, self.dilation = conv.kernel_size, conv.stride, conv.dilation
        self.padding: tuple[int, ...] = (0,) * self.dims
        if conv.bias is not None:
            self.bias = nn.Parameter(torch.zeros(conv.out_channels, device=self.qweight.device))

    @classmethod
    def from_float(cls, conv: Any, bits: int = 4, *, memory: bool | str = True, init: str = "keep", gain: bool = False,
                   scales: str | int = "tensor") -> Any:
        """The layer on the grid nearest to `conv`; its bias is taken over as it is."""
        layer = cls.__new__(cls)
        layer._shape_like(conv, Storage.as_asked(bits, memory), gain=gain, scales=scales, device=conv.weight.device,
                          dtype=conv.weight.dtype)
        return take_over(layer, conv, init)

    def to_float(self) -> Any:
        """torch's own layer, with the float values used in forward."""
        conv = skip_init(self.float_type, self.in_channels, self.out_channels, self.kernel_size, stride=self.stride,
                         dilation=self.dilation, groups=self.groups, bias=self.bias is not None,
                         device=self.qweight.device, dtype=self.dtype, **self._float_settings())
        return give_back(self, conv)

    def _float_settings(self) -> dict[str, Any]:
        """What torch's layer is built with besides."""
        raise NotImplementedError

    @property
    def output_padding(self) -> tuple[int, ...]:
        return (0,) * self.dims

    @property
    def inputs(self) -> int:
        return self.in_channels

    @property
    def geometry(self) -> list[int]:
        return [self.dims, int(self.transposed), *self.float_shape, *self.stride, *self.padding, *self.dilation,
                *self.output_padding, self.groups]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return convolve(x, weight.view(self.float_shape), self.geometry)

    def to_read(self, stored: Tensor, log_gain: Tensor | None, like: Tensor, places: int | None = None,
                of_grad: bool = False) -> ops.StoredWeight:
        if places is None:
            # In x's order: torch would else turn the weight round, or not see that grad_output is channels_last.
            places = 1 if memory_format_of(like) is torch.contiguous_format else math.prod(self.kernel_size)
        return super().to_read(stored, log_gain, like, places, of_grad)

    def shaped(self, weight: Tensor, like: Tensor) -> Tensor:
        if memory_format_of(like) is torch.contiguous_format:
            return weight.view(self.float_shape)
        rows, channels, *kernel = self.float_shape
        return weight.view(rows, *kernel, channels).movedim(-1, 1)

    def _positions_out(self, sizes: Sequence[int]) -> list[int]:
        """Sizes of x -> sizes of y, along the dimensions that the kernel moves."""
        raise NotImplementedError

    def features_last(self, x: Tensor, features: int) -> Tensor:
        return x.movedim(-self.dims - 1, -1).reshape(-1, x.shape[-self.dims - 1])

    def _window(self, x_shape: torch.Size) -> ops.Window:
        """How the kernel moves over what patches are taken of: x, or grad_output of a transposed convolution."""
        of_x = tuple(x_shape[-self.dims :])
        if self._last_window is None or self._last_window[0] != of_x:
            self._last_window = of_x, self._window_over(of_x)
        return self._last_window[1]

    def _window_over(self, of_x: tuple[int, ...]) -> ops.Window:
        of_y = tuple(self._positions_out(of_x))
        sizes, positions = (of_y, of_x) if self.transposed else (of_x, of_y)
        return ops.Window(sizes, positions, tuple(self.kernel_size), tuple(self.stride), tuple(self.padding),
                          tuple(self.dilation))

    def vote_pieces(self, x: Tensor, x_shape: torch.Size,
                    grad: Tensor) -> Iterator[tuple[slice, Seen, Tensor]]:
        window, columns, rows = self._window(x_shape), self.columns, self.rows // self.groups
        # What patches are taken of, and what meets them position by position.
        images, single = (grad, x) if self.transposed else (x, grad)
        together = self.groups >= self.GROUPS_TOGETHER
        depthwise, itself = together and columns == window.places, window.sees_one_place
        most = max(len(images) * images.shape[1] * window.places, 1) if itself else self.UNFOLDED_AT_ONCE
        by_rows = window.by_rows() if self.groups == 1 and images.device.type == self.UNFOLDS_BY_ROWS_ON else None
        fewer = window.places if depthwise else window.places // by_rows.places if by_rows is not None else 1
        for some, some_single in window.split(images, single, most * fewer):
            if by_rows is not None:
                yield slice(None), ops.RowPatches(ops.patches(some, by_rows), window), some_single
                continue
            if depthwise:
                yield slice(None), ops.Unfolded(some, window), some_single
                continue
            patches = some if itself else ops.patches(some, window)
            if together:
                yield (slice(None), patches.unflatten(1, (self.groups, columns)).transpose(0, 1),
                       some_single.unflatten(1, (self.groups, rows)).transpose(0, 1))
                continue
            for group in range(self.groups):
                of_group = slice(group * rows, (group + 1) * rows)
                yield of_group, patches[:, group * columns : (group + 1) * columns], some_single[:, of_group]

    def _shaped_bias(self) -> Tensor:
        assert self.bias is not None
        return self.bias.view(-1, *(1,) * self.dims)

    def extra_repr(self) -> str:
        settings = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups, **self._float_settings()}
        return (f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
                + "".join(f"{name}={value}, " for name, value in settings.items()) + super().extra_repr())


class _Forward(QuantConvolution):
    """A convolution: many positions of x make one of y."""

    def _shape_like(self, conv: Any, storage: Storage, **options: Any) -> None:
        super()._shape_like(conv, storage, **options)
        self._float_padding, self.padding_mode = conv.padding, conv.padding_mode
        spans = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        before = list(conv.padding)
        if isinstance(conv.padding, str):  # torch pads an even kernel by one more behind than before
            before = [span // 2 if conv.padding == "same" else 0 for span in spans]
        after = [span - pad for span, pad in zip(spans, before, strict=True)] if conv.padding == "same" else before
        # Zeros, as many on both sides, are the product's own; anything else is put around x before.
        self._put_around: tuple[int, ...] = ()
        if self.padding_mode == "zeros" and before == after:
            self.padding = tuple(before)
        elif any(after):
            pairs = list(zip(before, after, strict=True))
            self._put_around = tuple(pad for pair in reversed(pairs) for pad in pair)

    def _float_settings(self) -> dict[str, Any]:
        return {"padding": self._float_padding, "padding_mode": self.padding_mode}

    def forward(self, x: Tensor) -> Tensor:
        if self._put_around:
            x = F.pad(x, self._put_around, "constant" if self.padding_mode == "zeros" else self.padding_mode)
        return super().forward(x)

    def grad_input(self, grad_output: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        shape = x_shape if len(x_shape) == self.dims + 2 else (1, *x_shape)
        input_of = (conv1d_input, conv2d_input, conv3d_input)[self.dims - 1]
        weight = weight.view(self.float_shape)
        if grad_output.is_cuda:  # the same product, but torch's own function makes an x first, of which cuDNN reads nothing
            of = zip(x_shape[-self.dims :], grad_output.shape[-self.dims :], self.kernel_size, self.stride, self.padding,
                     self.dilation, strict=True)
            left = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in of]
            transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self.dims - 1]
            return transpose(grad_output, weight, None, self.stride, self.padding, left, self.groups, self.dilation)  # type: ignore[arg-type]
        grad_output = grad_output.view(-1, *grad_output.shape[-self.dims - 1 :])
        grad = input_of(shape, weight, grad_output, self.stride, self.padding, self.dilation, self.groups)  # type: ignore[arg-type]
        return grad.view(x_shape)

    def _positions_out(self, sizes: Sequence[int]) -> list[int]:
        of = zip(sizes, self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in of]

    def sequence_length(self, x_shape: torch.Size) -> int:
        return math.prod(self._positions_out(x_shape[-self.dims :]))


class _Transposed(QuantConvolution):
    """A transposed convolution: one position of x makes many of y. The rows of its weight are channels of x."""

    transposed = True

    def _shape_like(self, conv: Any, storage: Storage, **options: Any) -> None:
        super()._shape_like(conv, storage, **options)
        self.padding, self._output_padding = conv.padding, conv.output_padding

    def _float_settings(self) -> dict[str, Any]:
        return {"padding": self.padding, "output_padding": self.output_padding}

    @property
    def output_padding(self) -> tuple[int, ...]:
        return self._output_padding

    @property
    def outputs(self) -> int:
        return self.out_channels

    @property
    def fan_in(self) -> int:
        """How many products a value of y sums, on average: of a kernel it meets each stride-th place."""
        places = math.prod(self.kernel_size) / math.prod(self.stride)
        return max(1, round(self.in_channels // self.groups * places))

    def start_(self, init: str) -> "QuantLayer":
        super().start_(init)
        if not self.qweight.is_meta:
            self.scale.mul_((self.columns / self.fan_in) ** 0.5)  # it was drawn for as many inputs as columns
        return self

    def forward(self, x: Tensor, output_size: Any = None) -> Tensor:
        if output_size is not None:
            raise UsageError(f"{type(self).__name__} takes no output_size; build the layer with the output_padding that "
                             "gives it, or leave it out with filter_fn")
        return super().forward(x)

    def grad_input(self, grad_output: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        convolution = (F.conv1d, F.conv2d, F.conv3d)[self.dims - 1]
        weight = weight.view(self.float_shape)
        grad = convolution(grad_output, weight, None, self.stride, self.padding, self.dilation, self.groups)
        for dim, size in enumerate(x_shape):  # output_padding can make room for a position more
            grad = grad.narrow(dim, 0, size)
        return grad

    def _positions_out(self, sizes: Sequence[int]) -> list[int]:
        of = zip(sizes, self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding, strict=True)
        return [(n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, d, more in of]

    def sequence_length(self, x_shape: torch.Size) -> int:
        return math.prod(x_shape[-self.dims :])


class QuantConv1d(_Forward):
    """nn.Conv1d with an integer weight. bits, memory and gain are QuantLinear's, all else nn.Conv1d's, by name."""

    float_type, dims = nn.Conv1d, 1


class QuantConv2d(_Forward):
    """nn.Conv2d with an integer weight. bits, memory and gain are QuantLinear's, all else nn.Conv2d's, by name.

    The votes on a weight come from all positions of the image it is applied to.
    """

    float_type, dims = nn.Conv2d, 2


class QuantConv3d(_Forward):
    """nn.Conv3d with an integer weight. bits, memory and gain are QuantLinear's, all else nn.Conv3d's, by name."""

    float_type, dims = nn.Conv3d, 3


class QuantConvTranspose1d(_Transposed):
    """nn.ConvTranspose1d with an integer weight; its forward takes no output_size: set output_padding."""

    float_type, dims = nn.ConvTranspose1d, 1


class QuantConvTranspose2d(_Transposed):
    """nn.ConvTranspose2d with an integer weight; its forward takes no output_size: set output_padding."""

    float_type, dims = nn.ConvTranspose2d, 2


class QuantConvTranspose3d(_Transposed):
    """nn.ConvTranspose3d with an integer weight; its forward takes no output_size: set output_padding."""

    float_type, dims = nn.ConvTranspose3d, 3
