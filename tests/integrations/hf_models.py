"""The small models of transformers that these tests train."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gft

VOCABULARY = 50


def llama(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """A float Llama of two layers, whose sizes fill no whole number of packed bytes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        settings = {"hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
        return LlamaForCausalLM(LlamaConfig(**{**settings, **config})).eval()


def quantized_llama(bits: int = 4, memory: bool = True, seed: int = 0, **config: Any) -> LlamaForCausalLM:
    model = llama(seed, **config)
    gft.quantize_(model, bits, lambda _, name: ".layers." in name, memory=memory)
    return model


def tokens(rows: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, 12), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=tokens()).logits


def train_steps(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    model.train()
    for step in range(steps):
        batch = tokens(seed=10 + step)
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
