"""Text, character by character: what the next one is, given those before it.

Characters are numbered in the order of their code points; the first 90 % of a text train and the last 10 % validate, as
in nanoGPT, whose Tiny Shakespeare this is. Nothing is held back as a test: "test" is the validation text again.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gft.files import read_whole
from gft.lab.data.dataset import named_split, seeded
from gft.lab.data.folder import DataError, Source, data_folder, retrieve
from gft.lab.data.sonnets import SONNETS

SHAKESPEARE = Source("input.txt", "6fb458f1232090904fb40fe944165e91")
SHAKESPEARE_MIRRORS = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",)
CONTEXT = 256


@dataclass(frozen=True)
class Text:
    """A text as numbers from 0 to `classes` - 1, 1-D, of each split."""

    train: Tensor
    val: Tensor
    test: Tensor
    characters: str  # number -> character, sorted
    context: int = CONTEXT  # characters that a training sample has

    @staticmethod
    def of(text: str, context: int = CONTEXT, origin: str = "the text") -> "Text":
        """Number the characters of `text` and split it; `origin` names it in errors."""
        if context < 1:
            raise DataError(f"context={context}: give at least 1")
        least = 10 * (context + 1)  # so that the last tenth, too, has a whole window and the character after it
        if len(text) < least:
            raise DataError(f"{origin} has {len(text)} characters and a context of {context} needs {least}; give a longer "
                            "text or a smaller context")
        characters = "".join(sorted(set(text)))
        tokens = _numbers(text, characters)
        cut = len(text) * 9 // 10
        return Text(tokens[:cut], tokens[cut:], tokens[cut:], characters, context)

    @staticmethod
    def without_splits(characters: str, context: int) -> "Text":
        """The characters alone: what it takes to write, and nothing to read."""
        nothing = _numbers("", characters)
        return Text(nothing, nothing, nothing, characters, context)

    @property
    def classes(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Characters -> numbers (len(text),) int64, on the CPU."""
        strange = set(text) - set(self.characters)
        if strange:
            first = next(character for character in text if character in strange)
            raise DataError(f"the character {first!r} is not among the {self.classes} of this text; write with "
                            f"{self.characters[:100]!r}")
        return _numbers(text, self.characters).long()

    def decode(self, tokens: Tensor) -> str:
        """Numbers -> characters."""
        return "".join(self.characters[token] for token in tokens.flatten().tolist())

    def to(self, device: torch.device | str) -> "Text":
        val = self.val.to(device)
        test = val if self.test is self.val else self.test.to(device)
        return dataclasses.replace(self, train=self.train.to(device), val=val, test=test)

    def per_epoch(self, batch: int) -> int:
        """Training batches that have as many characters as the training text, at least 1."""
        return max(1, len(self.train) // (batch * self.context))

    def batches(self, batch: int, seed: int, first_step: int = 0, augment: str = "none",
                compiled: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (x, y), int64 of (batch, context): windows of the training text at random places, and the same one
        character on. The places of step s depend on (seed, s) alone. There is nothing to compile."""
        if augment != "none":
            raise DataError(f"augment={augment!r} needs images and this is text; choose augment=none")
        return self._batches(batch, seed, first_step)

    def _batches(self, batch: int, seed: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        steps = torch.arange(self.context + 1, device=self.train.device)
        while True:
            starts = torch.randint(len(self.train) - self.context, (batch, 1), generator=seeded("windows", seed, step))
            windows = self.train[starts.to(self.train.device) + steps].long()
            yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
            step += 1

    def evaluation_batches(self, split: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over "train", "val" or "test": (x, y) of (batch, context), window after window, none overlapping.

        Every character but the first is predicted exactly once. What is left after the last whole window comes as a
        batch of its own, (1, rest), so an average must weigh batches by y.numel().
        """
        tokens = named_split(self, split)
        whole = (len(tokens) - 1) // self.context * self.context
        x, y = (tokens[first : first + whole].view(-1, self.context) for first in (0, 1))
        for some_x, some_y in zip(x.split(batch), y.split(batch), strict=True):
            if len(some_x):  # a text shorter than a window still splits into one batch, of nothing
                yield some_x.long(), some_y.long()
        if whole < len(tokens) - 1:
            yield tokens[whole:-1].long().unsqueeze(0), tokens[whole + 1 :].long().unsqueeze(0)


def _numbers(text: str, characters: str) -> Tensor:
    """Each character's place among `characters`, which must be sorted and have them all."""
    places, codes = (np.frombuffer(string.encode("utf-32-le"), np.uint32) for string in (characters, text))
    numbers = np.searchsorted(places, codes)
    return torch.from_numpy(numbers.astype(np.uint8 if len(characters) <= 256 else np.int64))


# ---------------------------------------------------------------------------------------------------- the texts


def find_shakespeare() -> Path | None:
    places = (data_folder() / folder / SHAKESPEARE.name for folder in ("shakespeare", "tinyshakespeare"))
    return next((place for place in places if place.is_file()), None)


def fetch_shakespeare(progress: bool = True) -> Path:
    """Find Tiny Shakespeare or download it into the data folder, checksum checked."""
    folder = data_folder() / "shakespeare"
    return find_shakespeare() or retrieve(
        "Tiny Shakespeare", SHAKESPEARE, SHAKESPEARE_MIRRORS, folder, progress,
        f"put its input.txt into {folder}, or set GFT_DATA to a folder that has shakespeare/input.txt")


def load_shakespeare(context: int = CONTEXT) -> Text:
    """Tiny Shakespeare: 1,115,394 characters of plays, 65 different."""
    import pooch

    path = fetch_shakespeare()
    if pooch.file_hash(str(path), alg="md5") != SHAKESPEARE.md5:
        raise DataError(f"{path} is not Tiny Shakespeare (its checksum differs); delete it and run gft data fetch "
                        f"shakespeare, or train on it as it is with data=text:{path}")
    return load_text(path, context)


def load_text(path: Path, context: int = CONTEXT) -> Text:
    """Any UTF-8 file."""
    try:
        text = read_whole(path).decode("utf-8-sig")  # the mark some editors put first is not part of the text
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}); save it in that encoding") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give text:PATH with the path of a text file") from error
    return Text.of(text, context, str(path))


def load_verses(context: int = 32) -> Text:
    """Six sonnets that come with the package, for tests and demonstrations."""
    return Text.of(SONNETS, context, "the verses")
