"""GPTQ: round a trained weight so that what its layer computes changes least, on some batches of data.

Rounding each weight to its nearest level loses least of the weights, but not of their products with x. What the products
lose is, for each row w of the weight and its levels q on their scale,

    |x · (w - q)|²  =  (w - q) · H · (w - q)^T          H = mean of x^T x over all tokens, (columns, columns)

GPTQ (Frantar et al. 2023) rounds one column after the other and lets the columns that are still to come make up for what it
lost, as far as H says that they can: with U the upper Cholesky factor of the inverse of H,

    error = (w_i - q_i) / U_ii         w_j <- w_j - error · U_ij      for j > i

Columns with the largest x go first, while there is most left to make up for them.

    gft.quantize_(model, bits=2, scales="row", init=gft.GPTQ(batches))
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gft.errors import UsageError, UsageTypeError
from gft.initialize import in_levels
from gft.layers import QuantLayer, is_transposed_linear, quantized_layers, some_names
from gft.settings import check_number

LOG = logging.getLogger("gft")
AT_ONCE = 128  # columns rounded before the others are told


@dataclass(frozen=True, eq=False)
class GPTQ:
    """A start for `gft.quantize_(init=…)`: the rounding that changes a layer's outputs least on some batches.

    batches: what the model is called with: each a tensor, a tuple or list of arguments, or a dict of named ones. A tuple may
        hold more than the model takes, so a DataLoader of (x, y) pairs will do if it takes x alone. A hundred images or some
        ten thousand tokens are enough; one pass is made over them, without gradients.
    damping: added to the diagonal of H, as a share of its mean. At 0 columns that hardly vary fail to be inverted; at 1 the
        rounding is nearly the plain one.
    forward: how the model is called, if not so: lambda model, batch: model(batch["image"].cuda()).

    Transposed convolutions, and layers and experts that no batch reaches, start by init="fit"; the logger "gft" names them.
    For each layer a float32 matrix of (inputs, inputs) is held until all are rounded.
    """

    batches: Iterable[Any]
    damping: float = 0.01
    forward: Callable[[nn.Module, Any], Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batches, (Tensor, Mapping)) or not isinstance(self.batches, Iterable):
            raise UsageTypeError(f"GPTQ takes an iterable of batches, not one {type(self.batches).__name__}; give [batch]")
        if self.forward is not None and not callable(self.forward):
            raise UsageTypeError(f"forward is a function of the model and a batch, not a {type(self.forward).__name__}; "
                                 "give forward=lambda model, batch: model(batch[0])")
        check_number("damping", self.damping, 0.0, 1.0, "it is a share of the mean of H's diagonal")

    def round_twins_(self, model: nn.Module, pairs: Mapping[str, tuple[nn.Module, nn.Module]]) -> None:
        """Round the twin of each of the model's float layers whose inputs the batches show."""
        if any(parameter.is_meta for module, _ in pairs.values() for parameter in module.parameters()):
            raise UsageError("GPTQ needs the weights, and this model's are on the meta device; load them first")
        opened = {module: type(twin).opened(module).eval()  # type: ignore[attr-defined]
                  for module, twin in pairs.values() if not isinstance(twin, QuantLayer)}
        layers = {f"{name}.{part}".rstrip("."): (opened[module].get_submodule(part) if part else module, layer)
                  for name, (module, twin) in pairs.items() for part, layer in quantized_layers(twin).items()}
        hessians = self.measure(model, [module for module, _ in layers.values()], opened)
        for module, layer in layers.values():
            if module in hessians:
                weight = module.weight.t() if is_transposed_linear(module) else module.weight  # type: ignore[operator]
                self.round_(layer, weight, hessians[module])  # type: ignore[arg-type]
        unseen = [name for name, (module, _) in layers.items() if module not in hessians]
        if unseen:
            LOG.warning('GPTQ saw no inputs of %d of %d layers, which start by init="fit": %s', len(unseen), len(layers),
                        some_names(unseen))

    def measure(self, model: nn.Module, layers: Iterable[nn.Module],
                opened: Mapping[nn.Module, nn.Module]) -> dict[nn.Module, Tensor]:
        """H of each layer's inputs, (groups, columns, columns): one but in grouped convolutions. opened: for modules that
        multiply by their weights without layers, others that do it by layers, which compute beside them."""
        found: dict[nn.Module, Tensor] = {}
        counts: dict[nn.Module, int] = {}

        def note(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            rows = rows_of(module, next(iter((*inputs, *named.values()))).detach())
            if rows.shape[1]:
                product = torch.einsum("gni,gnj->gij", rows, rows)
                found[module] = found[module] + product if module in found else product
                counts[module] = counts.get(module, 0) + rows.shape[1]

        def open_up(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            opened[module](*inputs, **named)

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers
                 if rows_by_type(layer) is not None]
        hooks += [module.register_forward_pre_hook(open_up, with_kwargs=True) for module in opened]
        was_training = {module for module in model.modules() if module.training}
        encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
        nests = [module for module in encoders if module.use_nested_tensor]
        try:
            model.eval()
            for module in nests:  # in evaluation torch's encoder leaves padding out by tensors whose rows cannot be seen
                module.use_nested_tensor = False
            with torch.no_grad():
                for batch in self.batches:
                    (self.forward or call)(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
            for module in was_training:
                module.training = True
            for module in nests:
                module.use_nested_tensor = True
        if not found:
            raise UsageError("no batch reached a layer that is to be quantized; give GPTQ inputs of this model")
        if not all(bool(product.isfinite().all()) for product in found.values()):
            raise UsageError("the batches give a layer inputs that are NaN or inf; give GPTQ batches without them")
        return {module: product / counts[module] for module, product in found.items()}

    def round_(self, layer: QuantLayer, weight: Tensor, hessian: Tensor) -> None:
        """Give a layer the levels that change its outputs least; its scales stay as they are."""
        rows = weight.detach().float().reshape(layer.rows, layer.columns)
        positions = in_levels(rows, layer.scale)
        share = layer.rows // len(hessian)
        levels = torch.cat([rounded_for_outputs(rows[group * share : (group + 1) * share],
                                                _scale_of_rows(layer, group * share, share), one, layer.storage.largest,
                                                self.damping) for group, one in enumerate(hessian)])
        # What is left of the float weight goes into the memory, but less than half a level: the level would follow it there.
        most = max(layer.storage.resolution // 2 - 1, 0) / layer.storage.resolution
        rest = (positions - levels).clamp(-most, most) if layer.storage.memory_bits else 0.0
        layer.qweight.data.copy_(layer.storage.store_nearest(levels + rest))


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a tensor, named arguments, or a tuple of which it gets as many as it takes."""
    named: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    given: tuple[Any, ...] = () if named else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    signature = inspect.signature(model.forward)
    kinds = [one.kind for one in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        given = given[: sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                            for kind in kinds)]
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        raise UsageError(f"GPTQ cannot call {type(model).__name__} with such a batch ({error}); say how: "
                         "gft.GPTQ(batches, forward=lambda model, batch: model(…))") from None
    return model(*given, **named)


def _scale_of_rows(layer: QuantLayer, start: int, rows: int) -> Tensor:  # (rows, columns)
    """Every weight's own scale."""
    return layer.scales_by_group()[start : start + rows].repeat_interleave(layer.group, 1).expand(rows, layer.columns)


# ---------------------------------------------------------------------------------------------------- a layer's inputs


def rows_by_type(module: nn.Module) -> Callable[[Any, Tensor], Tensor] | None:
    """How the inputs of such a layer are laid out as (groups, n, columns); None where this is not known."""
    return _transposed_linear_rows if is_transposed_linear(module) else ROWS.get(type(module))


def rows_of(module: nn.Module, x: Tensor) -> Tensor:  # (groups, n, columns) float32
    """What each output of the layer is a product of its weight with."""
    function = rows_by_type(module)
    assert function is not None
    return function(module, x.float())


def _linear_rows(linear: nn.Linear, x: Tensor) -> Tensor:
    return x.reshape(1, -1, linear.in_features)


def _transposed_linear_rows(linear: Any, x: Tensor) -> Tensor:
    return x.reshape(1, -1, linear.weight.shape[0])


def _convolution_rows(conv: Any, x: Tensor) -> Tensor:
    dims = len(conv.kernel_size)
    x = x if x.dim() == dims + 2 else x[None]
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, conv._reversed_padding_repeated_twice, mode)  # nothing when it is "valid"
    for dim, (kernel, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)):
        x = x.unfold(2 + dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]  # a view
    # (images, channels, positions …, kernel …) -> (groups, images · positions, channels of a group · kernel)
    x = x.flatten(2 + dims).flatten(2, 1 + dims).unflatten(1, (conv.groups, -1))
    return x.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)


ROWS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.Linear: _linear_rows, nn.Conv1d: _convolution_rows, nn.Conv2d: _convolution_rows, nn.Conv3d: _convolution_rows}


# ---------------------------------------------------------------------------------------------------- the rounding


def rounded_for_outputs(weight: Tensor,  # (rows, columns) float32
                        scale: Tensor,  # (rows, columns): of each weight
                        hessian: Tensor,  # (columns, columns)
                        largest: int,
                        damping: float) -> Tensor:  # (rows, columns) float32, whole numbers
    """The levels whose products with x differ least from the weight's, column by column."""
    order = torch.argsort(hessian.diagonal(), descending=True)
    weight, scale = weight[:, order].clone(), scale[:, order]
    upper = _inverse_factor(hessian[order][:, order], damping)
    levels, columns = torch.zeros_like(weight), weight.shape[1]
    for start in range(0, columns, AT_ONCE):
        stop = min(start + AT_ONCE, columns)
        errors = torch.zeros_like(weight[:, start:stop])
        for column in range(start, stop):
            levels[:, column] = (weight[:, column] / scale[:, column]).round().clamp(-largest, largest)
            error = (weight[:, column] - levels[:, column] * scale[:, column]) / upper[column, column]
            weight[:, column:stop] -= error[:, None] * upper[column, column:stop]
            errors[:, column - start] = error
        weight[:, stop:] -= errors @ upper[start:stop, stop:]
    return torch.empty_like(levels).index_copy_(1, order, levels)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of a damped H."""
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    damped = hessian + torch.diag(torch.where(diagonal > 0, damping * mean, mean.clamp_min(1e-12)))
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        raise UsageError(f"H of a layer's inputs cannot be inverted with damping={damping}; raise it, or give more batches")
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
