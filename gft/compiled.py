"""A linear layer in a graph of torch.compile, in parts that Inductor can launch itself.

    forward    weight, q(x) = prepare(x, …)                a Triton kernel, launched by the graph
               y = x · weight^T                            torch's product
    backward   weight, q(grad_output) = prepare(…)         likewise
               grad_input = grad_output · weight
               cast(q(grad_output), q(x))                  an operator that runs Python: votes go to their accumulator

The two operators of product.py would do as well and are all that other layers have, but the graph cannot look into them: all
their launches, and all products, then go through Python, which takes the host longer than the GPU needs.

`prepare` is a function of tensors alone (panel.py says which). Where Inductor compiles for a GPU it is traced into, down to
the launch of its kernel; elsewhere it runs as an operator, by the definitions.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from gft import ops
from gft.ops import Quantized
from gft.philox import NoiseKey
from gft.product import OPERATORS, Layer, layer_of_handle
from gft.storage import Storage
from gft.votes import INT32_BOUND, Along, Int8, fixed_point_factors

VOTE = Int8()  # the only quantizer whose q(x) is kept as it is, and the default
X, GRAD_OUTPUT = 1, 2  # purposes of noise (VoteAccumulator.key)
DEVICES = {"cuda"}  # elsewhere nobody launches kernels, and an operator costs no more than its parts

OPERATORS.define("prepare(Tensor values, Tensor[] noise, Tensor[] weight, int[] layout, int purpose) "
                 "-> (Tensor, Tensor, Tensor, Tensor)")
OPERATORS.define("cast(Tensor grad_q, Tensor grad_squares, Tensor q, Tensor squares, Tensor? log_gain, Tensor weight, "
                 "Tensor handle) -> (Tensor, Tensor)", tags=(torch.Tag.cudagraph_unsafe,))


def tensors_of(layer: Any, x: Tensor) -> tuple[Tensor, ...] | None:
    """All that the graph of a layer reads, besides x and the gain, if the layer can be compiled in parts for this x."""
    votes = layer.casts
    if votes is None or votes.panel is None or type(votes.vote) is not Int8 or votes.in_backward:
        return None
    panel = votes.panel
    if x.device.type not in DEVICES or x.device != panel.key.device or not isinstance(votes.step, Tensor):
        return None
    if not 0 < x.numel() // layer.columns * VOTE.largest**2 < INT32_BOUND:
        return None
    return (layer.qweight, layer.scale, panel.x_factors, panel.grad_factors, panel.key, votes.step, panel.uses.count,
            panel.not_finite, layer._handle)


class CompiledLinear(torch.autograd.Function):
    """product.Product of a linear layer, in parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, log_gain: Tensor | None, layout: Sequence[int],
                *tensors: Tensor) -> Tensor:
        """tensors: what `tensors_of` gives."""
        stored, scale, x_factors, grad_factors, key, step, count, not_finite, handle = tensors
        weight = [stored, scale] if log_gain is None else [stored, scale, log_gain]
        read, q, squares, used = torch.ops.gft.prepare(x.reshape(-1, x.shape[-1]), [x_factors, key, step, count, not_finite],
                                                       weight, layout, X)
        ctx.save_for_backward(q, squares, used, grad_factors, key, step, not_finite, handle, *weight)
        ctx.layout, ctx.gain = layout, log_gain is not None
        return F.linear(x, read)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, squares, used, grad_factors, key, step, not_finite, handle, *weight = ctx.saved_tensors
        grad_output, log_gain = grads[0], weight[2] if ctx.gain else None
        read, grad_q, grad_squares, _ = torch.ops.gft.prepare(
            grad_output.reshape(-1, grad_output.shape[-1]), [grad_factors, key, step, used, not_finite], weight, ctx.layout,
            GRAD_OUTPUT)
        grad_input = torch.matmul(grad_output, read) if ctx.needs_input_grad[0] else None
        grad_gain, nothing = torch.ops.gft.cast(grad_q, grad_squares, q, squares, log_gain, read, handle)
        return grad_input, nothing, grad_gain if ctx.gain else None, *[None] * 10


def _prepare(values: Tensor, noise: Sequence[Tensor], weight: Sequence[Tensor], layout: Sequence[int],
             purpose: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """values (n, features) and a weight -> the weight as floats, q of values, the sums of its squares, and the number of
    the call whose noise it was. noise: factors, key, step, call, not_finite."""
    factors, key, step, call, not_finite = noise
    (stored, scale, *gain), (columns, bits, memory) = weight, layout
    seed, number = key[:2].tolist()
    if not bool(factors[0] > 0):
        factors = fixed_point_factors(VOTE, ops.mean_square(values).sqrt())
    scaling = ops.Scaling(scale if scale.dim() else None, gain[0] if gain else None, 1.0 if scale.dim() else float(scale),
                          columns**0.5)
    read, quantized = ops.read_and_quantize(
        ops.StoredWeight(stored, Storage(bits, bool(memory)), columns, values.dtype, scaling), values, factors, VOTE.largest,
        NoiseKey(seed % 2**64, step, 3 * number + purpose, int(call)), not_finite if purpose == GRAD_OUTPUT else None)
    assert quantized.squares is not None
    q = quantized.q if ops.tokens_last(quantized.q) else quantized.q.contiguous()
    return read, q, quantized.squares, call.reshape(1).clone()


def _prepare_shapes(values: Tensor, noise: Sequence[Tensor], weight: Sequence[Tensor], layout: Sequence[int],
                    purpose: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, features = values.shape
    q = (values.new_empty(features, tokens, dtype=torch.int8).t() if ops.tokens_last(values)
         else values.new_empty(tokens, features, dtype=torch.int8))
    return (values.new_empty(weight[0].shape[0], layout[0]), q,
            values.new_empty(ops.runs_of(values, tokens), features, dtype=torch.float32),
            values.new_empty(1, dtype=torch.int64))


def _prepare_in_graph(mode: Any, operator: Any, types: Any, arguments: Any, named: Any = None) -> Any:
    """Where a graph is made for a GPU: the launch in the operator's place."""
    launch = ops.twins("cuda").get("graph_prepare") if arguments[0].is_cuda else None
    if launch is None:
        return mode.__torch_dispatch__(operator, types, arguments, named or {})
    with mode:
        return launch(*arguments, (VOTE.largest, VOTE.unit))


def _cast(grad_q: Tensor, grad_squares: Tensor, q: Tensor, squares: Tensor, log_gain: Tensor | None, weight: Tensor,
          handle: Tensor) -> tuple[Tensor, Tensor]:
    layer: Layer = layer_of_handle(handle)
    votes, shape = layer.votes, (layer.rows, layer.columns)
    grad_gain = None
    if votes is not None:
        along = None if log_gain is None else Along(weight, layer.gain_slope())
        grad_gain = votes.cast(lambda grad: ((slice(None), q, grad),), Quantized(q, squares),
                               Quantized(grad_q, grad_squares), shape, 1, along)
        if votes.panel is not None:
            votes.panel.uses.at_least(votes.backwards)
    nothing = squares.new_empty(0)
    if log_gain is None:
        return squares.new_empty(0), nothing
    return torch.zeros_like(log_gain) if grad_gain is None else grad_gain.to(log_gain.dtype), nothing


def _cast_shapes(grad_q: Tensor, grad_squares: Tensor, q: Tensor, squares: Tensor, log_gain: Tensor | None, weight: Tensor,
                 handle: Tensor) -> tuple[Tensor, Tensor]:
    return squares.new_empty(0) if log_gain is None else torch.empty_like(log_gain), squares.new_empty(0)


for _name, _run, _shapes in (("prepare", _prepare, _prepare_shapes), ("cast", _cast, _cast_shapes)):
    OPERATORS.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gft::{_name}", _shapes, lib=OPERATORS)
torch.library.register_torch_dispatch("gft::prepare", FunctionalTensorMode, _prepare_in_graph, lib=OPERATORS)
