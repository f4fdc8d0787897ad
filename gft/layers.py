"""QuantLinear and QuantConv2d: layers whose weight is a grid of small integers.

    forward    y = scale · (x · levels^T) + bias
    backward   delta_x = scale · (delta · levels)        ordinary, by the chain rule (paper, Eq. 2)
               votes  += q(delta)^T · q(x)               instead of a weight gradient (vote.py)

With `gain=True` the product is multiplied by one more number, which AdamW learns with the biases (`log_gain`): an integer
weight cannot outgrow its grid, and where no norm follows nothing else makes up for that.

The weight is a plain integer nn.Parameter, packed or with memory (grid.py). It carries two attributes: `weight.grid`,
how it is stored, and `weight.ballot`, where its votes go. A ballot is given by `gft.GFT`; without one the layer is
frozen and backward computes delta_x alone. What the graph keeps of x is q(x), packed to 2, 4 or 8 bits an element.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair
from torch.nn.utils import skip_init

from gft import grid, kernels
from gft.grid import STARTS, Grid, scale_of, unpack
from gft.product import Product, number_of
from gft.vote import Ballot

FilterFn = Callable[[nn.Module, str], bool]  # of a layer and its name: is it meant?


class _QuantLayer(nn.Module):
    """What linear and convolution share: the stored weight, its scale, its life in a state_dict."""

    weight: nn.Parameter
    scale: Tensor
    log_gain: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, float_shape: tuple[int, ...], bits: int, bias: bool, memory: bool, init: str, gain: bool,
                 device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        if init not in (*STARTS, "unset"):
            raise ValueError(f"init={init!r}: choose one of {', '.join(STARTS)}")
        rows, columns = float_shape[0], math.prod(float_shape[1:])
        self.bits, self.memory = grid.check_bits(bits), bool(memory)
        self.float_shape = float_shape
        self.grid = Grid(bits, rows, columns, self.memory)
        if init == "unset":  # about to be filled by from_float, which draws nothing from torch's generator
            levels, scale = torch.zeros(rows, columns, dtype=torch.int8, device=device), torch.ones((), device=device)
        else:
            levels, scale = STARTS[init](rows, columns, bits, device)
        self.weight = nn.Parameter(self.grid.store(levels), requires_grad=False)
        self.register_buffer("scale", scale.float())
        self.log_gain = nn.Parameter(torch.zeros((), device=device, dtype=dtype)) if gain else None
        self.bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype)) if bias else None
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._read_scale: tuple[Tensor, int, float] | None = None
        self._warned = False
        self._take_number()
        mark(self)

    def _take_number(self) -> None:
        self._number = number_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or a layer read from a file, is another layer."""
        super().__setstate__(state)
        self._take_number()

    def _apply(self, fn: Any, recurse: bool = True) -> "_QuantLayer":
        """`.to`, `.cuda` and their kin: the anchor goes where the weight goes."""
        super()._apply(fn, recurse)
        self._anchor = torch.empty(0, device=self.weight.device, requires_grad=True)
        return self

    # ------------------------------------------------------------------ what linear and convolution do differently

    @property
    def inputs(self) -> int:
        """Features of x."""
        raise NotImplementedError

    def product(self, x: Tensor, levels: Tensor, scale: float) -> Tensor:
        raise NotImplementedError

    def input_error(self, delta: Tensor, levels: Tensor, scale: float, x_shape: torch.Size) -> Tensor:
        raise NotImplementedError

    def features_last(self, x: Tensor, features: int) -> Tensor:
        """x or delta as (n, features): each column gets one scale in the vote."""
        raise NotImplementedError

    def sequence_length(self, x_shape: torch.Size, y_shape: torch.Size) -> int:
        """How many rows of the vote product make one sample."""
        raise NotImplementedError

    def vote_pieces(self, x: Tensor, x_shape: torch.Size, delta: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Quantized x (n, inputs) and delta (voters, out) -> the products whose sum is the votes (vote.Pieces)."""
        raise NotImplementedError

    # ------------------------------------------------------------------ shared

    @property
    def ballot(self) -> Ballot | None:
        return getattr(self.weight, "ballot", None)

    def levels(self) -> Tensor:
        """The integer weights, int8, in the shape of the float layer's."""
        return self.grid.levels(self.weight.detach()).view(self.float_shape)

    def float_weight(self) -> Tensor:
        """The float values used in forward: scale · levels, times the gain if there is one."""
        weight = self.levels() * self.scale
        return weight if self.log_gain is None else weight * self.gain().detach()

    def gain(self) -> Tensor:
        """exp(sqrt(columns) · log_gain). By the root one rate of AdamW makes it grow as fast as it would a float weight,
        whose size is about 1 / sqrt(columns).

        Its gradient sums over all that flows through the layer, so it is taken 1 / (columns · sqrt(rows)) times, the
        root of the layer's size in all, as LSQ does (Esser et al. 2020): AdamW does not see it, SGD would leap without.
        """
        assert self.log_gain is not None
        slope = 1 / (self.grid.columns * self.grid.rows**0.5)
        log_gain = self.log_gain * slope + self.log_gain.detach() * (1 - slope)
        return (log_gain * self.grid.columns**0.5).exp()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_floating_point(x):
            raise TypeError(f"{type(self).__name__} takes a float input, not {x.dtype}; convert it with x.float()")
        if not torch.is_grad_enabled():
            y = self.scaled_product(x)
        elif torch.compiler.is_compiling():
            # Cast here, where autocast is known: the operator runs outside of it.
            y = torch.ops.gft.product(x.to(self.product_dtype(x)), self._anchor, self.weight, self._number)[0]
        elif self.ballot is None and not (x.requires_grad or self.training):
            y = self.scaled_product(x)
        else:
            y = Product.apply(x, self._anchor, self.weight, self)
        if self.log_gain is not None:
            y = y * self.gain().to(y.dtype)
        return y if self.bias is None else y + self._shaped_bias().to(y.dtype)

    def product_dtype(self, x: Tensor) -> torch.dtype:
        """autocast's type if it is on, else x's. The levels are exact in any float type."""
        return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype

    def scaled_product(self, x: Tensor) -> Tensor:
        """scale · product(x, levels)."""
        dtype = self.product_dtype(x)
        x = x.to(dtype)
        if torch.compiler.is_compiling():  # a number read from a tensor would end the graph
            return self.product(x, self.levels().to(dtype), 1.0) * self.scale.to(dtype)
        decoder = kernels.decoder_of(x, self.grid.columns) if len(self.float_shape) == 2 else None
        if decoder is not None:  # a few rows: the weight is read once, as it is stored
            y = decoder.product(x.reshape(-1, self.grid.columns), self.weight.detach(), self.scale_number(),
                                **self.grid.form)
            return y.view(*x.shape[:-1], self.grid.rows)
        levels = self.grid.float_levels(self.weight.detach(), dtype).view(self.float_shape)
        return self.product(x, levels, self.scale_number())

    def scale_number(self) -> float:
        """`scale` as a number, for products that multiply by it on the way out instead of in a pass of its own. Read
        from the device only when it has changed."""
        scale, version = self.scale, self.scale._version
        if self._read_scale is None or self._read_scale[0] is not scale or self._read_scale[1] != version:
            self._read_scale = scale, version, float(scale)
        return self._read_scale[2]

    def warn_untrained(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"this {type(self).__name__} has no optimizer and stays as it is: pass gft.quantized(model) "
                          "to gft.GFT (AdamW cannot train integers), or call .eval() on layers meant to be frozen",
                          stacklevel=2)

    def _shaped_bias(self) -> Tensor:
        assert self.bias is not None
        return self.bias

    def extra_repr(self) -> str:
        kept = f"memory={self.grid.memory_bits} bits" if self.memory else "packed"
        gain = ", gain=True" if self.log_gain is not None else ""
        return f"bits={self.bits}, {kept}, bias={self.bias is not None}{gain}"

    # ------------------------------------------------------------------ state_dict

    def get_extra_state(self) -> Tensor:
        """The form of the weight, so that 2-bit numbers are never read as 4-bit ones."""
        spare = [self.grid.spare_bits] if self.grid.spare_bits else []
        return torch.tensor([self.bits, int(self.memory), *spare], dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        pass  # checked in _load_from_state_dict, before anything is copied

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stored = state_dict.get(prefix + "weight")
        name = prefix.rstrip(".") or type(self).__name__
        if stored is not None and stored.dtype != self.weight.dtype:
            raise ValueError(
                f"{name}: the state_dict holds a {stored.dtype} weight, this layer stores {self.weight.dtype}; load "
                "float weights into the float model and call gft.quantize_ after, or build the layer with the same memory")
        form = state_dict.get(prefix + "_extra_state")
        if form is not None and form.tolist() == [self.bits, 0] and self.grid.spare_bits and stored is not None:
            # Of a time when spare bits were left unused.
            stored = self.grid.store(unpack(stored, self.bits, self.grid.columns))
            state_dict[prefix + "weight"], form = stored, self.get_extra_state()
        if form is not None and form.tolist() != self.get_extra_state().tolist():
            bits, memory, *_ = form.tolist()
            raise ValueError(f"{name}: the state_dict holds {bits}-bit weights with memory={bool(memory)}, this layer has "
                             f"bits={self.bits}, memory={self.memory}; build it the same way")
        if self.log_gain is not None and stored is not None:  # of a time before there were gains
            state_dict.setdefault(prefix + "log_gain", torch.zeros_like(self.log_gain))
        super()._load_from_state_dict(state_dict, prefix, *args)


class QuantLinear(_QuantLayer):
    """nn.Linear with an integer weight.

    bits: 2 (ternary) to 8. Fewer bits, less memory and a coarser weight.
    memory: True keeps unspent votes in the rest of a byte a weight (1 B a weight, trains best). False packs the levels
        (0.25 B at 2 bits, 0.5 B at 3 and 4, where the bit that 3 leave over counts half levels) and keeps nothing else.
    init: "variance" draws the levels of a Gaussian of deviation 1/sqrt(in_features); "paper" 90 % zeros, 10 % ±1.
    gain: True multiplies the product by a learnt number, for ternary layers and networks without norms. Backward then
        keeps the product, too. `gft.quantize_` decides by itself.
    """

    def __init__(self, in_features: int, out_features: int, bits: int = 4, bias: bool = False, *, memory: bool = True,
                 init: str = "variance", gain: bool = False, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__((out_features, in_features), bits, bias, memory, init, gain, device, dtype)
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def from_float(cls, linear: nn.Linear, bits: int = 4, *, memory: bool = True, init: str = "keep",
                   gain: bool = False) -> "QuantLinear":
        """The layer on the grid nearest to `linear`; its bias is taken over as it is. init="paper" starts anew."""
        layer = cls(linear.in_features, linear.out_features, bits, False, memory=memory,
                    init="unset" if init == "keep" else init, gain=gain, device=linear.weight.device)
        return _take_over(layer, linear, init)

    def to_float(self) -> nn.Linear:
        """An nn.Linear with the float values used in forward."""
        linear = skip_init(nn.Linear, self.in_features, self.out_features, self.bias is not None,
                           device=self.weight.device)
        return _give_back(self, linear)

    def product(self, x: Tensor, levels: Tensor, scale: float) -> Tensor:
        return _scaled_matmul(x, levels.t(), scale)

    def input_error(self, delta: Tensor, levels: Tensor, scale: float, x_shape: torch.Size) -> Tensor:
        return _scaled_matmul(delta, levels, scale)

    @property
    def inputs(self) -> int:
        return self.in_features

    def features_last(self, x: Tensor, features: int) -> Tensor:
        return x.reshape(-1, features)

    def sequence_length(self, x_shape: torch.Size, y_shape: torch.Size) -> int:
        return math.prod(x_shape[1:-1]) if len(x_shape) > 2 else 1

    def vote_pieces(self, x: Tensor, x_shape: torch.Size, delta: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        yield slice(None), x, delta

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {super().extra_repr()}"


class QuantConv2d(_QuantLayer):
    """nn.Conv2d with an integer weight. A weight's voters are the positions of the image it is applied to.

    stride, padding, dilation and groups are nn.Conv2d's; padding is zeros ("same" and "valid" work too).
    """

    # Im2col repeats each input kernel-size times; this many elements of it at once bound the scratch.
    UNFOLDED_AT_ONCE = 1 << 25

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int], bits: int = 4,
                 stride: int | tuple[int, int] = 1, padding: int | tuple[int, int] | str = 0,
                 dilation: int | tuple[int, int] = 1, groups: int = 1, bias: bool = False, *, memory: bool = True,
                 init: str = "variance", gain: bool = False, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups={groups} must divide in_channels={in_channels} and out_channels={out_channels}")
        kernel = _pair(kernel_size)
        super().__init__((out_channels, in_channels // groups, *kernel), bits, bias, memory, init, gain, device, dtype)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = kernel, _pair(stride), _pair(dilation)
        if padding == "same":
            spans = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            if self.stride != (1, 1) or any(span % 2 for span in spans):
                raise ValueError('padding="same" needs stride 1 and an odd kernel here; give the padding in numbers')
            padding = (spans[0] // 2, spans[1] // 2)
        self.padding = (0, 0) if padding == "valid" else _pair(padding)

    @classmethod
    def from_float(cls, conv: nn.Conv2d, bits: int = 4, *, memory: bool = True, init: str = "keep",
                   gain: bool = False) -> "QuantConv2d":
        """The layer on the grid nearest to `conv`; its bias is taken over as it is."""
        if conv.padding_mode != "zeros":
            raise ValueError(f"padding_mode={conv.padding_mode!r}: QuantConv2d pads with zeros only; leave this layer out")
        layer = cls(conv.in_channels, conv.out_channels, conv.kernel_size, bits, conv.stride, conv.padding,  # type: ignore[arg-type]
                    conv.dilation, conv.groups, memory=memory, init="unset" if init == "keep" else init,  # type: ignore[arg-type]
                    gain=gain, device=conv.weight.device)
        return _take_over(layer, conv, init)

    def to_float(self) -> nn.Conv2d:
        """An nn.Conv2d with the float values used in forward."""
        conv = skip_init(nn.Conv2d, self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding,
                         self.dilation, self.groups, self.bias is not None, device=self.weight.device)
        return _give_back(self, conv)

    @property
    def _geometry(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.groups

    def product(self, x: Tensor, levels: Tensor, scale: float) -> Tensor:
        return F.conv2d(x, levels, None, *self._geometry) * scale

    def input_error(self, delta: Tensor, levels: Tensor, scale: float, x_shape: torch.Size) -> Tensor:
        shape = x_shape if len(x_shape) == 4 else (1, *x_shape)
        error = torch.nn.grad.conv2d_input(shape, levels, delta.view(-1, *delta.shape[-3:]), *self._geometry)  # type: ignore[arg-type]
        return error.view(x_shape) * scale

    @property
    def inputs(self) -> int:
        return self.in_channels

    def features_last(self, x: Tensor, features: int) -> Tensor:
        return x.movedim(-3, -1).reshape(-1, features)

    def sequence_length(self, x_shape: torch.Size, y_shape: torch.Size) -> int:
        return y_shape[-2] * y_shape[-1]

    def vote_pieces(self, x: Tensor, x_shape: torch.Size, delta: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        images = x.reshape(-1, *x_shape[-2:], self.in_channels).permute(0, 3, 1, 2)
        positions = delta.shape[0] // len(images)
        at_once = max(1, self.UNFOLDED_AT_ONCE // (self.grid.columns * self.groups * positions))
        columns, rows = self.grid.columns, self.grid.rows // self.groups
        for some, some_delta in zip(images.split(at_once), delta.split(at_once * positions), strict=True):
            patches = self._patches(some)
            for group in range(self.groups):
                out = slice(group * rows, (group + 1) * rows)
                yield out, patches[:, group * columns : (group + 1) * columns], some_delta[:, out]

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


def _scaled_matmul(x: Tensor,  # (..., n)
                   matrix: Tensor,  # (n, m)
                   scale: float) -> Tensor:  # (..., m)
    """scale · x · matrix in one product; with beta=0 the first argument is not read."""
    y = torch.addmm(x.new_empty(()), x.reshape(-1, x.shape[-1]), matrix, beta=0, alpha=scale)
    return y.view(*x.shape[:-1], matrix.shape[1])


def _take_over(layer: Any, float_layer: Any, init: str) -> Any:
    if init == "keep":
        weight, scale = float_layer.weight.detach().float(), scale_of(float_layer.weight, layer.bits)
        layer.weight.data.copy_(layer.grid.store_nearest((weight / scale).view(layer.grid.rows, layer.grid.columns)))
        layer.scale.copy_(scale)
    layer.bias = float_layer.bias
    return layer.train(float_layer.training)


def _give_back(layer: Any, float_layer: Any) -> Any:
    with torch.no_grad():
        float_layer.weight.copy_(layer.float_weight())
        if layer.bias is not None:
            float_layer.bias.copy_(layer.bias)
    return float_layer.train(layer.training)


# ---------------------------------------------------------------------------------------------------- parameters


def mark(layer: _QuantLayer) -> nn.Parameter:
    """Write on the weight how it is stored and what a level is worth, for the optimizer that gets only the parameter."""
    layer.weight.grid = layer.grid  # type: ignore[attr-defined]
    layer.weight.read_scale = layer.scale_number  # type: ignore[attr-defined]
    return layer.weight


def quantized_layers(model: nn.Module) -> dict[str, _QuantLayer]:
    """Name -> quantized layer, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _QuantLayer)}


def quantized(model: nn.Module, filter_fn: FilterFn | None = None) -> list[nn.Parameter]:
    """The integer weights of a model, for `gft.GFT`; with filter_fn(module, name) those of the layers it chooses, so that
    kinds of layers can be groups with an lr of their own."""
    layers = quantized_layers(model)
    if not layers:
        raise ValueError("no quantized layer in this model; call gft.quantize_(model, bits=…) first")
    chosen = [layer for name, layer in layers.items() if filter_fn is None or filter_fn(layer, name)]
    if not chosen:
        raise ValueError(f"filter_fn chose none of the model's quantized layers ({some_names(list(layers))}); widen it")
    # Marked anew: a deep copy of a model has new parameters without the mark.
    return [mark(layer) for layer in chosen]


def some_names(names: Sequence[str]) -> str:
    """The first of many, for an error to name."""
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def dense(model: nn.Module) -> list[nn.Parameter]:
    """Every trainable parameter that is not an integer weight, for AdamW and its kin."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
