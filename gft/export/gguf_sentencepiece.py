"""What a GGUF file says of a tokenizer in the manner of SentencePiece (Llama 2, TinyLlama, Mistral): BPE over characters,
with "▁" for a space and a token for each byte, into which characters without a token fall apart.

llama.cpp has no merges for these, but a score for each token, and joins any two neighbours whose text together is a token,
the highest score first. A tokenizer.json has merges, of which the earliest is done first. Where do the two agree?

A token that the merges make of its own characters is made in one way. Two neighbours that have its text together have got
there by merges between these characters alone, so they are the last two on that way, and their merge has one rank. Minus
that rank is the score. A token that the merges do not make must not be made by llama.cpp either: no two tokens may have its
text together, or all such pairs must be merges with one rank after the other, as in a tokenizer.json made of a
SentencePiece model.
"""

import itertools
import warnings
from typing import Any

from gft.errors import UsageError

SPACE = "▁"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NEEDS = "; give a tokenizer made of a SentencePiece model, or export with tokenizer=None for a file of token numbers"


def scores(settings: dict[str, Any]) -> dict[str, float]:
    """The score of each token, by its text, of a tokenizer's JSON; or an error that says why scores would give other tokens
    than its merges."""
    model = settings["model"]
    known = model["vocab"]
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    if missing := [token for token in BYTES if token not in known]:
        raise UsageError(f"the tokenizer has no token for some bytes ({missing[0]}), which llama.cpp needs{NEEDS}")
    apart = {token["content"] for token in settings.get("added_tokens", [])}.union(BYTES)  # never made of others
    ranks: dict[tuple[str, ...], int] = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    if model.get("ignore_merges") or any(not apart.isdisjoint(pair) for pair in ranks):
        raise UsageError(f"the tokenizer merges bytes or leaves merges out, and llama.cpp does neither{NEEDS}")
    ranks_by_text: dict[str, list[int]] = {}
    for pair, rank in ranks.items():
        ranks_by_text.setdefault("".join(pair), []).append(rank)
    found = dict.fromkeys(known, 0.0)
    for text in known.keys() - apart:
        rank, own = last_rank(text, known, ranks), ranks_by_text.get(text, [0])
        if rank is None:
            pairs = [(text[:place], text[place:]) for place in range(1, len(text))]
            pairs = [pair for pair in pairs if pair[0] in known and pair[1] in known]
            in_a_row = max(own) - min(own) == len(own) - 1
            if any(pair not in ranks for pair in pairs) or (pairs and not in_a_row):
                raise UsageError(f"the tokenizer's merges do not make its token {text!r}, and llama.cpp would{NEEDS}")
            rank = min(own)
        found[text] = -float(rank)
    return found


def last_rank(text: str, known: dict[str, int], ranks: dict[tuple[str, ...], int]) -> int | None:
    """The rank of the last merge that makes a token of its characters; 0 for a single one, None if merges do not."""
    parts, rank = list(text), 0
    if any(part not in known for part in parts):
        return None
    while len(parts) > 1:
        never = len(ranks)
        rank, place = min((ranks.get(pair, never), place) for place, pair in enumerate(itertools.pairwise(parts)))
        if rank == never:
            return None
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return rank


def has_space_before(settings: dict[str, Any]) -> bool:
    """Does the tokenizer put a space before a text? Or an error, if it changes or cuts texts in another way."""
    normalizer, cut = settings.get("normalizer") or {}, settings.get("pre_tokenizer")
    steps = [_step(step) for step in normalizer.get("normalizers", [normalizer] if normalizer else [])]
    if cut is None and steps in (["prepend", "replace"], ["replace"]):
        return "prepend" in steps
    if steps or cut is None or cut.get("type") != "Metaspace" or cut.get("replacement") != SPACE:
        raise UsageError(f"the tokenizer normalizes or cuts texts in a way that llama.cpp does not{NEEDS}")
    if cut.get("split", True) and (inside := next((text for text in settings["model"]["vocab"] if SPACE in text[1:]), None)):
        raise UsageError(f"the tokenizer cuts texts at spaces and yet has the token {inside!r}, which llama.cpp would make "
                         f"of two words{NEEDS}")
    scheme = cut.get("prepend_scheme", "always")
    if scheme != "never":
        after = ", and after special tokens" if scheme == "first" else ""
        warnings.warn(f"llama.cpp puts one more space before a text that begins with a space{after}, where this tokenizer "
                      "puts none; all other texts become the same tokens", stacklevel=4)
    return scheme != "never"


def _step(step: dict[str, Any]) -> str | None:
    if step.get("type") == "Prepend" and step.get("prepend") == SPACE:
        return "prepend"
    to_space = step.get("type") == "Replace" and step.get("content") == SPACE and step.get("pattern") == {"String": " "}
    return "replace" if to_space else None
