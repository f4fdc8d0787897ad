"""Text as numbers: encoding, windows, evaluation, and files of one's own."""

import dataclasses
import itertools

import pytest
import torch

from gft.lab import data
from gft.lab.data import text


def take(batches, n):
    return list(itertools.islice(batches, n))


def same(a, b):
    return len(a) == len(b) and all(torch.equal(p, q) for one, other in zip(a, b, strict=True)
                                    for p, q in zip(one, other, strict=True))


def test_text_is_encoded_and_decoded():
    verses = data.load("verses")
    assert isinstance(verses, data.Text)
    assert verses.characters == "".join(sorted(set(text.SONNETS)))
    assert verses.decode(verses.encode("Shall I compare thee")) == "Shall I compare thee"
    assert verses.decode(torch.cat([verses.train, verses.val])) == text.SONNETS
    assert verses.train.dtype == torch.uint8
    assert len(verses.train) == len(text.SONNETS) * 9 // 10
    many = data.Text.of("".join(map(chr, range(0x4E00, 0x4E00 + 300))) * 3, context=16)
    assert (many.classes, many.train.dtype) == (300, torch.int64)
    assert many.decode(many.encode("丂一")) == "丂一"


def test_an_unknown_character_is_named(refuses):
    with refuses(data.DataError, "the character 'é' is not among the 51"):
        data.load("verses").encode("thé")


def test_windows_are_shifted_by_one_and_depend_on_seed_and_step_alone(rng_untouched):
    verses = data.load("verses", context=20)
    with rng_untouched():
        every = take(verses.batches(7, seed=3), 6)
    for x, y in every:
        assert x.shape == y.shape == (7, 20)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert all(verses.decode(row) in text.SONNETS for row in torch.cat([x, y[:, -1:]], 1))
    assert same(every[4:], take(verses.batches(7, seed=3, first_step=4), 2))
    assert not torch.equal(every[0][0], every[1][0])
    assert not torch.equal(every[0][0], next(verses.batches(7, seed=4))[0])


def test_windows_reach_both_ends_of_the_training_text():
    short = data.Text.of("abcdefghij" * 4, context=3)
    starts = {tuple(row.tolist()) for x, _ in take(short.batches(64, seed=1), 5) for row in x}
    last = {tuple(row.tolist()) for _, y in take(short.batches(64, seed=1), 5) for row in y}
    assert tuple(short.train[:3].tolist()) in starts
    assert tuple(short.train[-3:].tolist()) in last


@pytest.mark.parametrize("length", [2, 30, 40, 81, 82, 299])
def test_evaluation_predicts_every_character_but_the_first_once(length):
    verses = data.load("verses", context=40)
    short = dataclasses.replace(verses, val=verses.train[:length])
    parts = list(short.evaluation_batches("val", 3))
    assert torch.equal(torch.cat([x.flatten() for x, _ in parts]), short.val[:-1].long())
    assert torch.equal(torch.cat([y.flatten() for _, y in parts]), short.val[1:].long())
    assert all(x.shape[1] == 40 and len(x) <= 3 for x, _ in parts[:-1])
    assert all(len(x) for x, _ in parts)


def test_text_epochs_count_characters():
    verses = data.load("verses")
    assert verses.per_epoch(4) == len(verses.train) // (4 * 32)
    assert verses.per_epoch(10_000) == 1


def test_any_file_can_be_the_text(tmp_path, refuses):
    file = tmp_path / "mine.txt"
    with refuses(data.DataError, r"mine.txt cannot be read \(No such file"):
        data.load(f"text:{file}")
    assert data.found(f"text:{file}") is None
    with refuses(data.DataError, "there is nothing to fetch"):
        data.fetch(f"text:{file}")
    for content in ("", "too short"):
        file.write_text(content)
        with refuses(data.DataError, f"mine.txt has {len(content)} characters and a context of 256 needs 2570"):
            data.load(f"text:{file}")
    file.write_bytes(b"caf\xe9" * 1000)
    with refuses(data.DataError, r"not UTF-8 \(byte 3\)"):
        data.load(f"text:{file}")
    file.write_bytes("\ufeffwhat is ours\r\n".encode() * 300)
    mine = data.load(f"text:{file}", context=50)
    assert isinstance(mine, data.Text)
    assert mine.context == 50
    assert mine.decode(mine.train[:13]) == "what is ours\n"
    assert data.fetch(f"text:{file}") == str(file)


def test_shakespeare_with_a_wrong_checksum_is_refused(empty, refuses):
    (empty / "tinyshakespeare").mkdir(parents=True)
    (empty / "tinyshakespeare" / "input.txt").write_text(text.SONNETS)
    with refuses(data.DataError, "is not Tiny Shakespeare"):
        data.load("shakespeare")


def test_shakespeare_is_nano_gpts():
    if data.found("shakespeare") is None:
        pytest.skip("Tiny Shakespeare is not in the data folder; set GFT_DATA or run: gft data fetch shakespeare")
    plays = data.load("shakespeare")
    assert isinstance(plays, data.Text)
    assert (plays.classes, plays.context, len(plays.train), len(plays.val)) == (65, 256, 1_003_854, 111_540)
    assert plays.decode(plays.train[:14]) == "First Citizen:"


