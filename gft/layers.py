"""QuantLinear and QuantConv2d: layers whose weight is a matrix of small integers.

    forward    y = scale · (x · levels^T) + bias
    backward   grad_input = scale · (grad_output · levels)        ordinary, by the chain rule (paper, Eq. 2)
               votes     += q(grad_output)^T · q(x)               instead of a weight gradient (votes.py)

With `gain=True` the product is multiplied by one more number, which AdamW learns with the biases (`log_gain`): an integer
weight cannot outgrow its grid, and where no norm follows nothing else makes up for that.

`layer.qweight` is a plain integer nn.Parameter; `layer.storage` says what its bytes mean (storage.py), and `layer.weight`
reads them out as floats. `layer.votes` is where
its votes go (votes.py): the accumulator that `gft.GFT` gives it. Without one the layer is frozen and backward computes
grad_input alone. What the graph keeps of x is q(x), packed to 2, 4 or 8 bits an element.
"""

import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils.weak import WeakIdKeyDictionary

from gft import ops
from gft.errors import UsageError, UsageTypeError
from gft.initialize import STARTS, scale_of
from gft.product import Product, handle_of, kept_as
from gft.storage import Storage, field_bits, unpack_fields
from gft.votes import VoteAccumulator

FilterFn = Callable[[nn.Module, str], bool]  # of a layer and its name: is it meant?


class QuantLayer(nn.Module):
    """What linear and convolution share: the stored weight, its scale, its votes, its life in a state_dict."""

    qweight: nn.Parameter
    scale: Tensor
    log_gain: nn.Parameter | None
    bias: nn.Parameter | None
    votes: VoteAccumulator | None  # given by the optimizer
    number: int | None  # among the model's quantized layers, for the random streams (number_layers)

    def __init__(self, float_shape: tuple[int, ...], storage: Storage, *, bias: bool = False, gain: bool = False,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.float_shape, self.storage = float_shape, storage
        self.rows, self.columns = float_shape[0], math.prod(float_shape[1:])
        levels = torch.zeros(self.rows, self.columns, dtype=torch.int8, device=device)
        self.qweight = nn.Parameter(storage.store(levels), requires_grad=False)
        self.register_buffer("scale", torch.ones((), device=device))
        self.log_gain = nn.Parameter(torch.zeros((), device=device)) if gain else None
        self.bias = nn.Parameter(torch.zeros(self.rows, device=device)) if bias else None
        self._join(None, dtype)

    def _join(self, number: int | None, dtype: torch.dtype | None) -> None:
        """What a layer has that its copies and its file have not: a handle for compiled graphs, a place among the layers
        that an optimizer finds by their weights."""
        self.votes, self.number = None, number
        self._anchor = torch.empty(0, device=self.qweight.device, dtype=dtype, requires_grad=True)
        self._read_scale: tuple[Tensor, int, float] | None = None
        self._warned = False
        self._handle = handle_of(self)
        register(self)

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: the votes, and with them the optimizer, stay with this layer."""
        own = ("votes", "_anchor", "_read_scale", "_warned", "_handle")
        return {key: value for key, value in self.__dict__.items() if key not in own} | {"_dtype": self.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key != "_dtype"})
        self._join(state.get("number"), state.get("_dtype"))

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantLayer":
        """`.to`, `.cuda`, `.half` and their kin: the anchor goes with the weight, which may be another one after, and tells
        the layer's float type. The scale keeps its own: rounding it would move all weights."""
        scale = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)
        self._anchor = fn(self._anchor.detach()).requires_grad_()
        register(self)
        return self

    def start_(self, init: str) -> "QuantLayer":
        """Draw new levels: "variance", those of a Gaussian of deviation 1/sqrt(inputs); "paper", 90 % zeros, 10 % ±1."""
        if init not in STARTS:
            raise UsageError(f"init={init!r}: choose one of {', '.join(STARTS)}")
        if self.qweight.is_meta:  # torch.nn.utils.skip_init: values come later
            return self
        levels, scale = STARTS[init](self.rows, self.columns, self.bits, self.qweight.device)
        self.qweight.data.copy_(self.storage.store(levels))
        self.scale.copy_(scale)
        return self

    # ------------------------------------------------------------------ what linear and convolution do differently

    @property
    def inputs(self) -> int:
        """Features of x."""
        raise NotImplementedError

    @property
    def geometry(self) -> list[int]:
        """What y's shape follows from (product.output_shape)."""
        raise NotImplementedError

    def product(self, x: Tensor, levels: Tensor, scale: float) -> Tensor:
        """scale · product(x, levels)."""
        raise NotImplementedError

    def grad_input(self, grad_output: Tensor, levels: Tensor, scale: float, x_shape: torch.Size) -> Tensor:
        raise NotImplementedError

    def features_last(self, x: Tensor, features: int) -> Tensor:
        """x or grad_output as (n, features): each column gets one scale in the vote."""
        raise NotImplementedError

    def sequence_length(self, x_shape: torch.Size, y_shape: torch.Size) -> int:
        """How many rows of the vote product make one sample."""
        raise NotImplementedError

    def vote_pieces(self, x: Tensor, x_shape: torch.Size, grad: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Quantized x (n, inputs) and grad_output (positions, out) -> the products whose sum is the votes (votes.Pieces)."""
        raise NotImplementedError

    # ------------------------------------------------------------------ shared

    @property
    def weight(self) -> Tensor:
        """The float weight that the layer computes with, read out of the integers anew, for code that looks at a layer's
        weight or its type (`x.to(layer.weight.dtype)`). To multiply by it outside of the layer casts no votes: while the
        layer trains, backward raises."""
        weight = self.float_weight().to(self.dtype)
        if self.votes is not None and self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            weight.requires_grad_().register_hook(self._refuse_gradient)
        return weight

    def _refuse_gradient(self, _: Tensor) -> None:
        raise UsageError(f"the weight of {self} was multiplied outside of the layer, which casts no votes on it; call the "
                         "layer itself, or leave it out with filter_fn")

    @property
    def dtype(self) -> torch.dtype:
        """The float type of its weight; what `.to(dtype)` says. Products have x's, or autocast's."""
        return self._anchor.dtype

    @property
    def bits(self) -> int:
        return self.storage.bits

    @property
    def memory(self) -> bool:
        return self.storage.memory

    def levels(self) -> Tensor:
        """The integer weights, int8, in the shape of the float layer's."""
        return self.storage.levels(self.qweight.detach(), self.columns).view(self.float_shape)

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
        slope = 1 / (self.columns * self.rows**0.5)
        log_gain = self.log_gain * slope + self.log_gain.detach() * (1 - slope)
        return (log_gain * self.columns**0.5).exp()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_floating_point(x):
            raise UsageTypeError(f"{type(self).__name__} takes a float input, not {x.dtype}; convert it with x.float()")
        if not torch.compiler.is_compiling() and self.votes is not None and self.votes.optimizer() is None:
            self.votes = None  # nobody is left to be moved by them
        gain = None if self.log_gain is None else self.gain()
        # Where votes estimate a gradient they tell the gain's, too, and it goes into the product; else torch keeps the
        # product for it.
        inside = gain if self.votes is not None and self.votes.vote.has_scale else None
        if not torch.is_grad_enabled():
            inside = gain
            y = self.scaled_product(x, inside)
        elif torch.compiler.is_compiling():
            # Cast here, where autocast is known: the operator runs outside of it.
            x = x.to(self.product_dtype(x))
            geometry = self.geometry
            kept = kept_as(self, x.shape, self._output_shape(x))
            y = torch.ops.gft.product(x, self._anchor, self.qweight, inside, self._handle, geometry, kept)[0]
        elif self.votes is None and not (x.requires_grad or self.training):
            y = self.scaled_product(x, inside)
        else:
            y = Product.apply(x, self._anchor, self.qweight, inside, self)
        if gain is not None and inside is None:
            y = y * gain.to(y.dtype)
        return y if self.bias is None else y + self._shaped_bias().to(y.dtype)

    def _output_shape(self, x: Tensor) -> torch.Size:
        raise NotImplementedError

    def product_dtype(self, x: Tensor) -> torch.dtype:
        """autocast's type if it is on, else x's. The levels are exact in any float type."""
        return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype

    def scaled_product(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """gain · scale · product(x, levels)."""
        dtype = self.product_dtype(x)
        x = x.to(dtype)
        if torch.compiler.is_compiling():  # a number read from a tensor would end the graph
            scale = self.scale if gain is None else self.scale * gain
            return self.product(x, self.levels().to(dtype), 1.0) * scale.to(dtype)
        return self._stored_product(x, gain)

    def _stored_product(self, x: Tensor, gain: Tensor | None) -> Tensor:
        levels = ops.float_levels(self.qweight.detach(), self.storage, self.columns, x.dtype, gain)
        return self.product(x, levels.view(self.float_shape), self.scale_number())

    def scale_number(self) -> float:
        """`scale` as a number, for products that multiply by it on the way out instead of in a pass of its own. Read
        from the device only when it has changed."""
        scale, version = self.scale, self.scale._version
        if self._read_scale is None or self._read_scale[0] is not scale or self._read_scale[1] != version:
            self._read_scale = scale, version, float(scale)
        return self._read_scale[2]

    @torch.no_grad()
    def store_as_(self, storage: Storage) -> None:
        """Change the encoding of the memory; the weight stays where votes have carried it."""
        if storage != self.storage:
            self.qweight.copy_(self.storage.converted(self.qweight, storage))
            self.storage = storage

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
        kept = f"memory={self.storage.memory_bits} bits" if self.memory else "packed"
        gain = ", gain=True" if self.log_gain is not None else ""
        return f"bits={self.bits}, {kept}, bias={self.bias is not None}{gain}"

    # ------------------------------------------------------------------ state_dict

    def get_extra_state(self) -> Tensor:
        """How the weight is stored."""
        return torch.tensor(self.storage.code, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        pass  # used in _load_from_state_dict, before anything is copied

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "weight" in state_dict:  # of a float layer, which is refused, or of a time when integers had this name
            state_dict[prefix + "qweight"] = state_dict.pop(prefix + "weight")
        if prefix + "qweight" in state_dict:
            state_dict[prefix + "qweight"] = self._as_this_layer(state_dict, prefix)
            if self.log_gain is not None:  # of a time before there were gains
                state_dict.setdefault(prefix + "log_gain", torch.zeros_like(self.log_gain))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _as_this_layer(self, state_dict: dict[str, Any], prefix: str) -> Tensor:
        """The weight in a state_dict, whose encoding this layer takes over: the bytes stay as they were saved, until an
        optimizer whose rule wants another encoding takes its next step."""
        stored, name = state_dict[prefix + "qweight"], prefix.rstrip(".") or type(self).__name__
        if stored.dtype != self.qweight.dtype:
            raise UsageError(
                f"{name}: the state_dict holds a {stored.dtype} weight, this layer stores {self.qweight.dtype}; load "
                "float weights into the float model and call gft.quantize_ after, or build the layer with the same memory")
        code = state_dict.get(prefix + "_extra_state")
        if code is None:
            return stored
        storage = Storage.from_code(code.tolist())
        if (storage.bits, storage.memory) != (self.bits, self.memory):
            raise UsageError(f"{name}: the state_dict holds {storage.bits}-bit weights with memory={storage.memory}, this "
                             f"layer has bits={self.bits}, memory={self.memory}; build it the same way")
        if len(code) == 2 and storage.spare_bits:  # of a time when spare bits were left unused
            levels = unpack_fields(stored, field_bits(self.bits), storage.largest, self.columns)
            stored = self.storage.store(levels)
        if stored.shape == self.qweight.shape:  # else torch refuses it
            self.storage = storage
            if self.votes is not None:
                self.votes.prepared_for = None
        return stored


class QuantLinear(QuantLayer):
    """nn.Linear with an integer weight.

    bits: 2 (ternary) to 8. Fewer bits, less memory and a coarser weight.
    memory: True keeps unspent votes in the rest of a byte a weight (1 B a weight, trains best). False packs the levels
        (0.25 B at 2 bits, 0.5 B at 3 and 4, where the bit that 3 leave over counts half levels) and keeps nothing else.
    gain: True multiplies the product by a learnt number, for ternary layers and networks without norms. `gft.quantize_`
        decides by itself.

    Starts with the levels of a Gaussian of deviation 1/sqrt(in_features); `start_("paper")` with 90 % zeros.
    """

    def __init__(self, in_features: int, out_features: int, bits: int = 4, bias: bool = False, *, memory: bool = True,
                 gain: bool = False, device: torch.device | str | None = None) -> None:
        super().__init__((out_features, in_features), Storage(bits, bool(memory)), bias=bias, gain=gain, device=device)
        self.in_features, self.out_features = in_features, out_features
        self.start_("variance")

    @classmethod
    def from_float(cls, linear: nn.Linear, bits: int = 4, *, memory: bool = True, init: str = "keep",
                   gain: bool = False) -> "QuantLinear":
        """The layer on the grid nearest to `linear`; its bias is taken over as it is. init="paper" starts anew."""
        layer = cls.__new__(cls)
        QuantLayer.__init__(layer, (linear.out_features, linear.in_features), Storage(bits, bool(memory)), gain=gain,
                            device=linear.weight.device, dtype=linear.weight.dtype)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        return _take_over(layer, linear, init)

    def to_float(self) -> nn.Linear:
        """An nn.Linear with the float values used in forward."""
        linear = skip_init(nn.Linear, self.in_features, self.out_features, self.bias is not None,
                           device=self.qweight.device, dtype=self.dtype)
        return _give_back(self, linear)

    def product(self, x: Tensor, levels: Tensor, scale: float) -> Tensor:
        y = ops.scaled_matmul(x.reshape(-1, self.columns), levels.t(), scale)
        return y.view(*x.shape[:-1], self.rows)

    def _stored_product(self, x: Tensor, gain: Tensor | None) -> Tensor:
        if x.shape[-1] != self.columns:
            raise UsageError(f"QuantLinear(in_features={self.in_features}) was given x of shape {tuple(x.shape)}; its last "
                             f"size must be {self.in_features}")
        y = ops.linear(x.reshape(-1, self.columns), self.qweight.detach(), self.storage, self.scale_number(), gain)
        return y.view(*x.shape[:-1], self.rows)

    def grad_input(self, grad_output: Tensor, levels: Tensor, scale: float, x_shape: torch.Size) -> Tensor:
        return ops.scaled_matmul(grad_output.reshape(-1, self.rows), levels, scale).view(x_shape)

    @property
    def inputs(self) -> int:
        return self.in_features

    @property
    def geometry(self) -> list[int]:
        return [self.rows]

    def _output_shape(self, x: Tensor) -> torch.Size:
        return torch.Size((*x.shape[:-1], self.rows))

    def features_last(self, x: Tensor, features: int) -> Tensor:
        return x.reshape(-1, features)

    def sequence_length(self, x_shape: torch.Size, y_shape: torch.Size) -> int:
        return math.prod(x_shape[1:-1]) if len(x_shape) > 2 else 1

    def vote_pieces(self, x: Tensor, x_shape: torch.Size, grad: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        yield slice(None), x, grad

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {super().extra_repr()}"


class QuantConv2d(QuantLayer):
    """nn.Conv2d with an integer weight. The votes on a weight come from all positions of the image it is applied to.

    bits, memory and gain are QuantLinear's. stride, padding ("same" and "valid" too), dilation, groups, bias and device are
    nn.Conv2d's, by name; padding is zeros.
    """

    # Im2col repeats each input kernel-size times; this many elements of it at once bound the scratch.
    UNFOLDED_AT_ONCE = 1 << 25

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int], bits: int = 4, *,
                 memory: bool = True, gain: bool = False, **conv: Any) -> None:
        if "dtype" in conv:
            raise UsageTypeError("QuantConv2d takes no dtype, its weight is integers; call .to(dtype) for its bias and gain")
        device, bias = conv.pop("device", None), conv.pop("bias", False)
        like = nn.Conv2d(in_channels, out_channels, kernel_size, device="meta", bias=bias, **conv)
        self._shape_like(like, Storage(bits, bool(memory)), gain, device, None)
        self.start_("variance")

    def _shape_like(self, conv: nn.Conv2d, storage: Storage, gain: bool, device: torch.device | str | None,
                    dtype: torch.dtype | None) -> None:
        if conv.padding_mode != "zeros":
            raise UsageError(f"padding_mode={conv.padding_mode!r}: QuantConv2d pads with zeros only; leave this layer out")
        super().__init__(tuple(conv.weight.shape), storage, bias=conv.bias is not None, gain=gain, device=device,
                         dtype=dtype)
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
                   gain: bool = False) -> "QuantConv2d":
        """The layer on the grid nearest to `conv`; its bias is taken over as it is."""
        layer = cls.__new__(cls)
        layer._shape_like(conv, Storage(bits, bool(memory)), gain, conv.weight.device, conv.weight.dtype)
        return _take_over(layer, conv, init)

    def to_float(self) -> nn.Conv2d:
        """An nn.Conv2d with the float values used in forward."""
        conv = skip_init(nn.Conv2d, self.in_channels, self.out_channels, self.kernel_size, *self._geometry,
                         self.bias is not None, device=self.qweight.device, dtype=self.dtype)
        return _give_back(self, conv)

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


def _take_over(layer: Any, float_layer: Any, init: str) -> Any:
    if init == "keep":
        weight, scale = float_layer.weight.detach().float(), scale_of(float_layer.weight, layer.bits)
        positions = (weight / scale).reshape(layer.rows, layer.columns)  # not view: the weight may be channels_last
        layer.qweight.data.copy_(layer.storage.store_nearest(positions))
        layer.scale.copy_(scale)
    else:
        layer.start_(init)
    layer.bias = float_layer.bias
    return layer.train(float_layer.training)


def _give_back(layer: Any, float_layer: Any) -> Any:
    with torch.no_grad():
        float_layer.weight.copy_(layer.float_weight())
        if layer.bias is not None:
            float_layer.bias.copy_(layer.bias)
    return float_layer.train(layer.training)


# ---------------------------------------------------------------------------------------------------- parameters

# Weight -> its layer, both held weakly: an optimizer gets only parameters, and none of this keeps a model alive.
_LAYER_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register(layer: QuantLayer) -> None:
    """Let the optimizer find this layer by its weight."""
    _LAYER_OF[layer.qweight] = weakref.ref(layer)


def layer_of(weight: Any) -> QuantLayer | None:
    """The living layer whose weight this is, if it is one."""
    if not isinstance(weight, Tensor) or weight not in _LAYER_OF:
        return None
    layer = _LAYER_OF[weight]()
    return layer if layer is not None and layer.qweight is weight else None


def quantized_layers(model: nn.Module) -> dict[str, QuantLayer]:
    """Name -> quantized layer, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLayer)}


def quantized(model: nn.Module, filter_fn: FilterFn | None = None) -> list[nn.Parameter]:
    """The integer weights of a model, for `gft.GFT`; with filter_fn(module, name) those of the layers it chooses, so that
    kinds of layers can be groups with an lr of their own."""
    layers = quantized_layers(model)
    if not layers:
        raise UsageError("no quantized layer in this model; call gft.quantize_(model, bits=…) first")
    for layer in layers.values():
        register(layer)
    number_layers(layers.values())
    chosen = [layer for name, layer in layers.items() if filter_fn is None or filter_fn(layer, name)]
    if not chosen:
        raise UsageError(f"filter_fn chose none of the model's quantized layers ({some_names(list(layers))}); widen it")
    return [layer.qweight for layer in chosen]


def number_layers(layers: Iterable[QuantLayer]) -> None:
    """Give each layer of a model that has none a number, so that it draws its own random numbers, whichever optimizer it
    goes to."""
    layers = list(layers)
    taken = {layer.number for layer in layers}
    free = (number for number in itertools.count() if number not in taken)
    for layer in layers:
        if layer.number is None:
            layer.number = next(free)


def some_names(names: Sequence[str]) -> str:
    """The first of many, for an error to name."""
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def dense(model: nn.Module) -> list[nn.Parameter]:
    """Every trainable parameter that is not an integer weight, for AdamW and its kin."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
