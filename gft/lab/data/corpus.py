"""A text corpus as tokens: byte-level BPE learnt from its own text, kept as 16-bit numbers that are mapped into memory.

    wiki                 English Wikipedia: wiki/wiki-{train,val,test}.txt.xz, put there by the user
    wikitext-103         WikiText-103 (Merity et al. 2016), tokenized by its authors: fetched, 190 MB
    fineweb-edu          the first file of FineWeb-Edu's sample of 10B tokens (Penedo et al. 2024): fetched, 2 GB
    corpus:PATH          any file or folder that documents.py can read

The vocabulary is learnt from the first 20 MB of the training documents (`SAMPLE`), the same for everyone. Tokens are
prepared once and kept (folder.py says where); a kept file's name carries what it was made of. "test" is prepared when it is
first asked for, which only the command that writes a table does.

Documents count as separated by three newlines, in place of which the tokens have END. So a loss in nats a token is

    bits a byte = loss · tokens / (bytes · ln 2)         bytes: of the split's documents and separators, in UTF-8
"""

import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gft.errors import install_hint
from gft.files import write_text, written_atomically
from gft.lab.data.dataset import SPLITS, seeded
from gft.lab.data.documents import PIECE, SEPARATOR, Files, files_of
from gft.lab.data.folder import DataError, Source, cache_folders, data_folder, retrieve, retrieve_published, writable_cache
from gft.lab.plain import brief
from gft.lab.records import read_object

VOCABULARY = 16_384
LARGEST_VOCABULARY = 65_536  # numbers of 16 bits
SAMPLE = 20_000_000  # characters of the training text that the vocabulary is learnt from
CONTEXT = 1024
END = "<|endoftext|>"  # number 0, after each document
FORMAT = 1  # of the kept files
SECONDS_BETWEEN_REPORTS = 10.0

WIKITEXT = Source("wikitext-103-v1.zip", "9ddaacaf6af0710eda8c456decff7832")  # as torchtext lists it
WIKITEXT_MIRRORS = ("https://s3.amazonaws.com/research.metamind.io/wikitext/", "https://wikitext.smerity.com/")
FINEWEB = "https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT/000_00000.parquet"


# ---------------------------------------------------------------------------------------------------- kept files


@dataclass(frozen=True)
class Kept:
    """The prepared tokens of one split."""

    tokens: np.ndarray  # (n,) uint16, mapped
    bytes: int  # of text
    documents: int


@dataclass(frozen=True)
class Preparation:
    """What a corpus is prepared from, and under which names it is kept."""

    files: Files
    vocabulary: int
    name: str  # of the kept files

    @staticmethod
    def of(path: Path, vocabulary: int) -> "Preparation":
        if not 257 <= vocabulary <= LARGEST_VOCABULARY:
            raise DataError(f"vocabulary={vocabulary}: give 257 (all bytes and an end) to {LARGEST_VOCABULARY}")
        files = files_of(path)
        stem = path.name.partition(".")[0] or "corpus"
        return Preparation(files, vocabulary, f"{stem}-bpe{vocabulary}-{content_key(files)}")

    def tokenizer(self) -> Any:
        """Learnt once from the first SAMPLE characters of the training documents."""
        name = f"{self.name}.tokenizer.json"
        kept = next((folder / name for folder in cache_folders() if (folder / name).exists()), None)
        package = tokenizers_package()
        if kept is None:
            kept = writable_cache() / name
            say(f"Learning a vocabulary of {self.vocabulary:,} tokens from the first {SAMPLE / 1e6:g} MB, once")
            write_text(kept, learnt(package, first_characters(self.files.of("train")), self.vocabulary).to_str())
        try:
            return package.Tokenizer.from_str(kept.read_text(encoding="utf-8"))
        except Exception as error:  # the package raises nothing more exact
            raise DataError(f"{kept} is damaged ({brief(error)}); delete it, and it will be made anew") from error

    def split(self, split: str) -> Kept:
        """The tokens of a split, from the kept file if there is one."""
        names = f"{self.name}-{split}.u16", f"{self.name}-{split}.json"
        kept = next((folder for folder in cache_folders() if all((folder / name).exists() for name in names)), None)
        if kept is None:
            kept = writable_cache()
            with written_atomically(kept / names[0]) as unfinished:
                about = encode(self.files.of(split), self.tokenizer(), unfinished, f"{self.name}, {split}")
            write_text(kept / names[1], json.dumps(about) + "\n")
        about = read_object(kept / names[1], dict.fromkeys(("tokens", "bytes", "documents"), "integer"))
        if (kept / names[0]).stat().st_size != 2 * about["tokens"]:
            raise DataError(f"{kept / names[0]} is damaged; delete it, and it will be made anew")
        return Kept(np.memmap(kept / names[0], np.uint16, "r"), about["bytes"], about["documents"])


def content_key(files: Files) -> str:
    """A name for what the files hold: their sizes, first and last megabytes and splits. The same wherever they lie."""
    digest = hashlib.sha256(f"{FORMAT} {SAMPLE}".encode())
    for file in files.all:
        real = next(place for place in (file, *file.parents) if place.exists())  # a path may go on inside a .zip
        size = real.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(real, "rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()[:12]


def say(text: str) -> None:
    print(text, file=sys.stderr)


# ---------------------------------------------------------------------------------------------------- BPE


def tokenizers_package() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise DataError(f"a corpus is cut into tokens by the package tokenizers; install it with: {install_hint('text')}"
                        ) from None
    return tokenizers


def first_characters(texts: Iterator[str], most: int = SAMPLE) -> list[str]:
    """Documents from the first on, until they have `most` characters in all."""
    taken, left = [], most
    for text in texts:
        taken.append(text[:left])
        left -= len(taken[-1])
        if left <= 0:
            break
    if not taken:
        raise DataError("the training split of this corpus has no text; give more of it")
    return taken


def learnt(package: Any, texts: list[str], vocabulary: int) -> Any:
    """Byte-level BPE: no character is unknown, nothing is lost."""
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], show_progress=False,
                                          initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(texts: Iterator[str], tokenizer: Any, file: Path, what: str) -> dict[str, int]:
    """Write the tokens of documents to a file of 16-bit numbers, a few megabytes of text at a time, on all cores; how many
    tokens, bytes and documents there were."""
    end = np.array([tokenizer.token_to_id(END)], np.uint16)
    count = {"tokens": 0, "bytes": 0, "documents": 0}
    with open(file, "wb") as out, reporting(what) as report:
        for some in together(texts):
            # encode_batch keeps where each token stood; the fast one, of newer versions, does not
            for encoded in getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)(some):
                numbers = np.asarray(encoded.ids, np.uint16)
                out.write(numbers.tobytes())
                out.write(end.tobytes())
                count["tokens"] += len(numbers) + 1
            count["documents"] += len(some)
            size = sum(len(text.encode()) for text in some)
            count["bytes"] += size + len(SEPARATOR) * len(some)
            report(size)
    if not count["documents"]:
        raise DataError(f"{what}: this split has no text; give more of it")
    count["bytes"] -= len(SEPARATOR)  # after the last there is none
    return count


def together(texts: Iterator[str]) -> Iterator[list[str]]:
    """Documents in lists of some megabytes."""
    some, size = [], 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= PIECE:
            yield some
            some, size = [], 0
    if some:
        yield some


class reporting:
    """A bar on a terminal, else a line every ten seconds: how much text has been cut into tokens."""

    def __init__(self, what: str) -> None:
        self._what, self._done, self._said, self._bar = what, 0, time.monotonic(), None

    def __enter__(self) -> Callable[[int], None]:
        say(f"Cutting {self._what} into tokens, once")
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(unit="B", unit_scale=True, desc="  text")
        return self._advance

    def _advance(self, size: int) -> None:
        self._done += size
        if self._bar is not None:
            self._bar.update(size)
        elif time.monotonic() - self._said > SECONDS_BETWEEN_REPORTS:
            self._said = time.monotonic()
            say(f"  {self._done / 1e6:,.0f} MB")

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


# ---------------------------------------------------------------------------------------------------- the data set


@dataclass(frozen=True)
class Corpus:
    """Tokens of three splits. They stay in files that are mapped into memory; only batches go to a device."""

    preparation: Preparation
    context: int = CONTEXT  # tokens in a sample
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.context < 1:
            raise DataError(f"context={self.context}: give at least 1")
        for split in ("train", "val"):
            tokens, least = len(self.kept(split).tokens), self.context + 2
            if tokens < least:
                raise DataError(f"{split} of {self.preparation.name} has {tokens} tokens and a context of {self.context} "
                                f"needs {least}; give more text or a smaller context")

    @cached_property
    def _kept(self) -> dict[str, Kept]:
        return {}

    def kept(self, split: str) -> Kept:
        if split not in SPLITS:
            raise DataError(f"split={split!r}: choose one of {', '.join(SPLITS)}")
        if split not in self._kept:
            self._kept[split] = self.preparation.split(split)
        return self._kept[split]

    @cached_property
    def tokenizer(self) -> Any:
        return self.preparation.tokenizer()

    @cached_property
    def classes(self) -> int:
        return self.tokenizer.get_vocab_size()

    @cached_property
    def fingerprint(self) -> str:
        """Which number means what: two corpora with the same one can be read by the same model."""
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()[:16]

    def bits_a_byte(self, split: str, loss: float) -> float:
        """A loss in nats a token of that split -> bits a byte of its text."""
        kept = self.kept(split)
        return loss * len(kept.tokens) / (kept.bytes * math.log(2))

    def encode(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer.encode(text).ids)

    def decode(self, tokens: Tensor) -> str:
        return self.tokenizer.decode(tokens.flatten().tolist())

    def to(self, device: torch.device | str) -> "Corpus":
        return dataclasses.replace(self, device=str(device))

    def windows(self) -> int:
        """Samples in a pass over the training text, whose first may begin at any of the first `context` tokens."""
        return max(1, (len(self.kept("train").tokens) - self.context - 1) // self.context)

    def per_epoch(self, batch: int) -> int:
        return max(1, self.windows() // batch)

    def batches(self, batch: int, seed: int, first_step: int = 0, augment: str = "none",
                compiled: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (x, y), int64 of (batch, context): windows of the training text, and the same one token on. Each pass sees
        every window once, in an order and from a first token of its own, by (seed, pass) alone. Nothing to compile."""
        if augment != "none":
            raise DataError(f"augment={augment!r} needs images and this is text; choose augment=none")
        return self._batches(batch, seed, first_step)

    def _batches(self, batch: int, seed: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        tokens, windows, per_epoch = self.kept("train").tokens, self.windows(), self.per_epoch(batch)
        while True:
            epoch, first = divmod(step, per_epoch)
            generator = seeded("pass", seed, epoch)
            start = int(torch.randint(min(self.context, len(tokens) - self.context * windows), (1,), generator=generator))
            order = torch.randperm(windows, generator=generator).repeat(-(-batch // windows))  # a batch of more than all
            for some in order.split(batch)[first:per_epoch]:
                places = (start + self.context * some).tolist()
                yield self._sample(np.stack([tokens[place : place + self.context + 1] for place in places]))
                step += 1

    def _sample(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:  # (batch, context + 1) uint16
        both = torch.from_numpy(windows.astype(np.int64))
        if self.device != "cpu":
            both = both.pin_memory().to(self.device, non_blocking=True)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def evaluation_batches(self, split: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over a split: (x, y) of (batch, context), window after window, none overlapping; what is left over comes
        as a batch of its own. Every token but the first is predicted exactly once."""
        tokens = self.kept(split).tokens
        whole = (len(tokens) - 1) // self.context
        for first in range(0, whole, batch):
            places = range(first * self.context, min(first + batch, whole) * self.context, self.context)
            yield self._sample(np.stack([tokens[place : place + self.context + 1] for place in places]))
        if whole * self.context < len(tokens) - 1:
            yield self._sample(np.asarray(tokens[whole * self.context :])[None])


# ---------------------------------------------------------------------------------------------------- the corpora


def load_corpus(path: Path, context: int = CONTEXT, vocabulary: int = VOCABULARY) -> Corpus:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    return Corpus(Preparation.of(path, vocabulary), context)


def find_wiki() -> Path | None:
    return _folder_of_splits(data_folder() / "wiki")


def fetch_wiki(progress: bool = True) -> Path:
    """There is no public file of these articles, so it can only be found."""
    folder = data_folder() / "wiki"
    found = find_wiki()
    if found is None:
        raise DataError(f"{folder} has no wiki-train, wiki-val and wiki-test (.txt or .txt.xz), and there is nothing to "
                        "fetch; put them there, set GFT_DATA, or train on data=wikitext-103 or data=corpus:PATH")
    return found


def find_wikitext() -> Path | None:
    folder = data_folder() / "wikitext-103"
    return _folder_of_splits(folder) or (folder / WIKITEXT.name if (folder / WIKITEXT.name).is_file() else None)


def fetch_wikitext(progress: bool = True) -> Path:
    folder = data_folder() / "wikitext-103"
    return find_wikitext() or retrieve("WikiText-103", WIKITEXT, WIKITEXT_MIRRORS, folder, progress,
                                       f"put {WIKITEXT.name}, or its three files, into {folder}")


def find_fineweb() -> Path | None:
    folder = data_folder() / "fineweb-edu"
    return folder if any(folder.glob("*.parquet")) else None


def fetch_fineweb(progress: bool = True) -> Path:
    folder = data_folder() / "fineweb-edu"
    return find_fineweb() or retrieve_published("FineWeb-Edu", FINEWEB, folder, progress,
                                                f"put files of its sample/10BT into {folder}").parent


def _folder_of_splits(folder: Path) -> Path | None:
    try:
        return folder if folder.is_dir() and files_of(folder).by_split else None
    except DataError:
        return None


def load_found(fetch: Callable[..., Path], context: int = CONTEXT, vocabulary: int = VOCABULARY) -> Corpus:
    return load_corpus(fetch(), context, vocabulary)


NAMED: dict[str, tuple[Callable[..., Corpus], Callable[[], Path | None], Callable[[bool], Path]]] = {
    "wiki": (partial(load_found, fetch_wiki), find_wiki, fetch_wiki),
    "wikitext-103": (partial(load_found, fetch_wikitext), find_wikitext, fetch_wikitext),
    "fineweb-edu": (partial(load_found, fetch_fineweb), find_fineweb, fetch_fineweb),
}
