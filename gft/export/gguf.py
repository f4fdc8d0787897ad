"""A Llama of Hugging Face with integer weights as a GGUF file for llama.cpp.

    to_gguf(model, "model.gguf", tokenizer=tokenizer)      # ternary layers as TQ2_0, 3 and 4 bits as Q4_0

No weight is quantized anew: its levels are written as they are (gguf_blocks.py). A block's own scale d is a float16 number,
which a layer's scale seldom is. So a layer with one scale gets a power of two near it as d, exact in any float type, and
the rest, scale · gain / d, goes into a float32 tensor of one number, `blk.N.attn_q.scale` for example, by which llama.cpp
multiplies the product. Scales of rows or groups are float16 numbers and are the d of their blocks; then `.scale` holds the
gain alone.

Three things differ between the two programs. llama.cpp turns pairs of neighbouring rows of q and k in its rotary
embedding, transformers row i and row i + half, so these rows change places. In the feed-forward part llama.cpp multiplies by
`.scale` after it has added the bias, so the bias is divided by it. And it reads no `output.scale`: what would stand there is
multiplied into the weight of the norm before. The last two round a float32 number once; nothing else is rounded.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gft.errors import UsageError, install_hint
from gft.export.gguf_blocks import FLOATS, FORMATS, TERNARY, Format, as_float
from gft.export.gguf_vocabulary import add_no_vocabulary, add_vocabulary
from gft.files import written_atomically
from gft.layers import QuantLayer, quantized_layers

ROPE_TYPES = ("default", "linear", "llama3")  # those whose frequencies stay the same however long the text is


@dataclass(frozen=True)
class Entry:
    """One tensor of the file. Its bytes are made when it is their turn, so that one tensor at a time is in memory."""

    name: str
    shape: tuple[int, ...]  # (rows, columns)
    format: Format
    data: Callable[[], NDArray[Any]]


def to_gguf(model: nn.Module, path: str | Path, *, tokenizer: Any = None, pre: str | None = None, ternary: str = "TQ2_0",
            dtype: str | None = None, fallback: str | None = None) -> Path:
    """Write a LlamaForCausalLM with quantized layers to a GGUF file; returns its path.

    tokenizer: a byte-level BPE tokenizer (PreTrainedTokenizerFast, tokenizers.Tokenizer). None: the file has no vocabulary,
        and llama.cpp takes and gives token numbers.
    pre: llama.cpp's name for how the tokenizer cuts text before it merges, if it is not found by itself.
    ternary: the format of 2-bit layers. "TQ2_0" takes 2.06 bits a weight; "TQ1_0" 1.69, with more work to read them; both
        want rows divisible by 256, and llama.cpp has no CUDA kernels for them. "Q2_0" takes 2.25 bits, wants rows divisible
        by 64 and runs on CUDA, too; an old llama.cpp does not know it.
    dtype: of embeddings and layers left float: "F32", "F16" or "BF16". None: each in the type it has, without loss. Norms
        and biases are float32.
    fallback: the format of quantized layers that do not fit into their blocks, as "Q4_0", whose blocks have 32 columns, or
        "F16". None: such a layer is refused.
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
    check_model(model)
    entries = list(entries_of(model, gguf, Choices(ternary, dtype, fallback)))
    with written_atomically(path) as unfinished:
        writer = gguf.GGUFWriter(unfinished, "llama")
        try:
            add_settings(writer, model.config, Path(path).stem, entries)
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


# ---------------------------------------------------------------------------------------------------- what can be written


def check_model(model: nn.Module) -> None:
    """Refuse what llama.cpp's Llama graph would compute otherwise, or not at all."""
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind != "llama" or not hasattr(model, "lm_head"):
        raise UsageError(f"a model of type {kind} cannot be written; GGUF export takes a LlamaForCausalLM of transformers")
    if not quantized_layers(model):
        raise UsageError("no quantized layer in this model; call gft.quantize_(model, bits=…) first, or convert a float "
                         "model with llama.cpp's own convert_hf_to_gguf.py")
    if config.hidden_act != "silu":
        raise UsageError(f"hidden_act={config.hidden_act!r}: llama.cpp computes a Llama with silu only")
    rope = rope_settings(config)
    if rope["rope_type"] not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError(f"rotary embeddings of type {rope['rope_type']!r} cannot be written; only {', '.join(ROPE_TYPES)} "
                         "over whole heads can")


@dataclass(frozen=True)
class Choices:
    """What the user has chosen: formats by name (to_gguf)."""

    ternary: str
    dtype: str | None
    fallback: str | None

    def format_of(self, name: str, layer: QuantLayer) -> Format:
        """The format that a layer's weight is written in, or an error that says why it fits into none."""
        wanted = FORMATS[self.ternary if layer.bits == 2 else "Q4_0" if layer.bits <= 4 else "Q8_0"]
        reason = misfit(layer, wanted)
        if reason is not None and self.fallback is not None:
            wanted = FORMATS[self.fallback]
            reason = misfit(layer, wanted)
        if reason is not None:
            fitting = next(kind for kind in ("Q2_0", "Q4_0", "Q8_0", "F32") if misfit(layer, FORMATS[kind]) is None)
            raise UsageError(f"{name}: {reason} of {wanted.name}; pass fallback={fitting!r} to write layers like it in "
                             "that format")
        return wanted

    def float_format(self, tensor: Tensor) -> Format:
        own = {dtype: name for name, dtype in FLOATS.items()}.get(tensor.dtype, "F32")
        return FORMATS["F32" if tensor.ndim == 1 else self.dtype or own]


def misfit(layer: QuantLayer, wanted: Format) -> str | None:
    """Why a layer's weight cannot be written in a format without loss, if so. A float format takes it as it is."""
    if wanted.is_float:
        return None
    if layer.storage.largest > wanted.largest:
        return f"levels up to {layer.storage.largest} do not fit into those"
    if layer.columns % wanted.columns:
        return f"rows of {layer.columns} weights do not divide into the blocks of {wanted.columns}"
    if layer.group % wanted.columns:
        return f"groups of {layer.group} weights that share a scale do not divide into the blocks of {wanted.columns}"
    scales = group_scales(layer)
    if not torch.equal(scales.half().float(), scales):
        return "scales that are not float16 numbers do not fit into the blocks"
    return None


# ---------------------------------------------------------------------------------------------------- scales


def scales_of(layer: QuantLayer) -> Tensor:
    """(1, 1), (rows, 1) or (rows, groups) float32, without the gain."""
    scale = layer.scale.detach().to("cpu", torch.float32)
    return scale.view(1, 1) if scale.ndim == 0 else scale


def gain_of(layer: QuantLayer) -> float:
    return 1.0 if layer.log_gain is None else float(layer.gain().detach().float())


def group_scales(layer: QuantLayer) -> Tensor:
    """(1 or rows, groups) float32: d of each group's blocks. For a single scale a power of two near it."""
    scales = scales_of(layer)
    if scales.numel() > 1:
        return scales
    exponent = math.frexp(float(scales) * gain_of(layer))[1]
    return torch.full((1, 1), 2.0 ** min(max(exponent, -14), 15))  # normal float16 numbers


def rest_of_scale(layer: QuantLayer) -> Tensor:
    """() float32: what the product is multiplied by after it: weight = levels · group_scales · rest_of_scale."""
    scales, gain = scales_of(layer), torch.tensor(gain_of(layer))
    return gain if scales.numel() > 1 else (scales[0, 0] * gain) / group_scales(layer)[0, 0]


def scales_by_block(layer: QuantLayer, width: int) -> Tensor:
    """(rows, blocks) float32: the scale of each `width` columns."""
    starts = torch.arange(0, layer.columns, width)
    return group_scales(layer)[:, starts // layer.group].expand(layer.rows, -1)


# ---------------------------------------------------------------------------------------------------- tensors


def entries_of(model: nn.Module, gguf: Any, choices: Choices) -> Iterator[Entry]:
    """All tensors of the file, in the model's order."""
    config: Any = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    for name, module in model.named_modules():
        if not list(module.parameters(recurse=False)) or (module is head and is_tied(embeddings, head)):
            continue
        target = names.get_name(name)
        if target is None:
            raise UsageError(f"{name or type(model).__name__} is no part of llama.cpp's Llama; merge adapters, or leave out "
                             "what was added to the model")
        order = rotary_order(target, config)
        if isinstance(module, QuantLayer):
            yield from quantized_entries(target, name, module, order, choices)
        else:
            factor = rest_of_scale(head) if target == "output_norm" and isinstance(head, QuantLayer) else None
            yield from float_entries(target, module, order, factor, choices)
    if (factors := rope_factors(config)) is not None:
        yield Entry("rope_freqs.weight", tuple(factors.shape), FORMATS["F32"], lambda: as_float(factors, "F32"))


def is_tied(embeddings: nn.Module, head: nn.Module) -> bool:
    """One weight for both: the file holds it once, and llama.cpp takes it for the output, too."""
    return not isinstance(head, QuantLayer) and head.weight is embeddings.weight


def rotary_order(target: str, config: Any) -> Tensor | None:
    """Where the rows of q and k come from: row 2i and 2i + 1 of a head are transformers' rows i and i + half."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(target.split(".")[-1])
    if heads is None:
        return None
    rows = torch.arange(heads * config.head_dim)
    return rows.view(heads, 2, -1).transpose(1, 2).reshape(-1)


def reordered(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else tensor[order]


def quantized_entries(target: str, name: str, layer: QuantLayer, order: Tensor | None,
                      choices: Choices) -> Iterator[Entry]:
    """The levels in blocks, the rest of the scale, the bias."""
    if target == "token_embd" or len(layer.float_shape) != 2:
        raise UsageError(f"{name} is quantized, which llama.cpp cannot read here; leave it out with filter_fn, or call "
                         "gft.dequantize_ on it")
    rest = rest_of_scale(layer)
    if not math.isfinite(float(rest)) or not bool(scales_of(layer).isfinite().all()):
        raise UsageError(f"{name} has a scale or gain that is not finite; go back to a checkpoint from before that")
    format = choices.format_of(name, layer)

    def weight() -> NDArray[Any]:
        levels = reordered(layer.levels().cpu(), order)
        scales = reordered(scales_by_block(layer, format.columns), order)
        return as_float(levels * scales, format.name) if format.is_float else format.encode(levels, scales)

    yield Entry(f"{target}.weight", (layer.rows, layer.columns), format, weight)
    if target != "output":
        yield Entry(f"{target}.scale", (1,), FORMATS["F32"], lambda: as_float(rest.view(1), "F32"))
    if layer.bias is not None:
        if target == "output":
            raise UsageError(f"{name} has a bias, which llama.cpp's Llama has no place for; quantize with bias=False")
        bias = reordered(layer.bias.detach().float().cpu(), order)
        bias = bias / rest if ".ffn_" in target else bias
        yield Entry(f"{target}.bias", (layer.rows,), FORMATS["F32"], lambda: as_float(bias, "F32"))


def float_entries(target: str, module: nn.Module, order: Tensor | None, factor: Tensor | None,
                  choices: Choices) -> Iterator[Entry]:
    """The parameters of a layer left float; with `factor` they are multiplied by it."""
    for own_name, parameter in module.named_parameters(recurse=False):
        format = choices.float_format(parameter)

        def data(parameter: Tensor = parameter, format: Format = format) -> NDArray[Any]:
            tensor = reordered(parameter.detach().cpu(), order)
            return as_float(tensor if factor is None else tensor.float() * factor, format.name)

        yield Entry(f"{target}.{own_name}", tuple(parameter.shape), format, data)


# ---------------------------------------------------------------------------------------------------- settings


def rope_settings(config: Any) -> dict[str, Any]:
    """{"rope_type": …, "rope_theta": …, …}"""
    own = getattr(config, "rope_parameters", None)  # before transformers 5 in two places
    return {"rope_type": "default", **(own or {"rope_theta": config.rope_theta, **(config.rope_scaling or {})})}


def rope_factors(config: Any) -> Tensor | None:
    """(head_dim / 2,) what each frequency is divided by, where rotary embeddings are stretched for longer texts."""
    rope = rope_settings(config)
    if rope["rope_type"] == "default":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    return (plain / stretched.double()).float()


def add_settings(writer: Any, config: Any, name: str, entries: list[Entry]) -> None:
    """What llama.cpp must know of the model before it reads a tensor."""
    writer.add_name(name)
    writer.add_quantized_by("gft")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope_settings(config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    sizes: dict[int, int] = {}
    for entry in entries:
        if not entry.format.is_float:
            sizes[entry.format.file_type] = sizes.get(entry.format.file_type, 0) + entry.format.nbytes(entry.shape)
    writer.add_file_type(max(sizes, key=lambda kind: sizes[kind], default=0))
    writer.add_quantization_version(2)
