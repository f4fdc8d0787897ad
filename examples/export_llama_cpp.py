"""Train a tiny Llama with 2-bit weights, write it as GGUF, and let llama.cpp continue a text as the model does.

    python examples/export_llama_cpp.py --steps 60                        learns a short text by heart
    python examples/export_llama_cpp.py --steps 500 --text poem.txt       another one
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import gft
from gft.export.gguf import to_gguf

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. "
LENGTH = 24  # tokens to write


def tokenizer_of(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which llama.cpp knows how to run."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bare.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|endoftext|>")


def continued_by_llama_cpp(path: Path, prompt: str) -> str:
    settings: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0}
    try:
        import llama_cpp
        return llama_cpp.Llama(str(path), n_ctx=256, verbose=False)(prompt, **settings)["choices"][0]["text"]
    except ImportError:
        pass
    try:
        import xllamacpp
    except ImportError:
        return f"(not installed: pip install llama-cpp-python, or llama-cli -m {path} -p '{prompt}' --temp 0)"
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = str(path), 256
    return xllamacpp.Server(params).handle_completions({"prompt": prompt, **settings})["choices"][0]["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("model.gguf"))
    settings = parser.parse_args()
    torch.manual_seed(0)

    text = settings.text.read_text() if settings.text else TEXT * 8
    tokenizer = tokenizer_of(text)
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    model = LlamaForCausalLM(LlamaConfig(  # TQ2_0, the format of 2-bit layers, has blocks of 256 weights
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, vocab_size=300,
        max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None))
    gft.quantize_(model, bits=2, filter_fn=lambda module, name: ".layers." in name)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.2), torch.optim.AdamW(gft.dense(model), lr=3e-3))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=settings.steps)
    for _ in range(settings.steps):
        windows = tokens[torch.randint(len(tokens) - 63, (8, 1)) + torch.arange(64)]
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()

    to_gguf(model.eval(), settings.out, tokenizer=tokenizer)
    prompt = tokenizer.decode(tokens[:4])
    ours = model.generate(tokens[None, :4], max_new_tokens=LENGTH, do_sample=False)[0, 4:]
    print(f"loss {loss.item():.3f}; {settings.out} has {settings.out.stat().st_size:,} bytes\n{prompt!r} goes on\n"
          f"  here          {tokenizer.decode(ours)!r}\n  in llama.cpp  {continued_by_llama_cpp(settings.out, prompt)!r}")


if __name__ == "__main__":
    main()
