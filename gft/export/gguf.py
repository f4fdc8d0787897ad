"""A language model of transformers with integer weights as a GGUF file for llama.cpp.

    to_gguf(model, "model.gguf", tokenizer=tokenizer)      # ternary layers as TQ2_0, 3 and 4 bits as Q4_0

No weight is quantized anew: its levels are written as they are (gguf_blocks.py). A block's own scale d is a float16 number,
which a layer's scale seldom is. So a layer with one scale gets a power of two near it as d, exact in any float type, and
the rest, scale · gain / d, goes into a float32 tensor of one number, `blk.N.attn_q.scale` for example, by which llama.cpp
multiplies the product. Scales of rows or groups are float16 numbers and are the d of their blocks; then `.scale` holds the
gain alone.

Three things differ between the two programs. In a Llama llama.cpp turns pairs of neighbouring rows of q and k in its rotary
embedding, transformers row i and row i + half, so these rows change places. In the feed-forward part llama.cpp multiplies by
`.scale` after it has added the bias, so the bias is divided by it. And it reads no `output.scale`: what would stand there is
multiplied into the weight of the norm before. The last two round a float32 number once; nothing else is rounded.

Experts of a mixture are one tensor of three dimensions, with a `.scale` for each expert.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gft.errors import UsageError, install_hint
from gft.export.gguf_architectures import Architecture, add_settings, architecture_of, rope_factors, rotary_order
from gft.export.gguf_blocks import FLOATS, FORMATS, TERNARY, Format, as_float
from gft.export.gguf_vocabulary import add_no_vocabulary, add_vocabulary
from gft.files import written_atomically
from gft.layers import QuantExperts, QuantLayer

Rows = Tensor | slice  # which rows of a weight are written, and in which order
ALL = slice(None)


@dataclass(frozen=True)
class Entry:
    """One tensor of the file. Its bytes are made when it is their turn, so that one tensor at a time is in memory."""

    name: str
    shape: tuple[int, ...]  # (rows, columns), of experts (experts, rows, columns)
    format: Format
    data: Callable[[], NDArray[Any]]


def to_gguf(model: nn.Module, path: str | Path, *, tokenizer: Any = None, pre: str | None = None, ternary: str = "TQ2_0",
            dtype: str | None = None, fallback: str | None = None, float16_scales: bool = False) -> Path:
    """Write a causal language model (Llama, Mistral, Mixtral, Qwen 2, Qwen 3) with quantized layers to a GGUF file; returns
    its path.

    tokenizer: a BPE tokenizer (PreTrainedTokenizerFast, tokenizers.Tokenizer), byte-level or with byte_fallback. None: the
        file has no vocabulary, and llama.cpp takes and gives token numbers.
    pre: llama.cpp's name for how the tokenizer cuts text before it merges, if it is not found by itself.
    ternary: the format of 2-bit layers. "TQ2_0" takes 2.06 bits a weight; "TQ1_0" 1.69, with more work to read them; both
        want rows divisible by 256, and llama.cpp has no CUDA kernels for them. "Q2_0" takes 2.25 bits, wants rows divisible
        by 64 and runs on CUDA, too; an old llama.cpp does not know it.
    dtype: of embeddings and layers left float: "F32", "F16" or "BF16". None: each in the type it has, without loss. Norms
        and biases are float32.
    fallback: the format of quantized layers that do not fit into their blocks, as "Q4_0", whose blocks have 32 columns, or
        "F16". None: such a layer is refused.
    float16_scales: True rounds scale · gain to float16 numbers, which all fit into the blocks: no weight moves by more than
        1/2048 of itself. For models whose graph in llama.cpp reads no scale of a layer (Qwen 2), and for a llama.cpp older
        than that. False rounds nothing.
    """
    try:
        import gguf
    except ModuleNotFoundError as missing:
        raise UsageError(f"export to GGUF needs the gguf package; install it with: {install_hint('export')}") from missing
    if ternary not in TERNARY:
        raise UsageError(f"ternary={ternary!r}: choose one of {', '.join(TERNARY)}")
    if dtype is not None and dtype not in FLOATS:
        raise UsageError(f"dtype={dtype!r}: choose one of {', '.join(FLOATS)}, or None for the type each tensor has")
    if fallback is not None and fallback not in FORMATS:
        raise UsageError(f"fallback={fallback!r}: choose one of {', '.join(FORMATS)}")
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    architecture = architecture_of(model)
    entries = list(entries_of(model, architecture, gguf, Choices(ternary, dtype, fallback, float16_scales)))
    with written_atomically(path) as unfinished:
        writer = gguf.GGUFWriter(unfinished, architecture.name)
        try:
            writer.add_name(Path(path).stem)
            writer.add_quantized_by("gft")
            writer.add_quantization_version(2)
            writer.add_file_type(file_type_of(entries))
            add_settings(writer, model.config, architecture)
            if tokenizer is None:
                add_no_vocabulary(writer)
            else:
                add_vocabulary(writer, tokenizer, pre, model.config)
            for entry in entries:
                # Not uint8, or the shape would be taken for one of bytes.
                writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.format.nbytes(entry.shape),
                                       raw_dtype=entry.format.number)  # type: ignore[arg-type]  (an IntEnum's number)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry in entries:
                writer.write_tensor_data(entry.data())
        finally:
            writer.close()
    return Path(path)


# ---------------------------------------------------------------------------------------------------- scales


@dataclass(frozen=True)
class Scales:
    """What a layer's levels are multiplied by: weight = levels · by_group · rest."""

    by_group: Tensor  # (1 or rows, groups) float32: d of each group's blocks
    rest: Tensor  # () float32: what llama.cpp multiplies the product by

    def by_block(self, layer: QuantLayer, width: int) -> Tensor:
        """(rows, blocks) float32: the scale of each `width` columns."""
        starts = torch.arange(0, layer.columns, width)
        return self.by_group[:, starts // layer.group].expand(layer.rows, -1)


@torch.no_grad()
def scales_of(layer: QuantLayer, rounded: bool) -> Scales:
    """rounded: all of it goes into the blocks, as float16 numbers."""
    own = layer.scale.to("cpu", torch.float32)
    own = own.view(1, 1) if own.ndim == 0 else own
    gain = torch.ones(()) if layer.log_gain is None else layer.gain().to("cpu", torch.float32)
    if rounded:
        return Scales((own * gain).half().float(), torch.ones(()))
    if own.numel() > 1:
        return Scales(own, gain)
    exponent = math.frexp(float(own) * float(gain))[1]
    power = torch.full((1, 1), 2.0 ** min(max(exponent, -14), 15))  # a normal float16 number
    return Scales(power, (own * gain / power)[0, 0])


# ---------------------------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class Choices:
    """What the user has chosen: formats by name (to_gguf)."""

    ternary: str
    dtype: str | None
    fallback: str | None
    float16_scales: bool

    def scales_of(self, name: str, layer: QuantLayer) -> Scales:
        scales = scales_of(layer, self.float16_scales)
        if not bool(scales.rest.isfinite()) or not bool(layer.scale.isfinite().all()):
            raise UsageError(f"{name} has a scale or gain that is not finite; go back to a checkpoint from before that")
        smallest, largest = float(scales.by_group.min()), float(scales.by_group.max())
        if self.float16_scales and not 2.0**-14 <= smallest <= largest < math.inf:
            raise UsageError(f"{name} has scales of {smallest:.1e} to {largest:.1e}, which float16 would spoil; leave "
                             "float16_scales=False")
        return scales

    def format_of(self, name: str, layer: QuantLayer, scales: Scales) -> Format:
        """The format that a layer's weight is written in, or an error that says why it fits into none."""
        wanted = FORMATS[self.ternary if layer.bits == 2 else "Q4_0" if layer.bits <= 4 else "Q8_0"]
        reason = misfit(layer, scales, wanted)
        if reason is not None and self.fallback is not None:
            wanted = FORMATS[self.fallback]
            reason = misfit(layer, scales, wanted)
        if reason is not None:
            fitting = next(kind for kind in ("Q2_0", "Q4_0", "Q8_0", "F32") if misfit(layer, scales, FORMATS[kind]) is None)
            raise UsageError(f"{name}: {reason} of {wanted.name}; pass fallback={fitting!r} to write layers like it in "
                             "that format")
        return wanted

    def float_format(self, tensor: Tensor) -> Format:
        own = {dtype: name for name, dtype in FLOATS.items()}.get(tensor.dtype, "F32")
        return FORMATS["F32" if tensor.ndim == 1 else self.dtype or own]


def misfit(layer: QuantLayer, scales: Scales, wanted: Format) -> str | None:
    """Why a layer's weight cannot be written in a format without loss, if so. A float format takes it as it is."""
    if wanted.is_float:
        return None
    if layer.storage.largest > wanted.largest:
        return f"levels up to {layer.storage.largest} do not fit into those"
    if layer.columns % wanted.columns:
        return f"rows of {layer.columns} weights do not divide into the blocks of {wanted.columns}"
    if layer.group % wanted.columns:
        return f"groups of {layer.group} weights that share a scale do not divide into the blocks of {wanted.columns}"
    if not torch.equal(scales.by_group.half().float(), scales.by_group):
        return "scales that are not float16 numbers do not fit into the blocks"
    return None


def file_type_of(entries: Sequence[Entry]) -> int:
    """What the file is called (general.file_type): the format of most of its bytes, floats left out."""
    sizes: dict[int, int] = {}
    for entry in entries:
        if not entry.format.is_float:
            sizes[entry.format.file_type] = sizes.get(entry.format.file_type, 0) + entry.format.nbytes(entry.shape)
    return max(sizes, key=lambda kind: sizes[kind], default=0)


# ---------------------------------------------------------------------------------------------------- tensors


def entries_of(model: nn.Module, architecture: Architecture, gguf: Any, choices: Choices) -> Iterator[Entry]:
    """All tensors of the file, in the model's order."""
    config: Any = model.config
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture.name], config.num_hidden_layers)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    whole = ""  # the experts that we are inside of
    for name, module in model.named_modules():
        if whole and name.startswith(whole):
            continue
        if architecture.experts and name.endswith(".experts"):
            whole = f"{name}."
            yield from expert_entries(names.get_name(f"{name}.down_proj"), name, module, choices)
            continue
        if not list(module.parameters(recurse=False)) or (module is head and is_tied(embeddings, head)):
            continue
        target = names.get_name(name)
        if target is None:
            raise UsageError(f"{name or type(model).__name__} is no part of llama.cpp's {architecture.name}; merge "
                             "adapters, or leave out what was added to the model")
        if getattr(module, "bias", None) is not None and target.split(".")[-1] not in architecture.biases:
            raise UsageError(f"{name} has a bias, which llama.cpp's {architecture.name} has no place for; build the model "
                             "without it, or quantize with bias=False")
        order = rotary_order(target, architecture, config)
        rows = ALL if order is None else order
        if isinstance(module, QuantLayer):
            yield from quantized_entries(target, name, module, rows, choices, architecture)
        else:
            quantized_head = target == "output_norm" and isinstance(head, QuantLayer)
            factor = choices.scales_of("the output layer", head).rest if quantized_head else None
            yield from float_entries(target, module, rows, factor, choices)
    if (factors := rope_factors(config)) is not None:
        yield Entry("rope_freqs.weight", tuple(factors.shape), FORMATS["F32"], lambda: as_float(factors, "F32"))


def is_tied(embeddings: nn.Module, head: nn.Module) -> bool:
    """One weight for both: the file holds it once, and llama.cpp takes it for the output, too."""
    return not isinstance(head, QuantLayer) and head.weight is embeddings.weight


def quantized_entries(target: str, name: str, layer: QuantLayer, rows: Rows, choices: Choices,
                      architecture: Architecture) -> Iterator[Entry]:
    """The levels in blocks, the rest of the scale, the bias."""
    if target == "token_embd" or len(layer.float_shape) != 2:
        raise UsageError(f"{name} is quantized, which llama.cpp cannot read here; leave it out with filter_fn, or call "
                         "gft.dequantize_ on it")
    scales = choices.scales_of(name, layer)
    rest, format = scales.rest, choices.format_of(name, layer, scales)
    yield Entry(f"{target}.weight", (layer.rows, layer.columns), format, lambda: encoded(layer, scales, rows, format))
    if target != "output" and rest != 1:
        if not architecture.scales:
            raise UsageError(f"{name} has a scale or gain that llama.cpp's {architecture.name} has no place for; pass "
                             "float16_scales=True to round it into the blocks, or quantize with scales='row' and gain=False")
        yield Entry(f"{target}.scale", (1,), FORMATS["F32"], lambda: as_float(rest.view(1), "F32"))
    if layer.bias is not None:
        bias = layer.bias.detach().float().cpu()[rows]
        bias = bias / rest if ".ffn_" in target else bias
        yield Entry(f"{target}.bias", (layer.rows,), FORMATS["F32"], lambda: as_float(bias, "F32"))


def expert_entries(down: str, name: str, experts: Any, choices: Choices) -> Iterator[Entry]:
    """The experts of a layer, one after the other in three tensors: gate, up and down. Gate and up are the two halves of
    one weight, and share its scale."""
    size: Any = experts.down[0].columns if isinstance(experts, QuantExperts) else experts.down_proj.shape[2]
    gate, up = (down.replace("ffn_down", part) for part in ("ffn_gate", "ffn_up"))
    for target, own, rows in ((gate, "gate_up", slice(size)), (up, "gate_up", slice(size, 2 * size)), (down, "down", ALL)):
        if isinstance(experts, QuantExperts):
            yield from quantized_expert_entries(target, f"{name}.{own}", list(getattr(experts, own)), rows, choices)
            continue
        weight = getattr(experts, f"{own}_proj").detach()[:, rows]
        format = choices.float_format(weight)
        yield Entry(f"{target}.weight", tuple(weight.shape), format,
                    lambda weight=weight, format=format: as_float(weight, format.name))


def quantized_expert_entries(target: str, name: str, layers: Sequence[Any], rows: slice,
                             choices: Choices) -> Iterator[Entry]:
    scales = [choices.scales_of(f"{name}.{number}", layer) for number, layer in enumerate(layers)]
    formats = [choices.format_of(f"{name}.{number}", layer, scales[number]) for number, layer in enumerate(layers)]
    if len(set(formats)) > 1:
        raise UsageError(f"the experts {name} differ in bits or in how they fit into blocks, and one tensor holds them all; "
                         "quantize them alike")
    count, rest = len(range(layers[0].rows)[rows]), torch.stack([one.rest for one in scales])
    yield Entry(f"{target}.weight", (len(layers), count, layers[0].columns), formats[0],
                lambda: np.concatenate([encoded(*pair, rows, formats[0]) for pair in zip(layers, scales, strict=True)]))
    if not bool((rest == 1).all()):
        yield Entry(f"{target}.scale", (len(layers),), FORMATS["F32"], lambda: as_float(rest, "F32"))


def encoded(layer: QuantLayer, scales: Scales, rows: Rows, format: Format) -> NDArray[Any]:
    """The weight without the rest of its scale, as it is in the file."""
    levels, by_block = layer.levels().cpu()[rows], scales.by_block(layer, format.columns)[rows]
    return as_float(levels * by_block, format.name) if format.is_float else format.encode(levels, by_block)


def float_entries(target: str, module: nn.Module, rows: Rows, factor: Tensor | None, choices: Choices) -> Iterator[Entry]:
    """The parameters of a layer left float; with `factor` they are multiplied by it."""
    for own_name, parameter in module.named_parameters(recurse=False):
        format = choices.float_format(parameter)

        def data(parameter: Tensor = parameter, format: Format = format) -> NDArray[Any]:
            tensor = parameter.detach().cpu()[rows]
            return as_float(tensor if factor is None else tensor.float() * factor, format.name)

        yield Entry(f"{target}.{own_name}", tuple(parameter.shape), format, data)
