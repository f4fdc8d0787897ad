"""The product a quantized layer computes, and the votes its backward pass casts.

Twice: as an autograd function, for eager mode, and as operators of torch.library, for torch.compile. Both call the same two
functions, `forward` and `backward`.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from gft import grid, kernels
from gft.vote import CODES, Ballot


class Layer(Protocol):
    """What is asked of a layer: gft/layers.py has them."""

    weight: Any
    training: bool
    grid: grid.Grid
    float_shape: tuple[int, ...]

    @property
    def ballot(self) -> Ballot | None: ...
    @property
    def inputs(self) -> int: ...
    def product_dtype(self, x: Tensor) -> torch.dtype: ...
    def scaled_product(self, x: Tensor) -> Tensor: ...
    def scale_number(self) -> float: ...
    def product(self, x: Tensor, levels: Tensor, scale: float) -> Tensor: ...
    def input_error(self, delta: Tensor, levels: Tensor, scale: float, x_shape: torch.Size) -> Tensor: ...
    def features_last(self, x: Tensor, features: int) -> Tensor: ...
    def sequence_length(self, x_shape: torch.Size, y_shape: torch.Size) -> int: ...
    def vote_pieces(self, x: Tensor, x_shape: torch.Size, delta: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]: ...
    def warn_untrained(self) -> None: ...


def forward(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, what is kept of x for the votes, and x's mean square by feature; the last two empty if no votes are wanted."""
    x = x.to(layer.product_dtype(x))  # once, for the product and for the votes
    y = layer.scaled_product(x)
    kept, square = x.new_empty(0, dtype=torch.int8), x.new_empty(0, dtype=torch.float32)
    ballot = layer.ballot if x.numel() else None
    if ballot is not None:
        sequence = layer.sequence_length(x.shape, y.shape)
        quantized_x = ballot.quantize_x(layer.features_last(x, layer.inputs), sequence, ballot.call)
        bits = CODES[ballot.vote_for(sequence)].bits
        kept = quantized_x.q if bits == 8 else _packed(quantized_x.q, bits)
        square = square if quantized_x.square is None else quantized_x.square
    return y, kept, square


def backward(layer: Layer, delta: Tensor, weight: Tensor, kept: Tensor, square: Tensor, x_shape: torch.Size,
             x_dtype: torch.dtype, wants_delta_x: bool) -> Tensor | None:
    """delta_x, if it is wanted; and the votes are cast."""
    delta_x = None
    if wants_delta_x:
        shaped = layer.grid.float_levels(weight, delta.dtype).view(layer.float_shape)
        delta_x = layer.input_error(delta, shaped, layer.scale_number(), x_shape).to(x_dtype)
        del shaped  # the votes need the room
    ballot = layer.ballot
    if ballot is not None and kept.numel():
        sequence = layer.sequence_length(x_shape, delta.shape)
        bits = CODES[ballot.vote_for(sequence)].bits
        q = kept if bits == 8 else _unpacked(kept, bits, math.prod(x_shape) // layer.inputs, layer.inputs)
        rows = layer.features_last(delta, layer.grid.rows)
        levels = layer.grid.levels(weight) if ballot.mask == "literal" else None
        ballot.cast(partial(layer.vote_pieces, q, x_shape), square if square.numel() else None, rows,
                    (layer.grid.rows, layer.grid.columns), sequence, levels)
        # After delta_x: the error that flows down belongs to the weights of the forward pass.
        if ballot.on_votes is not None:
            ballot.on_votes(layer.weight)
    elif layer.training and ballot is None:
        layer.warn_untrained()
    return delta_x


def _packed(q: Tensor, bits: int) -> Tensor:
    """What is kept of quantized x (n, features): several a byte, along the axis that lies side by side."""
    return grid.pack(q.t() if kernels.lays_tokens_last(q) else q, bits)


def _unpacked(kept: Tensor, bits: int, tokens: int, features: int) -> Tensor:
    """The inverse of `_packed`."""
    return grid.unpack(kept, bits, tokens).t() if kernels.lays_tokens_last(kept) else grid.unpack(kept, bits, features)


class Product(torch.autograd.Function):
    """scale · product(x, levels), with votes in place of the weight's gradient.

    `anchor` is an empty tensor that requires grad: it makes backward run even where x itself needs no gradient, as at
    the first layer, since an integer weight cannot ask for one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        y, kept, square = forward(layer, x)
        ctx.layer, ctx.x_shape, ctx.x_dtype = layer, x.shape, x.dtype
        ctx.save_for_backward(weight, kept, square)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, kept, square = ctx.saved_tensors
        delta_x = backward(ctx.layer, grads[0], weight, kept, square, ctx.x_shape, ctx.x_dtype, ctx.needs_input_grad[0])
        return delta_x, None, None, None


# The same as operators, for torch.compile: it sees a call with tensors in and out, traces past it and never looks inside,
# where votes go to a Python object. Layers are named by number, since a graph holds no modules.

_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()


def number_of(layer: Layer) -> int:
    """A new number, by which the operators find this layer."""
    number = next(_numbers)
    _LAYERS[number] = layer
    return number


@torch.library.custom_op("gft::product", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _product_operator(x: Tensor, anchor: Tensor, weight: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    return forward(_LAYERS[layer], x)


@_product_operator.register_fake
def _(x: Tensor, anchor: Tensor, weight: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    this = _LAYERS[layer]
    y = this.product(x, x.new_empty(this.float_shape), 1.0)
    kept, square = x.new_empty(0, dtype=torch.int8), x.new_empty(0, dtype=torch.float32)
    ballot = this.ballot
    if ballot is not None:
        sequence = this.sequence_length(x.shape, y.shape)
        bits, tokens = CODES[ballot.vote_for(sequence)].bits, x.numel() // this.inputs
        if bits < 8:
            rows, columns = (this.inputs, tokens) if kernels.lays_tokens_last(x) else (tokens, this.inputs)
            kept = x.new_empty(rows, grid.packed_columns(columns, bits), dtype=torch.uint8)
        elif kernels.lays_tokens_last(x):
            kept = x.new_empty(this.inputs, tokens, dtype=torch.int8).t()
        else:
            kept = x.new_empty(tokens, this.inputs, dtype=torch.int8)
        if ballot.vote_for(sequence) != "sign":
            square = x.new_empty(this.inputs, dtype=torch.float32)
    return y, kept, square


@torch.library.custom_op("gft::product_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _product_backward_operator(delta: Tensor, weight: Tensor, kept: Tensor, square: Tensor, layer: int,
                               x_shape: Sequence[int], x_dtype: torch.dtype, wants_delta_x: bool) -> tuple[Tensor, Tensor]:
    delta_x = backward(_LAYERS[layer], delta, weight, kept, square, torch.Size(x_shape), x_dtype, wants_delta_x)
    nothing = delta.new_empty(0, dtype=torch.float32)
    return (delta.new_empty(0, dtype=x_dtype) if delta_x is None else delta_x.contiguous()), nothing


@_product_backward_operator.register_fake
def _(delta: Tensor, weight: Tensor, kept: Tensor, square: Tensor, layer: int, x_shape: Sequence[int], x_dtype: torch.dtype,
      wants_delta_x: bool) -> tuple[Tensor, Tensor]:
    return delta.new_empty(x_shape if wants_delta_x else (0,), dtype=x_dtype), delta.new_empty(0, dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weight, ctx.layer = inputs
    ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
    ctx.save_for_backward(weight, *output[1:])


def _differentiate(ctx: Any, delta: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    wants_delta_x = ctx.needs_input_grad[0]
    # The anchor's gradient is an output of the operator, so a graph cannot drop it where nobody wants delta_x.
    delta_x, nothing = torch.ops.gft.product_backward(delta, *ctx.saved_tensors, ctx.layer, list(ctx.x_shape), ctx.x_dtype,
                                                      wants_delta_x)
    return delta_x if wants_delta_x else None, nothing, None, None


_product_operator.register_autograd(_differentiate, setup_context=_remember)
