"""Text from a trained GPT, a character at a time."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gft.errors import UsageError
from gft.lab import data as datasets
from gft.lab import train
from gft.lab.models import GPT
from gft.lab.runs import TrainingError

SAMPLE = 500  # characters of the paper's figure


@torch.no_grad()
def next_tokens(model: GPT, tokens: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Iterator[int]:
    """Endlessly the next token after `tokens` (1, n): one of the `top_k` likeliest, drawn at `temperature`.

    Each costs the work of one token until the context is full. From then on the window moves, and with it the learned
    position of every token in it, so nothing that was kept holds and the whole window is read anew for each.
    """
    window = tokens[:, -model.context :]
    cache, unread = model.cache(1), window
    while True:
        logits = (model(window) if cache is None else model.cached(unread, cache))[0, -1].float().cpu()
        kept, places = logits.topk(min(top_k, len(logits)))
        # At temperature 0 the likeliest, without a division by it.
        drawn = torch.multinomial((kept / temperature).softmax(0), 1, generator=generator) if temperature > 0 else 0
        token = int(places[drawn])
        yield token
        cache = None if window.shape[1] == model.context else cache
        unread = tokens.new_tensor([[token]])
        window = torch.cat([window, unread], 1)[:, -model.context :]


def generate(folder: Path, prompt: str = "\n", *, length: int = 500, temperature: float = 0.8, top_k: int = 20,
             seed: int = 0, device: str = "auto") -> Iterator[str]:
    """What the model of a run folder writes after `prompt`, character by character. What is wrong is said at once, not with
    the first character."""
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"--temperature {temperature}: give 0 (always the likeliest) or more; 1 is the model's own spread")
    if top_k < 1 or length < 0:
        raise UsageError(f"--top-k {top_k}, --length {length}: give at least 1 and 0")
    model, data, recipe = train.load_run(folder, device, to_write=True)
    if not isinstance(model, GPT) or not isinstance(data, datasets.Text):
        raise TrainingError(f"{folder} holds {recipe.name}, which writes no text; give the folder of a gpt recipe")
    if not prompt:
        raise UsageError("--prompt is empty; give at least one character, a line break for example")
    tokens = data.encode(prompt)[None].to(next(model.parameters()).device)
    drawn = next_tokens(model, tokens, temperature, top_k, torch.Generator().manual_seed(seed))
    return (data.decode(torch.tensor([token])) for _, token in zip(range(length), drawn, strict=False))


def sample_of(folder: Path, device: str = "auto") -> str:
    """A page of a run folder's model, for the paper's figure."""
    return "".join(generate(folder, length=SAMPLE, device=device)).strip("\n")
