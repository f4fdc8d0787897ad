"""A tokenizer as the keys of a GGUF file: tokens and their types, special tokens, and how text becomes tokens: for a
byte-level BPE by merges and the name of how text is cut before them, for one like SentencePiece's by scores."""

import json
from typing import Any

from gft.errors import UsageError, UsageTypeError
from gft.export.gguf_sentencepiece import BYTES, has_space_before, scores

# How a tokenizer cuts text before it merges is a list of regular expressions; in a GGUF file it is a name that llama.cpp
# knows. Llama 3 and Qwen 2 differ in how many digits stay together.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
         r"\s+(?!\S)|\s+")
CUTS = {("bytes",): "gpt-2",
        ("digits", "bytes"): "smollm",
        (WORDS % r"\p{N}{1,3}", "raw bytes"): "llama-bpe",
        (WORDS % r"\p{N}", "raw bytes"): "qwen2"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types of llama.cpp


def cut_of(settings: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer (its JSON) cuts text, if it has one."""
    outer = settings.get("pre_tokenizer") or {}
    steps: list[str] = []
    for step in outer.get("pretokenizers", [outer]):
        kind = step.get("type")
        if kind == "ByteLevel" and not step.get("add_prefix_space"):
            steps.append("bytes" if step.get("use_regex", True) else "raw bytes")
        elif kind == "Digits" and step.get("individual_digits"):
            steps.append("digits")
        elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            steps.append(step["pattern"].get("Regex", ""))
        else:
            return None
    cut = CUTS.get(tuple(steps))
    # llama.cpp takes a word that is a token as it is, without merging, after Llama 3's cut and no other of these.
    merges_ignored = bool(settings["model"].get("ignore_merges"))
    return cut if settings.get("normalizer") is None and merges_ignored == (cut == "llama-bpe") else None


def add_no_vocabulary(writer: Any) -> None:
    """llama.cpp then takes and gives token numbers only."""
    writer.add_tokenizer_model("none")


def add_vocabulary(writer: Any, tokenizer: Any, pre: str | None, config: Any) -> None:
    """Write a tokenizers.Tokenizer, or a tokenizer of transformers that has one inside."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise UsageTypeError(f"{type(tokenizer).__name__} is not a tokenizer of the tokenizers package; give a "
                             "PreTrainedTokenizerFast, or tokenizer=None for a file of token numbers")
    settings = json.loads(backend.to_str())
    byte_fallback = bool(settings["model"].get("byte_fallback"))
    byte_level = "ByteLevel" in json.dumps(settings.get("pre_tokenizer")) and not byte_fallback
    if settings["model"].get("type") != "BPE" or not (byte_level or byte_fallback) or not settings["model"].get("merges"):
        raise UsageError("only a BPE tokenizer with merges can be written, byte-level (GPT-2, Llama 3, Qwen) or with "
                         "byte_fallback (Llama 2, Mistral); export with tokenizer=None for a file of token numbers")
    size, known = config.vocab_size, backend.get_vocab(with_added_tokens=True)
    if max(known.values()) >= size:
        raise UsageError(f"the tokenizer has {max(known.values()) + 1} tokens and the model {size}; give the one that the "
                         "model was trained with")
    end = _token_id(tokenizer, config, "eos_token_id")
    if end is None:
        raise UsageError("the tokenizer names no token that ends a text, and llama.cpp would take token 11 for it; set "
                         "tokenizer.eos_token")
    start = _token_id(tokenizer, config, "bos_token_id")
    special = {token["id"]: token["special"] for token in settings.get("added_tokens", [])}
    texts = {number: text for text, number in known.items()}
    types = [UNUSED if number not in texts else NORMAL if number not in special
             else CONTROL if special[number] else USER_DEFINED for number in range(size)]
    if byte_fallback:
        if pre is not None:
            raise UsageError(f"pre={pre!r}: a tokenizer with byte_fallback cuts no text before it merges; leave pre out")
        found = scores(settings)
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([found.get(texts.get(number, ""), 0.0) for number in range(size)])
        writer.add_add_space_prefix(has_space_before(settings))
        for token in BYTES:
            types[known[token]] = BYTE
        if (unknown := known.get(settings["model"].get("unk_token"))) is not None:
            types[unknown] = UNKNOWN
    else:
        pre = pre or cut_of(settings)
        if pre is None:
            raise UsageError("llama.cpp has no name that is known here for how this tokenizer cuts text before it merges; "
                             "give the name as pre=…, one of tokenizer.ggml.pre in its source, or export with "
                             "tokenizer=None")
        merges = settings["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(types)
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end if start is None else start)  # left out it would be token 11, too
    for name in ("pad", "unk"):
        if (number := getattr(tokenizer, f"{name}_token_id", None)) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    around = backend.encode("a").ids
    writer.add_add_bos_token(start is not None and around[0] == start)
    writer.add_add_eos_token(len(around) > 1 and around[-1] == end)
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(template)


def _token_id(tokenizer: Any, config: Any, name: str) -> int | None:
    """A tokenizer of transformers knows its special tokens; a bare one does not, and the model's config is asked."""
    number = getattr(tokenizer if hasattr(tokenizer, "backend_tokenizer") else config, name, None)
    number = number[0] if isinstance(number, (list, tuple)) else number
    return number if number is None or 0 <= number < config.vocab_size else None
