"""QuantExperts: the experts of a mixture, which transformers keeps in three-dimensional parameters, as integer layers.

    gate_up_proj (experts, 2 · inner, hidden)      -> gate_up: one QuantLinear an expert
    down_proj    (experts, hidden, inner)          -> down:    one QuantLinear an expert

    y[t] = sum over the experts e that token t goes to of   weight[t, e] · down_e(gate(gate_up_e(x[t])))

An expert that no token goes to casts no votes and stays where it is.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gft.layers.layer import exporting, require_grad
from gft.layers.linear import QuantLinear, linear_of

UP = ("gate_up_proj", "up_proj")  # with a gate, and without
ALLOWED = {name + end for name in (*UP, "down_proj") for end in ("", "_bias")}


def are_fused_experts(module: nn.Module) -> bool:
    """Is this a module of transformers with its experts in three-dimensional parameters? By its attributes, since there are
    dozens of such classes. Those that say how their weights lie (`has_bias`, `is_transposed`) and gate (`_apply_gate`) are
    interchangeable by transformers' own rules; others may compute anything and are left alone."""
    if "down_proj" not in module._parameters:
        return False
    own = dict(module.named_parameters())
    if not own.keys() <= ALLOWED or sum(name in own for name in UP) != 1:
        return False
    if any(own[name].dim() != 3 for name in own if name.endswith("_proj")) or any(True for _ in module.buffers()):
        return False
    says_how = all(hasattr(module, name) for name in ("num_experts", "has_bias", "is_transposed", "_apply_gate"))
    takes = [one for one in inspect.signature(module.forward).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    return says_how and len(takes) == 3 and not getattr(module, "_is_expert_parallel", False)


class QuantExperts(nn.Module):
    """The experts of a mixture with integer weights, made by `from_float` of a module of transformers (Mixtral, Qwen, OLMoE,
    DeepSeek, GPT-OSS and their kin). Called as that is: with tokens, the experts that each goes to, and their weights."""

    def __init__(self, float_experts: nn.Module, bits: int = 4, **settings: Any) -> None:
        self._take_over(float_experts, lambda linear: QuantLinear.from_float(linear, bits, **settings))

    def _take_over(self, float_experts: nn.Module, layer_of: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self._up_name = "gate_up_proj" if hasattr(float_experts, "gate_up_proj") else "up_proj"
        self.num_experts: int = len(float_experts.down_proj)  # type: ignore[arg-type]
        self.gate_up, self.down = (nn.ModuleList(layer_of(linear) for linear in _linears(float_experts, name))
                                   for name in (self._up_name, "down_proj"))
        # All but the weights: how a gate is computed, and what dequantize_ gives them back to. In a tuple, where torch does
        # not look for parameters: it has none.
        self._shell = (_without_weights(float_experts),)
        self.train(float_experts.training)

    @classmethod
    def from_float(cls, experts: nn.Module, bits: int = 4, **settings: Any) -> "QuantExperts":
        """The experts on the grids nearest to theirs; the settings are those of QuantLinear.from_float."""
        return cls(experts, bits, **settings)

    @classmethod
    def opened(cls, experts: nn.Module) -> nn.Module:
        """A float module that computes what `experts` does, with its weights, by layers whose inputs hooks can see."""
        layer = cls.__new__(cls)
        layer._take_over(experts, lambda linear: linear)
        return layer

    def requires_grad_(self, requires_grad: bool = True) -> "QuantExperts":
        """False freezes all of them, True lets them train again."""
        return require_grad(self, requires_grad)

    def to_float(self) -> nn.Module:
        """The module of transformers that this was, with the float values used in forward."""
        experts: Any = _without_weights(self._shell[0])
        for name, layers in ((self._up_name, self.gate_up), ("down_proj", self.down)):
            linears = [layer.to_float() for layer in layers]  # type: ignore[operator]
            weight = torch.stack([linear.weight.detach() for linear in linears])
            setattr(experts, name, nn.Parameter(weight.transpose(1, 2).contiguous() if experts.is_transposed else weight))
            if experts.has_bias:
                biases = [torch.zeros_like(linear.weight[:, 0]) if linear.bias is None else linear.bias.detach()
                          for linear in linears]
                setattr(experts, f"{name}_bias", nn.Parameter(torch.stack(biases)))
        return experts.train(self.training)

    def forward(self, hidden_states: Tensor,  # (tokens, hidden)
                top_k_index: Tensor,  # (tokens, k) which experts
                top_k_weights: Tensor) -> Tensor:  # (tokens, k) -> (tokens, hidden)
        way = self._every_expert if exporting() else self._chosen_experts
        return way(hidden_states, top_k_index, top_k_weights)

    @torch.compiler.disable(reason="which experts run depends on the data; compile without fullgraph=True")
    def _chosen_experts(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if not 0 <= expert < self.num_experts:  # transformers' way to say: none
                continue
            tokens, place = torch.where(top_k_index == expert)
            part = self._output_of(expert, hidden_states[tokens]) * top_k_weights[tokens, place, None]
            y = y.index_add(0, tokens, part.to(y.dtype))
        return y

    def _every_expert(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The same for a graph that is written down, in which sizes must not depend on values: every expert computes every
        token, and counts with weight 0 where it was not chosen."""
        chosen = (top_k_index >= 0) & (top_k_index < self.num_experts)
        weights = hidden_states.new_zeros(hidden_states.shape[0], self.num_experts)
        weights = weights.scatter_add(1, top_k_index.clamp(0, self.num_experts - 1),
                                      (top_k_weights * chosen).to(weights.dtype))
        y = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            y = y + (self._output_of(expert, hidden_states) * weights[:, expert, None]).to(y.dtype)
        return y

    def _output_of(self, expert: int, x: Tensor) -> Tensor:
        shell: Any = self._shell[0]
        inner = self.gate_up[expert](x)
        inner = shell._apply_gate(inner) if self._up_name == "gate_up_proj" else shell.act_fn(inner)
        return self.down[expert](inner)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}"


def _linears(experts: Any, name: str) -> Iterator[nn.Linear]:
    """One for each expert, over a slice of the parameter."""
    weights, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    for expert, weight in enumerate(weights.detach()):
        bias = None if biases is None else nn.Parameter(biases[expert].detach().clone())
        yield linear_of(weight.t() if experts.is_transposed else weight, bias)


def _without_weights(experts: nn.Module) -> nn.Module:
    """A copy of a module that shares everything but its parameters, of which it has none."""
    copy = experts.__class__.__new__(experts.__class__)
    copy.__dict__.update(experts.__dict__)
    copy._parameters = {}
    return copy
