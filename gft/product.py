"""The product a quantized layer computes, and the votes its backward pass casts.

    forward    y = x · weight^T                                        weight = gain · scale · levels, read out and dropped
    backward   grad_input = grad_output · weight                       ordinary, by the chain rule (paper, Eq. 2)
               votes     += q(grad_output)^T · q(x)                    instead of a weight gradient (votes.py)
               grad_gain  = sum(votes · weight) on the votes' scales   so that nothing but q(x) is kept for it

Twice: as an autograd function, for eager mode, and as operators of torch.library, for torch.compile. Both call the same two
functions, `forward` and `backward`.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from gft import ops
from gft.errors import UsageError
from gft.ops import Quantized
from gft.storage import Storage
from gft.votes import Along, Int4, Int8, Sign, Ternary, Vote, VoteAccumulator


class Layer(Protocol):
    """What is asked of a layer: gft/layers/ has them."""

    qweight: Any
    training: bool
    storage: Storage
    votes: VoteAccumulator | None
    frozen: bool
    float_shape: tuple[int, ...]
    rows: int
    columns: int

    @property
    def inputs(self) -> int: ...
    @property
    def casts(self) -> VoteAccumulator | None: ...
    def product_dtype(self, x: Tensor) -> torch.dtype: ...
    def check_input(self, x: Tensor) -> None: ...
    def stored_product(self, x: Tensor, log_gain: Tensor | None) -> Tensor: ...
    def to_read(self, stored: Tensor, log_gain: Tensor | None, like: Tensor, *,
                of_grad: bool = False) -> ops.StoredWeight: ...
    def multiplied(self, x: Tensor, weight: Tensor, log_gain: Tensor | None) -> Tensor: ...
    def multiplied_back(self, grad_output: Tensor, weight: Tensor, log_gain: Tensor | None,
                        x_shape: torch.Size) -> Tensor: ...
    def read_floats(self, weight: Tensor | None, stored: Tensor, log_gain: Tensor | None, like: Tensor) -> Tensor: ...
    def gain_slope(self) -> float: ...
    def features_last(self, x: Tensor, features: int) -> Tensor: ...
    def sequence_length(self, x_shape: torch.Size) -> int: ...
    def vote_pieces(self, x: Tensor, x_shape: torch.Size, grad: Tensor) -> Iterator[tuple[slice, Any, Tensor]]: ...
    def warn_untrained(self) -> None: ...


def forward(layer: Layer, x: Tensor, log_gain: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The layer's output, what is kept of x for the votes, and sums of x's squares by feature; the last two None if no votes
    are wanted."""
    dtype, votes = layer.product_dtype(x), layer.casts
    x = x if x.dtype is dtype else x.to(dtype)  # once, for the product and for the votes
    if votes is None or not x.numel():
        return layer.stored_product(x, log_gain), None, None
    layer.check_input(x)
    sequence = layer.sequence_length(x.shape)
    weight, quantized = votes.quantize_x(layer.features_last(x, layer.inputs), sequence, layer.training,
                                         layer.to_read(layer.qweight, log_gain, x))
    assert weight is not None
    return layer.multiplied(x, weight, log_gain), _packed(quantized.q, votes.vote.within(sequence)), quantized.squares


def backward(layer: Layer, grad_output: Tensor, saved: tuple[Tensor, Tensor | None, Tensor | None], log_gain: Tensor | None,
             x_shape: torch.Size, wants_grad_input: bool) -> tuple[Tensor | None, Tensor | None]:
    """grad_input, if it is wanted, and the gradient of the gain's logarithm, if there is one; and the votes are cast."""
    stored, kept, squares = saved
    votes = None if kept is None else layer.votes
    asks = votes is not None and (log_gain is not None or votes.reads_weight)
    read = layer.to_read(stored, log_gain, grad_output, of_grad=True)
    if votes is None or kept is None:
        if layer.casts is not None and not x_shape.numel():
            layer.casts.abstain((layer.rows, layer.columns), grad_output.device)
        elif layer.training and layer.votes is None and not layer.frozen:
            layer.warn_untrained()
        if not wants_grad_input:
            return None, None
        return layer.multiplied_back(grad_output, ops.float_levels(*read), log_gain, x_shape), None
    sequence = layer.sequence_length(x_shape)
    weight, quantized = votes.quantize_grad(layer.features_last(grad_output, layer.rows), sequence,
                                            read if wants_grad_input or (asks and not read.turned) else None)
    grad_input = None
    if wants_grad_input:
        assert weight is not None
        grad_input = layer.multiplied_back(grad_output, weight, log_gain, x_shape)
    along = None
    if asks:
        along = Along(layer.read_floats(weight, stored, log_gain, grad_output),
                      1.0 if log_gain is None else layer.gain_slope())
    weight = None  # the votes need the room
    q = _unpacked(kept, votes.vote.within(sequence), x_shape.numel() // layer.inputs, layer.inputs)
    grad_gain = votes.cast(partial(layer.vote_pieces, q, x_shape), Quantized(q, squares), quantized,
                           (layer.rows, layer.columns), sequence, along)
    if grad_gain is not None and log_gain is not None and grad_gain.dtype is not log_gain.dtype:
        grad_gain = grad_gain.to(log_gain.dtype)
    # After grad_input: the error that flows down belongs to the weights of the forward pass.
    votes.move_in_backward()
    return grad_input, grad_gain


def _packed(q: Tensor, vote: Vote) -> Tensor:
    """What is kept of quantized x (n, features): several a byte, along the axis that lies side by side."""
    if vote.bits == 8:
        return q if ops.tokens_last(q) else q.contiguous()  # as graphs are told; torch's definition may lie as x did
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
    """product(x, weight), with votes in place of the weight's gradient.

    `anchor` is an empty tensor that requires grad: it makes backward run even where x itself needs no gradient, as at
    the first layer, since an integer weight cannot ask for one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, stored: Tensor, log_gain: Tensor | None, layer: Layer) -> Tensor:
        y, kept, squares = forward(layer, x, log_gain)
        ctx.layer, ctx.x_shape = layer, x.shape
        ctx.save_for_backward(stored, kept, squares, log_gain)
        # Not as a view, which torch would not let a model change in place (`y += residual`).
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stored, kept, squares, log_gain = ctx.saved_tensors
        arguments = ctx.layer, grads[0], (stored, kept, squares), log_gain, ctx.x_shape, ctx.needs_input_grad[0]
        if not torch.is_grad_enabled():
            grad_input, grad_gain = backward(*arguments)
            return grad_input, None, None, grad_gain, None
        with torch.no_grad():  # create_graph=True
            both = backward(*arguments)
        both = tuple(None if grad is None else Once.apply(grad, grads[0]) for grad in both)
        return both[0], None, None, both[1], None


class Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again. Not torch's once_differentiable, which ties it to nothing:
    torch.autograd.functional.hessian then finds no way from it to x and answers with zeros."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, grad_output: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise UsageError("a gradient of a gradient (create_graph=True, gradient penalties, Hessians) is not taken through "
                         "integer weights; leave the layers it flows through float with filter_fn")


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


def kept_as(layer: Layer, x_shape: torch.Size) -> str:
    """The name of the quantizer of x that backward keeps; empty where none is."""
    return "" if layer.casts is None else type(layer.casts.vote.within(layer.sequence_length(x_shape))).__name__


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


# Defined by hand and not by torch.library.custom_op, whose wrappers take the host as long as all that is inside. Neither has
# a derivative: CompiledProduct ties them together, and torch.compile traces into it.
_OPERATORS = torch.library.Library("gft", "DEF")
for _signature in (
    "product(Tensor x, Tensor stored, Tensor? log_gain, Tensor handle, SymInt[] geometry, str vote) "
    "-> (Tensor, Tensor, Tensor)",
    "product_backward(Tensor grad_output, Tensor stored, Tensor kept, Tensor squares, Tensor? log_gain, Tensor handle, "
    "SymInt[] x_shape, bool wants_grad_input) -> (Tensor, Tensor, Tensor)",
):
    _OPERATORS.define(_signature, tags=(torch.Tag.cudagraph_unsafe,))


def _product_operator(x: Tensor, stored: Tensor, log_gain: Tensor | None, handle: Tensor, geometry: Sequence[int],
                      vote: str) -> tuple[Tensor, Tensor, Tensor]:
    layer = _LAYERS[int(handle)]
    y, kept, squares = forward(layer, x, log_gain) if vote else (layer.stored_product(x, log_gain), None, None)
    return (y, x.new_empty(0, dtype=torch.int8) if kept is None else kept,
            x.new_empty(0, dtype=torch.float32) if squares is None else squares)


def _product_shapes(x: Tensor, stored: Tensor, log_gain: Tensor | None, handle: Tensor, geometry: Sequence[int],
                    vote: str) -> tuple[Tensor, Tensor, Tensor]:
    y = output_shape(x, geometry)
    kept, squares = x.new_empty(0, dtype=torch.int8), x.new_empty(0, dtype=torch.float32)
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
            squares = x.new_empty(ops.runs_of(x, tokens), inputs, dtype=torch.float32)
    return y, kept, squares


def _backward_operator(grad_output: Tensor, stored: Tensor, kept: Tensor, squares: Tensor, log_gain: Tensor | None,
                       handle: Tensor, x_shape: Sequence[int], wants_grad_input: bool) -> tuple[Tensor, Tensor, Tensor]:
    saved = stored, kept if kept.numel() else None, squares if squares.numel() else None
    grad_input, grad_gain = backward(_LAYERS[int(handle)], grad_output, saved, log_gain, torch.Size(x_shape),
                                     wants_grad_input)
    if grad_gain is None:
        grad_gain = grad_output.new_empty(0, dtype=torch.float32) if log_gain is None else torch.zeros_like(log_gain)
    grad_input = (grad_output.new_empty(0) if grad_input is None
                  else grad_input.contiguous(memory_format=memory_format_of(grad_output)))
    return grad_input, grad_gain, grad_output.new_empty(0, dtype=torch.float32)


def _backward_shapes(grad_output: Tensor, stored: Tensor, kept: Tensor, squares: Tensor, log_gain: Tensor | None,
                     handle: Tensor, x_shape: Sequence[int], wants_grad_input: bool) -> tuple[Tensor, Tensor, Tensor]:
    nothing = grad_output.new_empty(0, dtype=torch.float32)
    grad_input = grad_output.new_empty(x_shape if wants_grad_input else (0,))
    if wants_grad_input:
        grad_input = grad_input.contiguous(memory_format=memory_format_of(grad_output))
    return grad_input, nothing.clone() if log_gain is None else torch.empty_like(log_gain), nothing


for _name, _run, _shapes in (("product", _product_operator, _product_shapes),
                             ("product_backward", _backward_operator, _backward_shapes)):
    _OPERATORS.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gft::{_name}", _shapes, lib=_OPERATORS)


class CompiledProduct(torch.autograd.Function):
    """`Product` in a compiled graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, stored: Tensor, log_gain: Tensor | None, handle: Tensor,
                geometry: Sequence[int], vote: str) -> Tensor:
        y, kept, squares = torch.ops.gft.product(x, stored, log_gain, handle, geometry, vote)
        ctx.x_shape = x.shape
        ctx.save_for_backward(stored, kept, squares, log_gain, handle)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stored, kept, squares, log_gain, handle = ctx.saved_tensors
        wants = ctx.needs_input_grad[0]
        # The anchor's gradient is an output of the operator, so a graph cannot drop it where nobody wants grad_input.
        grad_input, grad_gain, nothing = torch.ops.gft.product_backward(
            grads[0], stored, kept, squares, log_gain, handle, list(ctx.x_shape), wants)
        return grad_input if wants else None, nothing, None, None if log_gain is None else grad_gain, None, None, None
