"""Which models of transformers llama.cpp computes the same, and what it must know of them before it reads a tensor.

Each type of model has a graph of its own in llama.cpp. Not all of them read the `.scale` of a layer (gguf.py), and one that
does not leaves it out without a word; tests compare the outputs of each.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gft.errors import UsageError
from gft.layers import quantized_layers


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp computes a type of model.

    name: of its graph.
    rope_types: rotary embeddings that it knows; those whose frequencies stay the same however long the text is.
    neighbours: its rotary embedding turns rows 2i and 2i + 1 of a head together. transformers, and the other graphs, turn
        rows i and i + half.
    biases: layers that may have one.
    scales: it reads the `.scale` of a layer.
    experts: the feed-forward part may be a mixture.
    """

    name: str
    rope_types: tuple[str, ...] = ("default", "linear")
    neighbours: bool = False
    biases: tuple[str, ...] = ("attn_q", "attn_k", "attn_v")
    scales: bool = True
    experts: bool = False


EVERYWHERE = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LLAMA = Architecture("llama", ("default", "linear", "llama3"), neighbours=True, biases=EVERYWHERE)
ARCHITECTURES = {  # by transformers' model_type
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": Architecture("llama", LLAMA.rope_types, neighbours=True, biases=(), experts=True),
    "qwen2": Architecture("qwen2", scales=False),
    "qwen3": Architecture("qwen3"),
}


def architecture_of(model: nn.Module) -> Architecture:
    """How llama.cpp computes the model, or an error that says why it would compute it otherwise, or not at all."""
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in ARCHITECTURES or not hasattr(model, "lm_head"):
        raise UsageError(f"a {type(model).__name__} cannot be written; GGUF export takes causal language models of "
                         f"transformers of the types {', '.join(ARCHITECTURES)}")
    if not quantized_layers(model):
        raise UsageError("no quantized layer in this model; call gft.quantize_(model, bits=…) first, or convert a float "
                         "model with llama.cpp's own convert_hf_to_gguf.py")
    if config.hidden_act != "silu":
        raise UsageError(f"hidden_act={config.hidden_act!r}: llama.cpp computes such a model with silu only")
    architecture, rope = ARCHITECTURES[kind], rope_settings(config)
    if rope["rope_type"] not in architecture.rope_types or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError(f"rotary embeddings of type {rope['rope_type']!r} cannot be written; for {kind} only "
                         f"{', '.join(architecture.rope_types)} over whole heads can")
    return architecture


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary_order(target: str, architecture: Architecture, config: Any) -> Tensor | None:
    """Where the rows of q and k come from, if they change places: row 2i and 2i + 1 of a head are transformers' rows i and
    i + half."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(target.split(".")[-1])
    if heads is None or not architecture.neighbours:
        return None
    rows = torch.arange(heads * head_size(config))
    return rows.view(heads, 2, -1).transpose(1, 2).reshape(-1)


def rope_settings(config: Any) -> dict[str, Any]:
    """{"rope_type": …, "rope_theta": …, …}"""
    own = getattr(config, "rope_parameters", None)  # before transformers 5 in two places
    return {"rope_type": "default", **(own or {"rope_theta": config.rope_theta, **(config.rope_scaling or {})})}


def rope_factors(config: Any) -> Tensor | None:
    """(head_dim / 2,) what each frequency is divided by, where Llama 3's rotary embedding is stretched for longer texts."""
    rope, size = rope_settings(config), head_size(config)
    if rope["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    return (plain / stretched.double()).float()


def add_settings(writer: Any, config: Any, architecture: Architecture) -> None:
    """What llama.cpp must know of the model."""
    rope, window = rope_settings(config), getattr(config, "sliding_window", None)
    writer.add_vocab_size(config.vocab_size)
    # These graphs attend to all tokens; up to the length of a sliding window that is the same.
    writer.add_context_length(min(config.max_position_embeddings, window or math.inf))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_rope_dimension_count(head_size(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_string(f"{architecture.name}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture.experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
