"""QuantLayer: what all layers whose weight is a matrix of small integers share.

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

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gft import ops
from gft.errors import UsageError, UsageTypeError, shortened
from gft.initialize import STARTS, fitted_scale, groups_a_row, in_levels, kept_scale, scale_of
from gft.layers import reading
from gft.layers.computing import EIGHT_BITS, check_compute
from gft.layers.registry import register
from gft.product import CompiledProduct, Product, handle_of, kept_as
from gft.sharding import all_rows, handed_out, is_sharded, of_first_rank, own_rows
from gft.storage import HALF, Storage, field_bits, unpack_fields
from gft.votes import Seen, VoteAccumulator


def exporting() -> bool:
    """Is the model being written down as a graph of torch's own operators (torch.export, torch.onnx, torch.jit.trace)?
    Whoever loads that graph has neither gft nor an optimizer: it reads the levels and casts no votes."""
    # The flag, not torch.compiler.is_exporting(): before torch 2.13 that says True inside of torch.compile, too.
    return getattr(torch.compiler, "_is_exporting_flag", False) or torch.jit.is_tracing()


def scale_version(scale: Tensor) -> float:
    """A number that another one follows when the scale changes; one made in inference_mode does not count its changes, and
    gets a NaN, which no version equals."""
    return math.nan if scale.is_inference() else scale._version


class QuantLayer(nn.Module):
    """What linear and convolution share: the stored weight, its scale, its votes, its life in a state_dict."""

    qweight: nn.Parameter
    scale: Tensor
    log_gain: nn.Parameter | None
    bias: nn.Parameter | None
    votes: VoteAccumulator | None  # given by the optimizer
    frozen: bool = False  # by requires_grad_(False): casts no votes, whoever its optimizer is
    number: int | None  # among the model's quantized layers, for the random streams (number_layers)
    name: str | None = None  # in the model that was quantized, for errors (number_layers)
    transposed = False  # are the rows of the weight features of x, not of y?
    multiplies_tokens = False  # is its product one of tokens by a matrix, which 8-bit numbers can take?
    _compute: str | None = None
    _branches: int | None = None

    def __init__(self, float_shape: tuple[int, ...], storage: Storage, *, bias: bool = False, gain: bool = False,
                 scales: str | int = "tensor", device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if 0 in float_shape:
            raise UsageError(f"a weight of shape {float_shape} is empty, with nothing to quantize; use torch's layer")
        self.float_shape, self.storage = float_shape, storage
        self.rows, self.columns = float_shape[0], math.prod(float_shape[1:])
        levels = torch.zeros(self.rows, self.columns, dtype=torch.int8, device=device)
        self.qweight = nn.Parameter(storage.store(levels), requires_grad=False)
        groups = groups_a_row(scales, self.columns)
        ones = torch.ones(() if groups is None else (self.rows, groups), device="cpu")
        self.register_buffer("scale", kept_scale(ones).to(device))
        self.log_gain = nn.Parameter(torch.zeros(1, device=device)) if gain else None  # fully_shard takes no scalars
        self.bias = nn.Parameter(torch.zeros(self.rows, device=device)) if bias else None
        self._join(None, dtype)

    def _join(self, number: int | None, dtype: torch.dtype | None) -> None:
        """What a layer has that its copies and its file have not: a handle for compiled graphs, a place among the layers
        that an optimizer finds by their weights."""
        self.votes, self.number = None, number
        self._anchor = torch.empty(0, device=self.qweight.device, dtype=dtype, requires_grad=True)
        self._read_scale: tuple[Tensor, float, float] | None = None
        self._last_read: dict[tuple[bool, int], tuple[ops.StoredWeight, Tensor, float]] = {}  # turned?, places
        self._warned = False
        self._handle = handle_of(self)
        register(self)

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: the votes, and with them the optimizer, stay with this layer."""
        own = ("votes", "_anchor", "_read_scale", "_last_read", "_warned", "_handle")
        return {key: value for key, value in self.__dict__.items() if key not in own} | {"_dtype": self.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key != "_dtype"})
        self._join(state.get("number"), state.get("_dtype"))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """A layer that was built on the meta device gets its weight later, by load_state_dict(assign=True) or by another
        loader: the anchor goes with it."""
        if name == "weight" or name.startswith(("weight_", "qweight_")):
            self._refuse_float_weight()
        super().register_parameter(name, param)
        if name == "qweight" and "_anchor" in self.__dict__:
            if self._anchor.device != self.qweight.device:
                self._anchor = torch.empty(0, device=self.qweight.device, dtype=self.dtype, requires_grad=True)
            register(self)

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantLayer":
        """`.to`, `.cuda`, `.half` and their kin: the anchor goes with the weight, which may be another one after, and tells
        the layer's float type. The scale keeps its own: rounding it would move all weights."""
        if fn(torch.empty(0, dtype=self.qweight.dtype, device=self.qweight.device)).dtype != self.qweight.dtype:
            raise UsageError(f"the weight of {self.name or self} is integers, which .type(dtype) would take for floats; "
                             "use .to(dtype), which changes the float parts alone")
        scale = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)
        self._anchor = fn(self._anchor.detach()).requires_grad_()
        register(self)
        return self

    def start_(self, init: str) -> "QuantLayer":
        """Draw new levels: "variance", those of a Gaussian of deviation 1/sqrt(inputs); "paper", 90 % zeros, 10 % ±1. Where
        ranks share out the rows they all must, and the first one's are taken."""
        if init not in STARTS:
            raise UsageError(f"init={init!r}: choose one of {', '.join(STARTS)}")
        if self.qweight.is_meta:  # torch.nn.utils.skip_init: values come later
            return self
        levels, scale = STARTS[init](self.rows, self.columns, self.bits, self.qweight.device)
        own_rows(self.qweight).copy_(handed_out(self.storage.store(levels), self.qweight))
        self.set_scale_(of_first_rank(scale, self.qweight))
        return self

    def set_scale_(self, scale: Tensor) -> None:  # scalar, or (rows, groups)
        """Give the layer its scale, or its scales, in the type that keeps them."""
        self.scale = kept_scale(scale.expand(self.scale.shape)).to(self.scale.device, copy=True)

    def reset_parameters(self) -> None:
        """Start anew: torch's name for it, for models that were built on the meta device."""
        self.start_("variance")
        with torch.no_grad():
            for parameter in (self.bias, self.log_gain):
                if parameter is not None:
                    parameter.zero_()

    # ------------------------------------------------------------------ what linear and convolution do differently

    @property
    def inputs(self) -> int:
        """Features of x."""
        raise NotImplementedError

    @property
    def outputs(self) -> int:
        """Features of y."""
        return self.rows

    @property
    def branches(self) -> int | None:
        """How many branches add to the residual stream that this layer's output is added to; beyond 12 its moves are taken
        by 12 over their number. None: it adds to none. Found by `gft.quantize_` and `gft.quantized` (layers/residual.py),
        unless it is set here: to 1 where they took a layer for one that adds and it is not."""
        return self._branches

    @branches.setter
    def branches(self, branches: int | None) -> None:
        if branches is not None and (isinstance(branches, bool) or not isinstance(branches, int) or branches < 1):
            raise UsageError(f"branches={shortened(branches)}: give how many add to the layer's residual stream, at least "
                             "1, or None")
        self._branches = branches

    @property
    def fan_in(self) -> int:
        """How many products a value of y sums."""
        return self.columns

    @property
    def geometry(self) -> list[int]:
        """What y's shape follows from (product.output_shape)."""
        raise NotImplementedError

    def check_input(self, x: Tensor) -> None:
        """Refuse an x that has not the layer's features."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x and a float weight, as `shaped` gives it or (rows, columns) -> y without bias."""
        raise NotImplementedError

    def grad_input(self, grad_output: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        """grad_output and a float weight likewise -> x's gradient."""
        raise NotImplementedError

    def features_last(self, x: Tensor, features: int) -> Tensor:
        """x or grad_output as (n, features): each column gets one scale in the vote."""
        raise NotImplementedError

    def sequence_length(self, x_shape: torch.Size) -> int:
        """How many rows of the vote product make one sample."""
        raise NotImplementedError

    def vote_pieces(self, x: Tensor, x_shape: torch.Size,
                    grad: Tensor) -> Iterator[tuple[slice, Seen, Tensor]]:
        """Quantized x (n, inputs) and grad_output (positions, out) -> the products whose sum is the votes (votes.Pieces)."""
        raise NotImplementedError

    # ------------------------------------------------------------------ shared

    @property
    def casts(self) -> VoteAccumulator | None:
        """Where this layer's votes go; None if it casts none, for want of an optimizer or because it is frozen."""
        return None if self.frozen else self.votes

    def requires_grad_(self, requires_grad: bool = True) -> "QuantLayer":
        """False freezes the layer: its weight gets no votes, its bias and gain no gradients. True lets them train again.
        torch asks a layer only if it is called on the layer itself; a parent's goes to the parameters past it."""
        self.frozen = not requires_grad
        for parameter in (self.bias, self.log_gain):
            if parameter is not None:
                parameter.requires_grad_(requires_grad)
        return self

    @property
    def weight(self) -> Tensor:
        """The float weight that the layer computes with, read out of the integers anew, for code that looks at a layer's
        weight or its type (`x.to(layer.weight.dtype)`). To multiply by it outside of the layer casts no votes: while the
        layer trains, backward raises."""
        weight = self.float_weight().to(self.dtype)
        trains = self.casts is not None and self.training and torch.is_grad_enabled()
        if trains and not torch.compiler.is_compiling():
            weight.requires_grad_().register_hook(self._refuse_gradient)
        return weight

    @weight.setter
    def weight(self, _: Any) -> None:
        self._refuse_float_weight()

    def _refuse_float_weight(self) -> None:
        raise UsageError(f"the weight of {self.name or self} is integers, and no float one can be set in its place, as "
                         "prune, weight tying and layer.weight = … do; do that to the float model, before gft.quantize_")

    def _refuse_gradient(self, _: Tensor) -> None:
        if self.name is None:
            raise UsageError(f"the weight of {self} was multiplied outside of the layer, which casts no votes on it; call "
                             "the layer itself, or leave it out with filter_fn")
        block = re.fullmatch(r"(?:.*\.)?\d+(\..+)", self.name)  # layers.0.mixer.dt_proj: the same part of all of them
        others = f"name != {self.name!r}" if block is None else f"not name.endswith({block[1]!r})"
        raise UsageError(f"the weight of {self.name} ({type(self).__name__}) was multiplied outside of the layer, which "
                         "casts no votes on it; call the layer itself, or leave it float: "
                         f"gft.quantize_(model, filter_fn=lambda module, name: {others})")

    @property
    def dtype(self) -> torch.dtype:
        """The float type of its weight; what `.to(dtype)` says. Products have x's, or autocast's."""
        return self._anchor.dtype

    @property
    def bits(self) -> int:
        return self.storage.bits

    @bits.setter
    def bits(self, _: Any) -> None:
        self._refuse_other_storage("bits")

    @property
    def memory(self) -> bool | str:
        """True: a byte a weight; False: packed; "half": in half a byte at 2 bits."""
        return self.storage.asked_for

    @memory.setter
    def memory(self, _: Any) -> None:
        self._refuse_other_storage("memory")

    @property
    def compute(self) -> str | None:
        """In which numbers the layer multiplies: None, "bf16", "int8" or "fp8" (computing.py). It can be set at any time,
        and is copied with the layer; it is no part of a state_dict, as an optimizer's settings or autocast are none."""
        return self._compute

    @compute.setter
    def compute(self, compute: str | None) -> None:
        check_compute(compute, self.bits, self.scale.dim() > 0 and self.scale.shape[1] > 1)
        if compute in EIGHT_BITS and not self.multiplies_tokens:
            raise UsageError(f'compute="{compute}" is for linear layers, which {self.name or type(self).__name__} is not; '
                             'choose compute="bf16" or None for it')
        self._compute = compute
        self._last_read.clear()

    @property
    def eight_bits(self) -> torch.dtype | None:
        """The type of 8 bits that it multiplies in, if it does."""
        return EIGHT_BITS.get(self._compute)

    def rounded_to(self, like: Tensor) -> torch.dtype | None:
        """The type of whole numbers that x and grad_output like this one are rounded to for products; None: floats stay."""
        return self.eight_bits

    def _refuse_other_storage(self, setting: str) -> None:
        raise UsageError(f"{setting} of {self.name or self} is how its integers are stored, which cannot be set; build the "
                         f"layer anew, or call gft.dequantize_ and gft.quantize_(…, {setting}=…)")

    def levels(self) -> Tensor:
        """The integer weights, int8, in the shape of the float layer's."""
        return self._levels_by_row().view(self.float_shape)

    def _levels_by_row(self) -> Tensor:  # (rows, columns) int8
        read = self.storage.exported_levels if exporting() else self.storage.levels
        return read(all_rows(self.qweight), self.columns)

    def float_weight(self) -> Tensor:
        """The float values used in forward: scale · levels, times the gain if there is one."""
        weight = ops.times_factors(self._levels_by_row().float(), self.scale).view(self.float_shape)
        return weight if self.log_gain is None else weight * all_rows(self.gain())

    @property
    def group(self) -> int:
        """How many columns of a row share a scale."""
        return self.columns if self.scale.dim() == 0 else self.columns // self.scale.shape[1]

    def scales_by_group(self) -> Tensor:  # (rows, groups) float32
        """The scale of each group of columns of each row, also where one serves them all; without the gain."""
        return self.scale.float().expand(self.rows, 1) if self.scale.dim() == 0 else self.scale.float()

    def gain(self) -> Tensor:
        """exp(sqrt(columns) · log_gain). By the root one rate of AdamW makes it grow as fast as it would a float weight,
        whose size is about 1 / sqrt(columns).

        Its gradient sums over all that flows through the layer, so it is taken 1 / (columns · sqrt(rows)) times, the
        root of the layer's size in all, as LSQ does (Esser et al. 2020): AdamW does not see it, SGD would leap without.
        """
        assert self.log_gain is not None
        slope = self.gain_slope() / self.columns**0.5
        log_gain = self.log_gain * slope + self.log_gain.detach() * (1 - slope)
        return (log_gain * self.columns**0.5).exp()[0]

    def gain_slope(self) -> float:
        """The share that log_gain takes of sum(gradient · weight): sqrt(columns), which it is multiplied by, and what keeps
        its gradient small (`gain`)."""
        return 1 / (self.columns * self.rows) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        compiling, votes = torch.compiler.is_compiling(), self.votes
        if type(x) is not Tensor and isinstance(x, torch.fx.Proxy):
            raise UsageError("torch.fx cannot trace into a layer with integer weights; give it a torch.fx.Tracer whose "
                             "is_leaf_module says True of gft.layers.QuantLayer, or use torch.export")
        stored, log_gain = self.qweight, self.log_gain
        if is_sharded(stored):
            raise UsageError(f"this {type(self).__name__} has only some rows of its weight on this rank; call the module "
                             "that fully_shard was given, or its unshard() first")
        if not x.is_floating_point():
            raise UsageTypeError(f"{type(self).__name__} takes a float input, not {x.dtype}; convert it with x.float()")
        if votes is not None and not compiling and votes.optimizer() is None:
            self.votes = votes = None  # nobody is left to be moved by them
        casts = None if self.frozen else votes
        # Where votes estimate a gradient they tell the gain's, too, and it goes into the weight; else torch keeps the
        # product for it.
        inside = None if casts is None or not casts.vote.has_scale else log_gain
        if not torch.is_grad_enabled() or exporting():
            inside = log_gain
            y = self.scaled_product(x, inside)
        elif compiling:
            # Cast here, where autocast is known: the operator runs outside of it.
            cast = x.to(self.product_dtype(x))
            y = CompiledProduct.apply(cast, self._anchor, stored, inside, self._handle, self.geometry,
                                      kept_as(self, cast.shape))
        elif casts is None and (stored.is_inference() or not (x.requires_grad or (self.training and not self.frozen))):
            y = self.scaled_product(x, inside)  # what was made in inference_mode cannot be kept for backward, nor trained
        else:
            y = Product.apply(x, self._anchor, stored, inside, self)
        if log_gain is not None and inside is None:
            y = y * self.gain().to(y.dtype)
        if self._compute == "bf16":
            y = y.to(self.output_dtype(x))
        bias = self.bias
        return y if bias is None else y + self._shaped_bias().to(y.dtype)

    def product_dtype(self, x: Tensor) -> torch.dtype:
        """The float type of what is multiplied, or rounded to be. The levels are exact in any."""
        return torch.bfloat16 if self._compute == "bf16" else self.output_dtype(x)

    def output_dtype(self, x: Tensor) -> torch.dtype:
        """autocast's type if it is on, else x's."""
        return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype

    def scaled_product(self, x: Tensor, log_gain: Tensor | None = None) -> Tensor:
        """product(x, weight) without votes."""
        dtype = self.product_dtype(x)
        x = x.to(dtype)
        if torch.compiler.is_compiling() or exporting():  # a number read from a tensor would end the graph
            weight = ops.times_factors(self._levels_by_row().float(), self.scale)
            return self.product(x, (weight if log_gain is None else weight * self.gain()).to(dtype))
        return self.stored_product(x, log_gain)

    def stored_product(self, x: Tensor, log_gain: Tensor | None) -> Tensor:
        """The same of an x in its type, the weight read out for it."""
        self.check_input(x)
        return self.multiplied(x, ops.float_levels(*self.to_read(self.qweight, log_gain, x)), log_gain)

    def to_read(self, stored: Tensor, log_gain: Tensor | None, like: Tensor, places: int = 1,
                of_grad: bool = False) -> ops.StoredWeight:
        """The stored weight as it is to be read out for a product with a tensor like this one: the same value as long as
        nothing of it changes, so that what was made ready for it serves again. of_grad: with grad_output, over the rows,
        which a GPU's 8-bit products want side by side."""
        whole, scale = self.rounded_to(like), self.scale
        levels = ops.INT8 if whole is ops.FIXED else whole
        turned = of_grad and levels is not None and like.is_cuda
        last = self._last_read.get((turned, places))
        if last is not None:
            weight, its_scale, version = last
            if (its_scale is scale and version == scale_version(scale) and weight.stored is stored
                    and weight.storage is self.storage and (levels is not None or weight.scaling.log_gain is log_gain)
                    and weight.dtype is (levels or like.dtype)):
                return weight
        weight = ops.StoredWeight(stored, self.storage, self.columns, levels or like.dtype,
                                  ops.PLAIN if levels else self.scaling(log_gain), places, turned)
        self._last_read[turned, places] = weight, scale, scale_version(scale)
        return weight

    def multiplied(self, x: Tensor, weight: Tensor, log_gain: Tensor | None) -> Tensor:
        """x and a weight as `to_read` had it read out -> y without bias."""
        return self.product(x, self.shaped(weight, x))

    def multiplied_back(self, grad_output: Tensor, weight: Tensor, log_gain: Tensor | None, x_shape: torch.Size) -> Tensor:
        """grad_output and a weight as `to_read` had it read out for it -> x's gradient."""
        return self.grad_input(grad_output, self.shaped(weight, grad_output), x_shape)

    def read_floats(self, weight: Tensor | None, stored: Tensor, log_gain: Tensor | None, like: Tensor) -> Tensor:
        """The float weight, (rows, columns): the one that has been read out already, if that is float."""
        if weight is None or weight.dtype is not like.dtype:  # not read out, or its levels alone
            weight = ops.float_levels(stored, self.storage, self.columns, like.dtype, self.scaling(log_gain))
        else:
            weight = self.shaped(weight, like)
        return weight.reshape(self.rows, self.columns)

    def shaped(self, weight: Tensor, like: Tensor) -> Tensor:
        """What was read so, in the shape that products take."""
        return weight

    def scaling(self, log_gain: Tensor | None) -> ops.Scaling:
        """What makes floats of levels: the scale, one number or several, and the gain if it is given."""
        if self.scale.dim() == 0:
            return ops.Scaling(None, log_gain, self.scale_number(), self.columns**0.5)
        return ops.Scaling(self.scale, log_gain, 1.0, self.columns**0.5)

    def scale_number(self) -> float:
        """`scale` as a number, the rms of them where there are several. Read from the device only when it has changed."""
        scale, last = self.scale, self._read_scale
        version = scale_version(scale)
        if last is None or last[0] is not scale or last[1] != version:
            number = float(scale) if scale.dim() == 0 else float(scale.double().square().mean().sqrt())
            if not (number > 0 and math.isfinite(number)):
                raise UsageError(f"the scale of {self.name or self} is {number:g}; it must be a number above 0, as "
                                 "set_scale_ takes it")
            last = self._read_scale = scale, version, number
        return last[2]

    @torch.no_grad()
    def store_as_(self, storage: Storage, stored: Tensor) -> None:
        """Change the encoding of the memory; the weight, or what rows of it this rank has, stays where votes have carried
        it."""
        if storage != self.storage:
            stored.copy_(self.storage.converted(stored, storage))
            self.storage = storage

    def packed(self) -> tuple[Storage, Tensor]:
        """The same levels side by side, without memory: how they are stored then, and the bytes."""
        storage = replace(self.storage, memory=False, half=False)
        return storage, storage.store(self.storage.levels(self.qweight.detach(), self.columns))

    def change_storage_(self, storage: Storage, stored: Tensor) -> None:
        """Keep the weight in another form, as a new parameter: an optimizer that had the old one has it no more."""
        self.votes, self.storage = None, storage
        self.qweight = nn.Parameter(stored, requires_grad=False)
        register(self)

    def warn_untrained(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"this {type(self).__name__} has no optimizer and stays as it is: pass gft.quantized(model) "
                          "to gft.GFT (AdamW cannot train integers), or call requires_grad_(False) on layers meant to be "
                          "frozen",
                          stacklevel=2)

    def _shaped_bias(self) -> Tensor:
        assert self.bias is not None
        return self.bias

    def extra_repr(self) -> str:
        kept = {True: f"memory={self.storage.memory_bits} bits", False: "packed", HALF: "half a byte"}[self.memory]
        gain = ", gain=True" if self.log_gain is not None else ""
        scales = "" if self.scale.dim() == 0 else f", scales={'row' if self.scale.shape[1] == 1 else self.group!r}"
        compute = "" if self._compute is None else f", compute={self._compute!r}"
        branches = "" if self.branches is None else f", branches={self.branches}"
        return f"bits={self.bits}, {kept}{scales}, bias={self.bias is not None}{gain}{compute}{branches}"

    # ------------------------------------------------------------------ state_dict

    def get_extra_state(self) -> Tensor:
        """How the weight is stored."""
        return torch.tensor(self.storage.code, dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """What _load_from_state_dict has read already, before anything was copied; a loader that sets tensors one by one,
        as transformers' does, calls this alone, and `check_loaded` in the end."""
        self.storage = reading.storage_of(self, state, type(self).__name__)

    def check_loaded(self, name: str) -> None:
        """Raise unless what a loader has put here, tensor by tensor, is a weight of this layer and its scales."""
        shape, scale = (self.rows, self.storage.bytes_per_row(self.columns)), self.scale
        if tuple(self.qweight.shape) != shape or self.qweight.dtype is not self.storage.dtype or (
                scale.dim() and (scale.dim() != 2 or len(scale) != self.rows or self.columns % max(scale.shape[1], 1))):
            raise UsageError(f"{name}: the file holds a weight of shape {tuple(self.qweight.shape)} and scales of shape "
                             f"{tuple(scale.shape)} where {shape} are needed and scales that divide its rows; it is damaged")
        reading.check_state(self, {f"{name}.qweight": self.qweight.detach(), f"{name}.scale": scale}, f"{name}.")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        reading.rename(state_dict, prefix)
        reading.check_state(self, state_dict, prefix)
        scale = state_dict.get(prefix + "scale")
        if scale is not None and scale.dtype != self.scale.dtype:  # the type in which they are kept is taken over
            self.scale = self.scale.to(scale.dtype)
        if prefix + "qweight" in state_dict:
            state_dict[prefix + "qweight"] = self._as_this_layer(state_dict, prefix)
            if self.log_gain is not None:  # of a time before there were gains, or when they were scalars
                log_gain = state_dict.setdefault(prefix + "log_gain", torch.zeros_like(self.log_gain))
                state_dict[prefix + "log_gain"] = log_gain if log_gain.dim() else log_gain.view(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _as_this_layer(self, state_dict: dict[str, Any], prefix: str) -> Tensor:
        """The weight in a state_dict, whose encoding this layer takes over: the bytes stay as they were saved, until an
        optimizer whose rule wants another encoding takes its next step."""
        stored, code = state_dict[prefix + "qweight"], state_dict.get(prefix + "_extra_state")
        if code is None:
            return stored
        storage = reading.storage_of(self, code, prefix)
        if reading.is_older(code, storage):
            levels = unpack_fields(stored, field_bits(self.bits), storage.largest, self.columns)
            stored = self.storage.store(levels)
        if stored.shape == self.qweight.shape:  # else torch refuses it
            self.storage = storage
            if self.votes is not None:
                self.votes.prepared_for = None
        else:
            state_dict[prefix + "_extra_state"] = self.get_extra_state()
        return stored


def require_grad(module: Any, requires_grad: bool) -> Any:
    """nn.Module.requires_grad_ for a module that is made of quantized layers: those are asked themselves."""
    for part in module.modules():
        if isinstance(part, QuantLayer):
            part.requires_grad_(requires_grad)
        else:
            for parameter in part.parameters(recurse=False):
                parameter.requires_grad_(requires_grad)
    return module


FROM_FLOAT = {"keep": scale_of, "fit": fitted_scale}  # starts that take float weights over, by how they choose their scale


def take_over(layer: Any, float_layer: Any, init: str) -> Any:
    """Start a new layer from the float layer it stands for."""
    if init in FROM_FLOAT and float_layer.weight.is_meta:
        pass  # values come later, by load_state_dict
    elif init in FROM_FLOAT:
        # Not view: the weight may be channels_last.
        weight = float_layer.weight.detach().float().reshape(layer.rows, layer.columns)
        scales = "tensor" if layer.scale.dim() == 0 else layer.group
        layer.set_scale_(FROM_FLOAT[init](float_layer.weight, layer.bits, scales))
        layer.qweight.data.copy_(layer.storage.store_nearest(in_levels(weight, layer.scale)))
    else:
        layer.start_(init)
    layer.bias = float_layer.bias
    return layer.train(float_layer.training)


def give_back(layer: Any, float_layer: Any) -> Any:
    with torch.no_grad():
        float_layer.weight.copy_(layer.float_weight())
        if layer.bias is not None:
            float_layer.bias.copy_(layer.bias).requires_grad_(layer.bias.requires_grad)
    return float_layer.train(layer.training)
