"""Text corpora: which files are read, how documents are shared out, and the tokens that are kept of them."""

import gzip
import hashlib
import http.server
import itertools
import lzma
import math
import threading
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from gft.errors import UsageError
from gft.lab import data
from gft.lab.data import corpus, documents, folder
from gft.lab.data.sonnets import SONNETS

pytest.importorskip("tokenizers")
POEMS = [f"Poem {number}, naïve · {line}" for number, line in enumerate(SONNETS.splitlines() * 4) if line]


@pytest.fixture
def wiki(empty):
    """A data folder with the three files of `wiki`, tiny."""
    (empty / "wiki").mkdir(parents=True)
    for split, some in (("train", POEMS[:200]), ("val", POEMS[200:240]), ("test", POEMS[240:270])):
        packed = lzma.compress("\n\n\n".join(some).encode())
        (empty / "wiki" / f"wiki-{split}.txt.xz").write_bytes(packed)
    return empty


def load(**options):
    return data.load("wiki", **{"context": 16, "vocabulary": 400, **options})


def test_tokens_are_the_text_again_and_bits_are_counted_by_its_bytes(wiki):
    loaded = load()
    text = "\n\n\n".join(POEMS[200:240])
    kept = loaded.kept("val")
    assert loaded.decode(torch.from_numpy(kept.tokens.astype(np.int64))) == "".join(POEMS[200:240])  # END writes nothing
    assert (kept.bytes, kept.documents) == (len(text.encode()), 40)
    assert kept.tokens.dtype == np.uint16
    assert loaded.classes == 400
    # A model that knows nothing: log2(400) bits a token.
    assert loaded.bits_a_byte("val", math.log(400)) == pytest.approx(math.log2(400) * len(kept.tokens) / kept.bytes)
    assert torch.equal(loaded.encode("love"), loaded.encode("love"))


def test_tokens_are_prepared_once_and_the_test_split_only_when_asked_for(wiki, monkeypatch, capsys):
    load()
    assert "Cutting wiki" in capsys.readouterr().err
    made = {file.name.split("-", 2)[2].partition("-")[2] for file in (wiki / "cache").iterdir()}
    assert made == {"", "train.u16", "train.json", "val.u16", "val.json"}
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "encode", None)  # nothing may be cut anew
        again = load()
        assert capsys.readouterr().err == ""
    assert again.kept("test").documents == 30
    # The same text elsewhere has the same name; another vocabulary, or another text, has not.
    name = again.preparation.name
    assert load(vocabulary=300).preparation.name != name
    (wiki / "wiki" / "wiki-val.txt.xz").write_bytes(lzma.compress(SONNETS.encode()))
    assert load().preparation.name != name


def test_a_kept_file_that_was_cut_short_is_refused(wiki, refuses):
    load()
    (file,) = (wiki / "cache").glob("*val.u16")
    file.write_bytes(file.read_bytes()[:-2])
    with refuses(data.DataError, "is damaged; delete it"):
        load()


def test_a_pass_sees_every_window_once_and_any_step_is_found_again(wiki):
    loaded = load()
    tokens, batch = loaded.kept("train").tokens.astype(np.int64), 4
    per_epoch = loaded.per_epoch(batch)
    first, second = (list(itertools.islice(loaded.batches(batch, 1, start), per_epoch)) for start in (0, per_epoch))
    for some in (first, second):
        seen = sorted(row.tolist() for x, _ in some for row in x)
        passes = [sorted(tokens[at : at + 16].tolist() for at in range(start, start + 16 * loaded.windows(), 16))
                  for start in range(16)]
        assert any(all(seen.count(row) <= windows.count(row) for row in seen) for windows in passes)
    assert all(torch.equal(x[:, 1:], y[:, :-1]) for x, y in first)
    assert not torch.equal(first[0][0], second[0][0])
    resumed = next(loaded.batches(batch, 1, per_epoch + 3))
    assert torch.equal(resumed[0], second[3][0])
    assert next(loaded.batches(10 * loaded.windows(), 0))[0].shape[0] >= loaded.windows()  # a batch of more than all


def test_evaluation_predicts_every_token_but_the_first_exactly_once(wiki):
    loaded = load()
    seen = torch.cat([y.flatten() for _, y in loaded.evaluation_batches("val", 3)])
    assert torch.equal(seen, torch.from_numpy(loaded.kept("val").tokens.astype(np.int64))[1:])


# ---------------------------------------------------------------------------------------------------- files


def read(path, split):
    return list(documents.files_of(path).of(split))


def test_many_documents_are_shared_out_by_their_text_and_few_are_cut(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("\n\n\n".join(f"document {number}" for number in range(3000)))
    with gzip.open(tmp_path / "b.md.gz", "wt") as file:
        file.write("\n\n\n".join(f"document {number}" for number in range(3000, 6000)))
    monkeypatch.setattr(documents, "PIECE", 1000)  # separators at the border of a piece, too
    parts = {split: read(tmp_path, split) for split in data.SPLITS}
    assert sorted(itertools.chain(*parts.values())) == sorted(f"document {number}" for number in range(6000))
    assert 10 < len(parts["val"]) < 60
    assert 10 < len(parts["test"]) < 60
    short = tmp_path / "a.txt"
    short.write_text("x" * 900 + "y" * 50 + "z" * 50)
    assert [read(short, split) for split in data.SPLITS] == [["x" * 900], ["y" * 50], ["z" * 50]]


def test_wikitexts_archive_has_its_splits_inside(empty):
    place = empty / "wikitext-103"
    place.mkdir(parents=True)
    with zipfile.ZipFile(place / corpus.WIKITEXT.name, "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103/wiki.{split}.tokens", f"the {split} text\n" * 60)
    assert read(corpus.find_wikitext(), "val") == ["the valid text\n" * 60]
    assert data.load("wikitext-103", 8, 300).kept("test").documents == 1


def test_parquet_is_read_by_its_text_column(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table({"text": ["one", None, "two"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert list(documents.documents([tmp_path / "a.parquet"])) == ["one", "two"]


def test_zstandard_is_read_where_its_package_is(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress("one\n\n\ntwo ·".encode()))
    assert list(documents.documents([tmp_path / "a.txt.zst"])) == ["one", "two ·"]


def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path, wiki, refuses, monkeypatch):
    with refuses(data.DataError, "is not a text corpus"):
        data.load(f"corpus:{tmp_path / 'nowhere'}")
    (tmp_path / "a.pdf").write_text("no")
    with refuses(data.DataError, "is of no kind that can be read"):
        data.load(f"corpus:{tmp_path / 'a.pdf'}")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe" * 300)
    with refuses(data.DataError, "is not UTF-8"):
        data.load(f"corpus:{tmp_path / 'b.txt'}")
    for kind, package in ((".zst", "zstandard"), (".parquet", "pyarrow")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        file = tmp_path / f"c.txt{kind}"
        file.write_bytes(b"x")
        with refuses(data.DataError, f"pip install {package}"):
            list(documents.documents([file]))
    with refuses(data.DataError, "vocabulary=100"):
        load(vocabulary=100)
    with refuses(data.DataError, "needs 100002; give more text or a smaller context"):
        load(context=100_000)
    with refuses(data.DataError, "is for a corpus of tokens and verses is none"):
        data.load("verses", vocabulary=300)
    (wiki / "wiki" / "wiki-test.txt.xz").unlink()
    assert data.found("wiki") is None
    with refuses(data.DataError, "there is nothing to fetch"):
        data.fetch("wiki")


def test_a_document_may_be_longer_than_what_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 3)
    text = "one long\n\ndocument\n\n\n\n\n\ntwo\n\n\n\nthree"
    (tmp_path / "a.txt").write_text(text)
    assert list(documents.documents([tmp_path / "a.txt"])) == [one for one in text.split("\n\n\n") if one]


@pytest.mark.parametrize("name", ["a.txt.xz", "a.txt.gz", "a.zip"])
def test_a_packed_text_that_would_fill_the_memory_is_refused(name, tmp_path, monkeypatch, refuses):
    bomb = b"a" * 2**25
    if name == "a.zip":
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.txt", bomb)
    else:
        (tmp_path / name).write_bytes((lzma if name.endswith("xz") else gzip).compress(bomb))
    monkeypatch.setattr(documents, "ALWAYS", 2**18)
    tracemalloc.start()
    try:
        with refuses(data.DataError, "it unpacks to more than 200 times its size"):
            list(documents.documents([tmp_path / name]))
        assert tracemalloc.get_traced_memory()[1] < 2**25 + 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("outside", ["/{folder}/secret", "../secret", "a//b"])
def test_no_name_in_an_archive_leads_out_of_it(outside, tmp_path, refuses):
    for split in ("train", "val", "test"):
        (tmp_path / f"secret.{split}.txt").write_text("not for this corpus")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for split in ("train", "val", "test"):
            name = zipfile.ZipInfo(outside.format(folder=tmp_path) + f".{split}.txt")
            archive.writestr(name, "of the archive")
    if outside.startswith(".."):  # which zipfile looks for in the archive, and so nowhere else
        assert list(documents.files_of(tmp_path / "a.zip").of("train")) == ["of the archive"]
        return
    with refuses(data.DataError, "is no path inside it"):
        documents.files_of(tmp_path / "a.zip")


@pytest.mark.parametrize(("kind", "content"), [
    (".txt.gz", gzip.compress(b"text " * 99, mtime=0)[:30] + b"xx" * 20), (".txt.gz", b"\x1f\x8b\x08\x00" + bytes(40)),
    (".txt.xz", b"\xfd7zXZ\x00" + bytes(40)), (".zip", b"PK\x03\x04" + bytes(40)), (".txt.gz", b"")], ids=str)
def test_a_packed_text_that_is_damaged_is_said_in_a_sentence(kind, content, tmp_path, refuses):
    (tmp_path / f"a{kind}").write_bytes(content)
    if content:
        with refuses(data.DataError, "cannot be read"):
            list(documents.documents([tmp_path / f"a{kind}"]))
    else:
        assert list(documents.documents([tmp_path / f"a{kind}"])) == []


def test_an_encrypted_archive_is_said_in_a_sentence(tmp_path, refuses):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    content = bytearray((tmp_path / "a.zip").read_bytes())
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    with refuses(data.DataError, "is encrypted"):
        list(documents.documents([tmp_path / "a.zip"]))


def test_kept_files_that_are_damaged_are_named(wiki, refuses):
    load()
    (about,) = wiki.rglob("*-train.json")
    about.write_text('{"tokens": "many"}')
    with refuses(UsageError, "tokens should be integer"):
        load()
    about.unlink()
    (tokenizer,) = wiki.rglob("*.tokenizer.json")
    tokenizer.write_text("{}")
    with refuses(data.DataError, "tokenizer.json is damaged"):
        load()


def test_a_file_of_the_hub_is_checked_by_the_checksum_that_the_hub_states(tmp_path, monkeypatch, refuses):
    content = b"a whole file"
    stated = {"etag": hashlib.sha256(content).hexdigest()}

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(302)
            self.send_header("X-Linked-Etag", f'"{stated["etag"]}"')
            self.end_headers()

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/one/000.parquet"
    try:
        monkeypatch.setenv("GFT_DATA", str(tmp_path))
        file = folder.retrieve_published("It", url, tmp_path / "good", False, "put it there")
        assert file.read_bytes() == content
        for wrong in ("0" * 64, "none"):
            stated["etag"] = wrong
            with refuses(data.DataError, "could not be fetched .*(hash|checksum).*; put it there"):
                folder.retrieve_published("It", url, tmp_path / wrong, False, "put it there")
    finally:
        server.shutdown()
        server.server_close()
