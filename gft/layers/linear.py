"""QuantLinear: nn.Linear with an integer weight."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from gft import ops
from gft.errors import UsageError
from gft.layers.layer import QuantLayer, exporting, give_back, take_over
from gft.storage import Storage


class QuantLinear(QuantLayer):
    """nn.Linear with an integer weight.

    bits: 2 (ternary) to 8. Fewer bits, less memory and a coarser weight.
    memory: True keeps unspent votes in the rest of a byte a weight (1 B a weight, trains best). False packs the levels
        (0.25 B at 2 bits, 0.5 B at 3 and 4, where the bit that 3 leave over counts half levels) and keeps nothing else.
        "half" takes half a byte also at 2 bits, whose two bits to spare then count quarters of a level.
    gain: True multiplies the product by a learnt number, for ternary layers and networks without norms. `gft.quantize_`
        decides by itself.
    scales: "tensor": one fixed float that all levels are multiplied by. "row": one for each output. 64, 128, …: one for so
        many weights of a row: the closest to a trained float weight, at 2 B for each.

    Starts with the levels of a Gaussian of deviation 1/sqrt(in_features); `start_("paper")` with 90 % zeros.
    """

    multiplies_tokens = True
    transposed_type: type[nn.Module] | None = None  # of the float layer, if its weight lay the other way round, (in, out)

    def __init__(self, in_features: int, out_features: int, bits: int = 4, bias: bool = False, *, memory: bool | str = True,
                 gain: bool = False, scales: str | int = "tensor", device: torch.device | str | None = None) -> None:
        super().__init__((out_features, in_features), Storage.as_asked(bits, memory), bias=bias, gain=gain, scales=scales,
                         device=device)
        self.in_features, self.out_features = in_features, out_features
        self.start_("variance")

    @classmethod
    def from_float(cls, linear: nn.Linear, bits: int = 4, *, memory: bool | str = True, init: str = "keep",
                   gain: bool = False, scales: str | int = "tensor") -> "QuantLinear":
        """The layer on the grid nearest to `linear`; its bias is taken over as it is. init="fit" is for trained weights,
        "paper" starts anew (gft.quantize_)."""
        layer = cls.__new__(cls)
        QuantLayer.__init__(layer, (linear.out_features, linear.in_features), Storage.as_asked(bits, memory), gain=gain,
                            scales=scales, device=linear.weight.device, dtype=linear.weight.dtype)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        return take_over(layer, linear, init)

    def to_float(self) -> nn.Linear:
        """An nn.Linear with the float values used in forward."""
        linear = skip_init(nn.Linear, self.in_features, self.out_features, self.bias is not None,
                           device=self.qweight.device, dtype=self.dtype)
        return give_back(self, linear)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        if exporting() or torch.compiler.is_compiling():
            return F.linear(x, weight)
        return ops.multiply(x, weight.t())

    def check_input(self, x: Tensor) -> None:
        if x.shape[-1] != self.columns:
            raise UsageError(f"QuantLinear(in_features={self.in_features}) was given x of shape {tuple(x.shape)}; its last "
                             f"size must be {self.in_features}")

    def stored_product(self, x: Tensor, log_gain: Tensor | None) -> Tensor:
        if x.numel() > ops.FEW_ROWS * self.columns:
            return super().stored_product(x, log_gain)
        self.check_input(x)
        rows, scale = x.reshape(-1, self.columns), None
        if self.eight_bits is not None:  # rounded likewise; they take as long as reading the weight does, in any type
            rows, scale = ops.round_tokens(rows, self.eight_bits)
            rows = rows.to(torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32)
        y = ops.linear(rows, self.qweight.detach(), self.storage, self.scaling(log_gain))
        if scale is not None:
            y = (y * scale[:, None]).to(x.dtype)
        return y.view(*x.shape[:-1], self.rows)

    def scaled_product(self, x: Tensor, log_gain: Tensor | None = None) -> Tensor:
        if self.eight_bits is None or exporting() or not torch.compiler.is_compiling():
            return super().scaled_product(x, log_gain)
        x = x.to(self.product_dtype(x))
        return torch.ops.gft.product(x, self.qweight, log_gain, self._handle, self.geometry, "")[0]

    def rounded_to(self, like: Tensor) -> torch.dtype | None:
        if self.eight_bits is not None:
            return self.eight_bits
        one_scale = self.scale.dim() == 0 or self.scale.shape[1] == 1  # a row, which can be taken out of the sum
        return ops.FIXED if one_scale and ops.prefers_fixed(like, self.rows * self.columns) else None

    def multiplied(self, x: Tensor, weight: Tensor, log_gain: Tensor | None) -> Tensor:
        whole = self.rounded_to(x)
        if whole is None:
            return super().multiplied(x, weight, log_gain)
        scaling = self.scaling(log_gain)
        tokens = ops.round_tokens(x.reshape(-1, self.columns), whole, scaling)
        y = ops.multiply_tokens(tokens, weight, x.dtype, _one_each(scaling.by_group))
        return y.view(*x.shape[:-1], self.rows)

    def multiplied_back(self, grad_output: Tensor, weight: Tensor, log_gain: Tensor | None, x_shape: torch.Size) -> Tensor:
        whole = self.rounded_to(grad_output)
        if whole is None:
            return super().multiplied_back(grad_output, weight, log_gain, x_shape)
        scaling = self.scaling(log_gain)  # a scale for each row goes into grad_output: the sum is over rows here
        tokens = ops.round_tokens(grad_output.reshape(-1, self.rows), whole, scaling, _one_each(scaling.by_group))
        levels = weight if grad_output.is_cuda else weight.t()  # as `to_read` had them read out
        return ops.multiply_tokens(tokens, levels, grad_output.dtype).view(x_shape)

    def grad_input(self, grad_output: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        return ops.multiply(grad_output, weight)

    @property
    def inputs(self) -> int:
        return self.in_features

    @property
    def geometry(self) -> list[int]:
        return [self.rows]

    def features_last(self, x: Tensor, features: int) -> Tensor:
        return x.reshape(-1, features)

    def sequence_length(self, x_shape: torch.Size) -> int:
        return math.prod(x_shape[1:-1]) if len(x_shape) > 2 else 1

    def vote_pieces(self, x: Tensor, x_shape: torch.Size, grad: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        yield slice(None), x, grad

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {super().extra_repr()}"


def _one_each(scales: Tensor | None) -> Tensor | None:  # (rows, 1) -> (rows,) float32
    return None if scales is None else scales[:, 0].float()


def linear_of(weight: Tensor,  # (out, in)
              bias: nn.Parameter | None) -> nn.Linear:
    """An nn.Linear over a weight that another kind of layer holds, which is neither copied nor trained by it."""
    linear: Any = skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight, linear.bias = nn.Parameter(weight.detach(), requires_grad=False), bias
    return linear
