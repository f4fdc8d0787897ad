"""The product a quantized layer computes, and the votes its backward pass casts.

    forward    y = gain · scale · (x · levels^T)
    backward   grad_input = gain · scale · (grad_output · levels)      ordinary, by the chain rule (paper, Eq. 2)
               votes     += q(grad_output)^T · q(x)                    instead of a weight gradient (votes.py)
               grad_gain  = sum(votes · levels) on the votes' scales   so that nothing but q(x) is kept for it

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
import torch.nn.functional as F
from torch import Tensor

from gft import ops
from gft.storage import Storage
from gft.votes import Int4, Int8, Sign, Ternary, Vote, VoteAccumulator


class Layer(Protocol):
    """What is asked of a layer: gft/layers/ has them."""

    qweight: Any
    training: bool
    storage: Storage
    votes: VoteAccumulator | None
    float_shape: tuple[int, ...]
    rows: int
    columns: int

    @property
    def inputs(self) -> int: ...
    def product_dtype(self, x: Tensor) -> torch.dtype: ...
    def scaled_product(self, x: Tensor, gain: Tensor | None) -> Tensor: ...
    def factors(self, gain: Tensor | None) -> tuple[float, Tensor | None]: ...
    def read_out(self, stored: Tensor, factors: Tensor | None, like: Tensor) -> Tensor: ...
    def grad_input(self, grad_output: Tensor, levels: Tensor, scale: float, x_shape: torch.Size) -> Tensor: ...
    def features_last(self, x: Tensor, features: int) -> Tensor: ...
    def sequence_length(self, x_shape: torch.Size, y_shape: torch.Size) -> int: ...
    def vote_pieces(self, x: Tensor, x_shape: torch.Size, grad: Tensor) -> Iterator[tuple[slice, Any, Tensor]]: ...
    def warn_untrained(self) -> None: ...


def forward(layer: Layer, x: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's output, what is kept of x for the votes, and x's mean square by feature; the last two empty if no votes
    are wanted."""
    x = x.to(layer.product_dtype(x))  # once, for the product and for the votes
    y = layer.scaled_product(x, gain)
    kept, square = x.new_empty(0, dtype=torch.int8), x.new_empty(0, dtype=torch.float32)
    votes = layer.votes if x.numel() else None
    if votes is not None:
        sequence = layer.sequence_length(x.shape, y.shape)
        quantized_x = votes.quantize_x(layer.features_last(x, layer.inputs), sequence, layer.training)
        kept = _packed(quantized_x.q, votes.vote.within(sequence))
        square = square if quantized_x.mean_square is None else quantized_x.mean_square
    return y, kept, square


def backward(layer: Layer, grad_output: Tensor, saved: tuple[Tensor, Tensor, Tensor], gain: Tensor | None,
             x_shape: torch.Size, wants_grad_input: bool) -> tuple[Tensor | None, Tensor | None]:
    """grad_input, if it is wanted, and the gain's gradient, if there is one; and the votes are cast."""
    (weight, kept, square), votes, grad_input, grad_gain = saved, layer.votes, None, None
    votes = votes if kept.numel() else None
    for_votes = votes is not None and (gain is not None or (isinstance(votes.vote, Sign) and votes.vote.literal_mask))
    levels, (scale, factors) = None, layer.factors(gain)
    if wants_grad_input or for_votes:
        levels = layer.read_out(weight, factors, grad_output)
    if wants_grad_input:
        assert levels is not None
        grad_input = layer.grad_input(grad_output, levels, scale, x_shape)
    if not for_votes:
        levels = None  # the votes need the room
    if votes is not None:
        sequence = layer.sequence_length(x_shape, grad_output.shape)
        q = _unpacked(kept, votes.vote.within(sequence), math.prod(x_shape) // layer.inputs, layer.inputs)
        along_levels = votes.cast(partial(layer.vote_pieces, q, x_shape), square if square.numel() else None,
                                  layer.features_last(grad_output, layer.rows), (layer.rows, layer.columns), sequence,
                                  None if levels is None else levels.reshape(layer.rows, layer.columns))
        if gain is not None and along_levels is not None:
            # The levels have the gain in them, its derivative has not.
            grad_gain = (along_levels * scale / gain.float()).to(gain.dtype)
        # After grad_input: the error that flows down belongs to the weights of the forward pass.
        votes.move_in_backward()
    elif layer.votes is not None and not x_shape.numel():
        layer.votes.abstain((layer.rows, layer.columns), grad_output.device)
    elif layer.training and layer.votes is None:
        layer.warn_untrained()
    return grad_input, grad_gain


def _packed(q: Tensor, vote: Vote) -> Tensor:
    """What is kept of quantized x (n, features): several a byte, along the axis that lies side by side."""
    if vote.bits == 8:
        return q
    return ops.pack_fields(q.t() if ops.tokens_last(q) else q, vote.bits, (1 << vote.bits - 1) - 1)


def _unpacked(kept: Tensor, vote: Vote, tokens: int, features: int) -> Tensor:
    """The inverse of `_packed`."""
    if vote.bits == 8:
        return kept
    offset = (1 << vote.bits - 1) - 1
    if ops.tokens_last(kept):
        return ops.unpack_fields(kept, vote.bits, offset, tokens).t()
    return ops.unpack_fields(kept, vote.bits, offset, features)


class Product(torch.autograd.Function):
    """gain · scale · product(x, levels), with votes in place of the weight's gradient.

    `anchor` is an empty tensor that requires grad: it makes backward run even where x itself needs no gradient, as at
    the first layer, since an integer weight cannot ask for one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, gain: Tensor | None, layer: Layer) -> Tensor:
        y, kept, square = forward(layer, x, gain)
        ctx.layer, ctx.x_shape = layer, x.shape
        ctx.save_for_backward(weight, kept, square, gain)
        # Not as a view, which torch would not let a model change in place (`y += residual`).
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, gain = ctx.saved_tensors
        grad_input, grad_gain = backward(ctx.layer, grads[0], tuple(saved), gain, ctx.x_shape, ctx.needs_input_grad[0])
        return grad_input, None, None, grad_gain, None


# ---------------------------------------------------------------------------------------------------- for torch.compile

# The same as operators: a graph sees a call with tensors in and out, traces past it and never looks inside, where votes go
# to a Python object. It names the layer by a tensor that holds a number, not by the number itself: equal layers then share
# one graph. All else it must know, the shapes that come out, follows from `geometry` and `vote`.

_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()
_VOTES: dict[str, Vote] = {type(vote).__name__: vote for vote in (Int8(), Int4(), Ternary(), Sign())}


def handle_of(layer: Layer) -> Tensor:
    """A new int64 scalar on the CPU (also inside `with torch.device("meta")`), by which the operators find this layer."""
    number = next(_numbers)
    _LAYERS[number] = layer
    return torch.tensor(number, device="cpu")


def kept_as(layer: Layer, x_shape: torch.Size, y_shape: torch.Size) -> str:
    """The name of the quantizer of x that backward keeps; empty where none is."""
    return "" if layer.votes is None else type(layer.votes.vote.within(layer.sequence_length(x_shape, y_shape))).__name__


def output_shape(x: Tensor, geometry: Sequence[int]) -> Tensor:
    """An empty y. geometry: [rows] of a linear layer; of a convolution see `convolve`."""
    if len(geometry) == 1:
        return x.new_empty(*x.shape[:-1], geometry[0])
    return convolve(x, x.new_empty(geometry[2 : 4 + geometry[0]]), geometry)


def convolve(x: Tensor, weight: Tensor,
             geometry: Sequence[int]) -> Tensor:
    """A convolution over [dims, transposed?, weight's shape, stride, padding, dilation, output_padding, groups]."""
    dims, transposed, groups = geometry[0], geometry[1], geometry[-1]
    settings = geometry[4 + dims : -1]
    stride, padding, dilation, output_padding = (settings[at : at + dims] for at in range(0, 4 * dims, dims))
    if transposed:
        transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        return transpose(x, weight, None, stride, padding, output_padding, groups, dilation)  # type: ignore[arg-type]
    return (F.conv1d, F.conv2d, F.conv3d)[dims - 1](x, weight, None, stride, padding, dilation, groups)  # type: ignore[arg-type]


def memory_format_of(images: Tensor) -> torch.memory_format:
    """channels_last, or channels_last_3d, of what lies so and not otherwise."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(images.dim(), torch.contiguous_format)
    return last if images.is_contiguous(memory_format=last) and not images.is_contiguous() else torch.contiguous_format


@torch.library.custom_op("gft::product", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _product_operator(x: Tensor, anchor: Tensor, weight: Tensor, gain: Tensor | None, handle: Tensor,
                      geometry: Sequence[int], vote: str) -> tuple[Tensor, Tensor, Tensor]:
    return forward(_LAYERS[int(handle)], x, gain)


@_product_operator.register_fake
def _(x: Tensor, anchor: Tensor, weight: Tensor, gain: Tensor | None, handle: Tensor, geometry: Sequence[int],
      vote: str) -> tuple[Tensor, Tensor, Tensor]:
    y = output_shape(x, geometry)
    kept, square = x.new_empty(0, dtype=torch.int8), x.new_empty(0, dtype=torch.float32)
    if vote:
        inputs = x.shape[-1] if len(geometry) == 1 else x.shape[-1 - geometry[0]]
        tokens, bits = x.numel() // inputs, _VOTES[vote].bits
        if bits < 8:
            rows, columns = (inputs, tokens) if ops.tokens_last(x) else (tokens, inputs)
            kept = x.new_empty(rows, -(-columns * bits // 8), dtype=torch.uint8)
        elif ops.tokens_last(x):
            kept = x.new_empty(inputs, tokens, dtype=torch.int8).t()
        else:
            kept = x.new_empty(tokens, inputs, dtype=torch.int8)
        if _VOTES[vote].has_scale:
            square = x.new_empty(inputs, dtype=torch.float32)
    return y, kept, square


@torch.library.custom_op("gft::product_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _product_backward_operator(grad_output: Tensor, weight: Tensor, kept: Tensor, square: Tensor, gain: Tensor | None,
                               handle: Tensor, x_shape: Sequence[int],
                               wants_grad_input: bool) -> tuple[Tensor, Tensor, Tensor]:
    grad_input, grad_gain = backward(_LAYERS[int(handle)], grad_output, (weight, kept, square), gain, torch.Size(x_shape),
                                     wants_grad_input)
    nothing = grad_output.new_empty(0, dtype=torch.float32)
    return (grad_output.new_empty(0) if grad_input is None
            else grad_input.contiguous(memory_format=memory_format_of(grad_output)),
            nothing.clone() if gain is None else torch.zeros_like(gain) if grad_gain is None else grad_gain, nothing)


@_product_backward_operator.register_fake
def _(grad_output: Tensor, weight: Tensor, kept: Tensor, square: Tensor, gain: Tensor | None, handle: Tensor,
      x_shape: Sequence[int], wants_grad_input: bool) -> tuple[Tensor, Tensor, Tensor]:
    nothing = grad_output.new_empty(0, dtype=torch.float32)
    grad_input = grad_output.new_empty(x_shape if wants_grad_input else (0,))
    return (grad_input.contiguous(memory_format=memory_format_of(grad_output)) if wants_grad_input else grad_input,
            nothing.clone() if gain is None else torch.empty_like(gain), nothing)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weight, gain, handle, _, _ = inputs
    ctx.x_shape = x.shape
    ctx.save_for_backward(weight, *output[1:], gain, handle)


def _differentiate(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    wants = ctx.needs_input_grad[0]
    *saved, gain, handle = ctx.saved_tensors
    # The anchor's gradient is an output of the operator, so a graph cannot drop it where nobody wants grad_input.
    grad_input, grad_gain, nothing = torch.ops.gft.product_backward(grad_output, *saved, gain, handle, list(ctx.x_shape),
                                                                    wants)
    return grad_input if wants else None, nothing, None, None if gain is None else grad_gain, None, None, None


_product_operator.register_autograd(_differentiate, setup_context=_remember)
