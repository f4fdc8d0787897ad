"""quantize_ and dequantize_: a model's float layers onto the grid, in place, and back."""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from gft.calibrate import GPTQ
from gft.errors import UsageError
from gft.layers import (
    EIGHT_BITS,
    QUANTIZED,
    FilterFn,
    check_compute,
    check_filter,
    check_model,
    float_twin,
    is_norm,
    names_by_parameter,
    number_layers,
    quantized_layers,
    quantized_twin,
    some_names,
    tell_branches,
    twin_of,
)
from gft.sharding import is_sharded
from gft.storage import check_bits
from gft.summary import Summary, summary

LOG = logging.getLogger("gft")
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
         "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")
_REPORTS: ContextVar[bool] = ContextVar("reports", default=True)


def quantize_(model: nn.Module, bits: int = 4, filter_fn: FilterFn | None = None, *, memory: bool | str = True,
              init: str | GPTQ = "keep", bias: bool = True, gain: bool | None = None, scales: str | int = "tensor",
              compute: str | None = None, skip_tied: bool = False) -> nn.Module:
    """Replace a model's layers by ones with integer weights, in place; returns the model.

    These are nn.Linear, all convolutions, nn.MultiheadAttention, and of transformers Conv1D (GPT-2) and fused experts
    (Mixtral and its kin). filter_fn(module, name) says which; all of them without it. What was done goes to the logger "gft"
    in one line, and `gft.summary(model)` tells it any time. Call it before the optimizers are built; nothing is changed
    if it raises.

    memory: True: a byte a weight, of which the level leaves room to remember votes not yet spent. "half": half a byte, with
        two bits of such room at 2 bits, one at 3. False: the levels alone, 0.25 B at 2 bits, 0.5 B at 3 (as "half") and 4.
    init: "keep" takes the float weights over, rounded to the grid, so a model's own initialisation or a pre-trained model
        carries over; "fit" does so on the scale that loses least of them, for trained models, and gft.GPTQ(batches) also
        rounds them so that the layers' outputs change least; "paper" (90 % zeros) and "variance" (a Gaussian) start anew.
    bias: False leaves the layers' biases out: the paper's quantized layers have none.
    gain: True multiplies each layer's product by a number that AdamW learns with the biases, False by none. By default
        ternary layers have gains, and in a model without any norm all do, since nothing else lets them grow beyond their
        grids; but neither with bias=False nor from the paper's start, nor right before a batch norm, which would divide by
        the gain.
    scales: "tensor": one float a weight matrix, by which its levels are multiplied; "row": one for each of its rows; 64,
        128, …: one for so many weights of a row.
    compute: in which numbers linear layers multiply, forward and backward. None: x's float type, or autocast's. "bf16":
        bfloat16, whatever x is. "int8", "fp8": x and grad_output rounded to 8 bits, token by token, for
        which a GPU's tensor cores have twice the rate; convolutions stay as with None. Votes are the same. `layer.compute`
        changes it later.
    skip_tied: True leaves a weight float that two layers share, as a head does with an embedding; False refuses it.
    """
    check_model(model)
    check_bits(bits)
    check_filter(filter_fn)
    check_compute(compute, bits)
    if not isinstance(init, GPTQ) and init not in ("keep", "fit", "paper", "variance"):
        raise UsageError(f"init={init!r}: choose keep, fit, gft.GPTQ(batches), paper or variance")
    if twin_of(model) is not None:
        raise UsageError(f"the model is itself one {type(model).__name__} and cannot be replaced in place; use "
                         f"gft.{twin_of(model).__name__}.from_float(layer, bits={bits})")
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if twin_of(module) is not None]
    chosen = [(name, module) for name, module in named if filter_fn is None or filter_fn(module, name)]
    shared = _shared_weights(model, chosen)
    if shared and not skip_tied:
        other, name = next(iter(shared.values()))
        raise UsageError(f"{other} and {name} are one shared weight; pass skip_tied=True to leave tied weights float, leave "
                         "its layers out with filter_fn, or untie them first")
    chosen = [(name, module) for name, module in chosen if name not in shared]
    if not chosen:
        found = some_names([name for name, _ in named])
        if filter_fn is None or not found:
            raise UsageError("no layer to quantize: the model has no float linear layer, convolution or attention of a kind "
                             f"that gft knows{_why_none(model)}; print(gft.summary(model)) says why each stays as it is")
        raise UsageError("no layer to quantize: filter_fn chose none of the model's linear layers, convolutions and "
                         f"attentions ({found}); widen it")
    if any(is_sharded(parameter) for _, module in chosen for parameter in module.parameters()):
        raise UsageError("fully_shard has shared this model's weights out already; call gft.quantize_ before it")
    _refuse_other_quantizers(model)
    options: dict[str, Any] = {"memory": memory, "init": "fit" if isinstance(init, GPTQ) else init, "scales": scales}
    some_have_gains = bias and init != "paper" and (bits == 2 or not has_norms(model)) if gain is None else gain
    without = batch_normed(model) if gain is None else set()
    twins = {name: quantized_twin(module, bits, gain=some_have_gains and name not in without, **options)
             for name, module in chosen}
    _set_compute(list(twins.values()), compute)
    if isinstance(init, GPTQ):
        init.round_twins_(model, {name: (module, twins[name]) for name, module in chosen})
    for name, twin in twins.items():
        if not bias:
            for layer in quantized_layers(twin).values():
                layer.bias = None
        _keep_hooks(model.get_submodule(name), twin)
        _keep_frozen(model.get_submodule(name), twin)
        _replace(model, name, twin)
    number_layers(quantized_layers(model))
    tell_branches(model)
    _leave_fused_paths(model)
    _tell_transformers(model)
    report(summary(model), everything=filter_fn is None)
    return model


def _set_compute(twins: list[nn.Module], compute: str | None) -> None:
    """Tell those layers that can multiply so; raise if none can."""
    layers = [layer for twin in twins for layer in quantized_layers(twin).values()]
    able = [layer for layer in layers if layer.multiplies_tokens or compute not in EIGHT_BITS]
    if not able:
        raise UsageError(f'compute="{compute}" is for linear layers, and none was chosen; leave it out, or choose '
                         'compute="bf16"')
    for layer in able:
        layer.compute = compute


def _why_none(model: nn.Module) -> str:
    if quantized_layers(model):
        return " (its layers are integers already)"
    left = next(iter(summary(model).floats), None)
    return "" if left is None else f" (the largest part, {left.largest or 'itself'}, {left.name}: {left.why})"


def dequantize_(model: nn.Module) -> nn.Module:
    """Replace every quantized layer by a float one with the same values, in place; returns the model."""
    check_model(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QUANTIZED)}
    if not layers or isinstance(model, QUANTIZED):
        raise UsageError("no quantized layer inside this model; for a single layer call its to_float()")
    if any(is_sharded(layer.qweight) for layer in quantized_layers(model).values()):
        raise UsageError("fully_shard has shared this model's weights out; load its checkpoint into a model that is whole, "
                         "and call gft.dequantize_ there")
    for name, layer in layers.items():
        if not any(name.startswith(f"{other}.") for other in layers):  # a part of another goes with it
            twin = float_twin(layer)
            _keep_hooks(layer, twin)
            trains = any(not part.frozen for part in quantized_layers(layer).values())
            for weight in (parameter for parameter in twin.parameters() if parameter.dim() > 1):
                weight.requires_grad_(trains)
            _replace(model, name, twin)
    _tell_transformers(model)
    return model


def has_norms(model: nn.Module) -> bool:
    """Is there a normalisation layer?"""
    return any(is_norm(module) for module in model.modules())


def batch_normed(model: nn.Module) -> set[str]:
    """The names of the convolutions and linear layers whose outputs go right into a batch norm, as structure tells: the
    next module beside it is one, of as many features. It divides by their size, and so by a gain before it.
    """
    found = set()
    for parent, module in model.named_modules():
        for (name, one), (_, following) in pairwise(module.named_children()):
            if isinstance(one, (_ConvNd, nn.Linear)) and isinstance(following, _BatchNorm):
                outputs = one.out_features if isinstance(one, nn.Linear) else one.out_channels
                if outputs == following.num_features:
                    found.add(f"{parent}.{name}" if parent else name)
    return found


def _shared_weights(model: nn.Module, chosen: list[tuple[str, nn.Module]]) -> dict[str, tuple[str, str]]:
    """Those of the chosen layers whose weight has another name, too, with both names: it would become two weights that
    drift apart."""
    users, shared = names_by_parameter(model), {}
    for name, module in chosen:
        for parameter in module.parameters():
            names = users[id(parameter)]
            if parameter.dim() > 1 and len(names) > 1:
                shared[name] = names[0], names[1]
    return shared


def _refuse_other_quantizers(model: nn.Module) -> None:
    """transformers saves a model by the one quantizer it knows of it."""
    for module in model.modules():
        config = getattr(getattr(module, "hf_quantizer", None), "quantization_config", None)
        if config is not None and config.quant_method != "gft":
            raise UsageError(f"this model is quantized by another method already ({type(config).__name__}); load it without "
                             "that quantization_config first")


def _keep_hooks(module: nn.Module, twin: nn.Module) -> None:
    """What a user has hung on a layer goes on with its twin."""
    for name in HOOKS:
        getattr(twin, name).update(getattr(module, name))
    twin._is_full_backward_hook = module._is_full_backward_hook


def _keep_frozen(module: nn.Module, twin: nn.Module) -> None:
    """A weight that a user has frozen stays so, and whatever would scale it; a bias is its own affair."""
    if not any(parameter.requires_grad for parameter in module.parameters() if parameter.dim() > 1):
        for layer in quantized_layers(twin).values():
            layer.frozen = True
            if layer.log_gain is not None:
                layer.log_gain.requires_grad_(False)


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, child, layer)


def _tell_transformers(model: nn.Module) -> None:
    """A model of transformers saves itself, and must know what its layers are now, or it would be loaded wrong without a
    word. Looked up by name: this room knows nothing of that library, and nothing is imported for other models."""
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is not None and any(isinstance(module, loaded.PreTrainedModel) for module in model.modules()):
        importlib.import_module("gft.integrations.hf.quantizer").attach(model)


def _leave_fused_paths(model: nn.Module) -> None:
    """torch's transformer encoder hands its layers' float weights to one kernel at inference; these are its own
    switches for "not applicable"."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and quantized_layers(module):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and quantized_layers(module):
            module.use_nested_tensor = False


@contextmanager
def unreported() -> Iterator[None]:
    """Where `quantize_` is called several times to build one model, whose builder tells in the end what became of it."""
    before = _REPORTS.set(False)
    try:
        yield
    finally:
        _REPORTS.reset(before)


def report(done: Summary, everything: bool = False) -> None:
    """One line to the log; louder where the user asked for all of the model and got the smaller part."""
    if not _REPORTS.get():
        return
    if everything and done.share < 0.5:
        most = done.floats[0]
        LOG.warning("%s; the largest part left float is %s (%s), %s", done.line(), most.largest or "the model itself",
                    most.name, most.why)
    else:
        LOG.info("%s", done.line())
