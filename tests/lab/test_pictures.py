"""Folders and archives of pictures: found, decoded once, kept, and refused where they are damaged."""

import gzip
import hashlib
import io
import os
import struct
import tarfile
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from gft.lab import data
from gft.lab.data import imagenette, pictures


def same(a, b):
    return all(torch.equal(p, q) for one, other in zip(a, b, strict=True) for p, q in zip(one, other, strict=True))


TINY = {"train/n01/a_1": (250, 0, 0), "train/n01/a_2": (200, 0, 0), "train/n02/b_1": (0, 250, 0),
        "train/n10/c_1": (0, 0, 250), "val/n02/b_9": (0, 200, 0), "val/n10/c_9": (0, 0, 200)}


@pytest.fixture
def tiny(empty, monkeypatch):
    """tiny("folder" | "zip" | "tgz", suffix) makes six pictures of three classes in the data folder."""
    monkeypatch.setattr(imagenette, "IMAGES", {"train": 4, "val": 2})
    monkeypatch.setattr(imagenette, "CLASSES", ("red", "green", "blue"))
    monkeypatch.setattr(imagenette, "ARCHIVES", ())  # whose checksums are of the real ones

    def make(layout="folder", extension="JPEG", name="imagenette2-160", sub="."):
        files = {"noisy_imagenette.csv": b"path", "train/n01/._a_1.JPEG": b"left by a Mac", "val/n02/notes.txt": b"hello"}
        for stem, colour in TINY.items():
            content = io.BytesIO()
            Image.new("RGB", (20, 12), colour).save(content, {"JPEG": "JPEG", "webp": "WebP", "png": "PNG"}[extension])
            files[f"{stem}.{extension}"] = content.getvalue()
        place = empty / sub
        place.mkdir(parents=True, exist_ok=True)
        if layout == "folder":
            for file, content in files.items():
                (place / name / file).parent.mkdir(parents=True, exist_ok=True)
                (place / name / file).write_bytes(content)
            return place / name
        path = place / f"{name}.{layout}"
        if layout == "zip":
            with zipfile.ZipFile(path, "w") as archive:
                for file, content in reversed(files.items()):  # an archive's order is its own
                    archive.writestr(f"{name}/{file}", content)
        else:
            with tarfile.open(path, "w:gz") as archive:
                for file, content in reversed(files.items()):
                    member = tarfile.TarInfo(f"{name}/{file}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        return path

    return make


@pytest.mark.parametrize(("layout", "extension", "sub"), [
    ("folder", "JPEG", "."), ("folder", "png", "imagenette"), ("zip", "webp", "imagenette"), ("tgz", "JPEG", ".")])
def test_imagenette_is_read_in_every_layout(layout, extension, sub, tiny):
    source = tiny(layout, extension, sub=sub)
    assert data.found("imagenette") == str(source.resolve())
    loaded = data.load("imagenette-16")
    assert isinstance(loaded, data.Dataset)
    assert loaded.shape == (3, 16, 16)
    assert loaded.train[1].tolist() == [0, 0, 1, 2]
    assert loaded.val[1].tolist() == loaded.test[1].tolist() == [1, 2]
    assert loaded.classes == 3
    assert loaded.flips
    middle = loaded.train[0][:, :, 8, 8].int()
    wanted = torch.tensor([colour for stem, colour in TINY.items() if "train" in stem])
    assert (middle - wanted).abs().max() <= 6  # a lossy format's
    x, _ = next(loaded.evaluation_batches("val", 2))
    assert x.dtype == torch.float32
    assert x[0, 1].mean() == pytest.approx((200 / 255 - 0.456) / 0.224, abs=0.1)
    moved = loaded.to("cpu")
    assert moved.val[0] is moved.test[0]


def test_decoded_images_are_kept_and_made_anew_when_the_source_changes(tiny, empty, monkeypatch, capsys):
    calls = []
    real = pictures.decode
    monkeypatch.setattr(pictures, "decode", lambda content, size: calls.append(size) or real(content, size))
    source = tiny("zip")
    first = data.load("imagenette-16")
    assert len(calls) == 6
    assert f"kept in {empty / 'cache'}" in capsys.readouterr().err
    again = data.load("imagenette-16")
    assert len(calls) == 6
    assert same([first.train, first.val], [again.train, again.val])
    data.load("imagenette-12")
    assert len(calls) == 12  # another size is another file
    os.utime(source, ns=(5, 5))
    data.load("imagenette-16")
    assert len(calls) == 18
    assert len(list((empty / "cache").iterdir())) == 4  # two splits of two sizes: what the old source gave is gone


def test_a_folder_that_changes_inside_is_decoded_anew(tiny):
    source = tiny("folder")
    before = data.load("imagenette-16").train[0].clone()
    Image.new("RGB", (20, 12), (9, 9, 9)).save(source / "train/n02/b_1.JPEG")
    after = data.load("imagenette-16").train[0]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, True]


def test_a_folder_marked_read_only_is_left_alone(tiny, empty, tmp_path):
    """Even by root, whom its mode would not stop."""
    tiny("zip")
    empty.chmod(0o555)
    try:
        data.load("imagenette-16")
        assert [path.name for path in empty.iterdir()] == ["imagenette2-160.zip"]
        assert len(list((tmp_path / "user" / "cache").iterdir())) == 2
    finally:
        empty.chmod(0o755)


@pytest.mark.parametrize("layout", ["folder", "zip", "tgz"])
def test_a_corrupt_image_is_named_and_nothing_is_kept(layout, tiny, empty, monkeypatch, refuses):
    source = tiny(layout)
    if layout == "folder":
        file = source / "train/n02/b_1.JPEG"
        file.write_bytes(file.read_bytes()[:60])
    else:  # an archive is whole, the picture in it is not
        real = pictures._archive
        monkeypatch.setattr(pictures, "_archive", lambda *arguments, **options: (
            (name, content[:60] if name.endswith("b_1.JPEG") else content) for name, content in real(*arguments, **options)))
    with refuses(data.DataError, "train/n02/b_1.JPEG is not a readable image"):
        data.load("imagenette-16")
    assert not any((empty / "cache").iterdir())


@pytest.mark.parametrize("layout", ["zip", "tgz"])
def test_an_archive_cut_short_is_refused(layout, tiny, refuses):
    source = tiny(layout)
    source.write_bytes(source.read_bytes()[:-700])
    with refuses(data.DataError, f"cannot be read .*; delete {source.name} and fetch it again"):
        data.load("imagenette-16")


def test_a_flipped_bit_of_an_archive_is_noticed(tiny, empty, refuses):
    """Wherever it is: in a picture's pixels, in the padding, in gzip's checksum; but for gzip's header, with its date."""
    source = tiny("tgz", "png")
    whole = source.read_bytes()
    for place in range(whole.index(b"\0", 10) + 1, len(whole), 97):
        source.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with refuses(data.DataError, "delete imagenette2-160.tgz and fetch it again"):
            data.load("imagenette-16")
    assert not (empty / "cache").exists() or not any((empty / "cache").iterdir())


def test_an_archive_that_was_found_is_held_to_its_checksum(tiny, monkeypatch, refuses):
    source = tiny("tgz")
    right = hashlib.md5(source.read_bytes()).hexdigest()
    monkeypatch.setattr(imagenette, "ARCHIVES", (data.Source("imagenette2-160.tgz", "0" * 32),))
    with refuses(data.DataError, "its checksum is not the publisher's"):
        data.load("imagenette-16")
    monkeypatch.setattr(imagenette, "ARCHIVES", (data.Source("imagenette2-160.tgz", right),))
    assert len(data.load("imagenette-16").train[0]) == 4


@pytest.mark.parametrize("kind", ["zip", "a picture in tgz", "a header in tgz", "pixels", "many files in tgz",
                                  "attributes in tgz"])
def test_pictures_that_would_fill_the_memory_are_refused(kind, empty, refuses, monkeypatch):
    """A few kilobytes that say they unpack to gigabytes: noticed before they are, by what memory is taken."""
    monkeypatch.setattr(imagenette, "ARCHIVES", ())
    empty.mkdir(parents=True)
    zeros, path = bytes(2**25 + 1), empty / ("imagenette2-160.zip" if kind in ("zip", "pixels") else "imagenette2-160.tgz")
    if kind in ("zip", "pixels"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for split in ("train", "val"):
                archive.writestr(f"{split}/n01/a.png", zeros if kind == "zip" else png_header(60_000, 60_000))
    elif kind == "many files in tgz":
        path.write_bytes(gzip.compress(tarfile.TarInfo("x").tobuf() * 50_000, 1))
    elif kind == "attributes in tgz":
        attributes = b"".join(b"13 %07x=1\n" % number for number in range(2**18))
        header = tarfile.TarInfo("x")
        header.type, header.size = tarfile.XHDTYPE, len(attributes)
        path.write_bytes(gzip.compress(header.tobuf() + attributes, 1))
        del attributes
    else:
        with tarfile.open(path, "w:gz", compresslevel=1) as archive:
            for split in ("train", "val"):
                member = tarfile.TarInfo(f"{split}/n01/a.png")
                member.size, member.type = len(zeros), tarfile.REGTYPE if "picture" in kind else tarfile.GNUTYPE_LONGNAME
                archive.addfile(member, io.BytesIO(zeros))
    del zeros
    tracemalloc.start()
    try:
        with refuses(data.DataError, "a picture has at most|cannot be read|not a readable image"):
            data.load("imagenette-16")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def png_header(width: int, height: int) -> bytes:
    """A PNG that ends where its pixels would begin."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    chunk = struct.pack(">I", len(data)) + b"IDAT" + data + struct.pack(">I", zlib.crc32(b"IDAT" + data))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + chunk


def test_an_imagenette_with_images_missing_is_refused(tiny, refuses):
    source = tiny("folder")
    (source / "train/n01/a_2.JPEG").unlink()
    with refuses(data.DataError, "has 3 images of 3 classes in train/ where Imagenette has 4 of 3"):
        data.load("imagenette-16")
    for path in (source / "val").rglob("*.JPEG"):
        path.unlink()
    with refuses(data.DataError, "has no pictures val/"):
        data.load("imagenette-16")


def test_a_full_disk_is_seen_beforehand(tiny, monkeypatch, refuses):
    tiny("folder")
    monkeypatch.setattr(pictures.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with refuses(data.DataError, "has no room for"):
        data.load("imagenette-16")


def test_the_source_nearest_above_the_size_is_taken(tiny):
    for name in ("imagenette2", "imagenette2-320", "imagenette2-160"):
        tiny("folder", name=name)
    tiny("zip", name="imagenette2-160")
    chosen = {size: imagenette.find_imagenette(size).name for size in (64, 160, 224, 400)}  # type: ignore[union-attr]
    assert chosen == {64: "imagenette2-160", 160: "imagenette2-160", 224: "imagenette2-320", 400: "imagenette2"}


def test_imagenette_is_imagenette():
    if data.found("imagenette") is None:
        pytest.skip("Imagenette is not in the data folder; set GFT_DATA or run: gft data fetch imagenette")
    names = pictures.picture_names(imagenette.fetch_imagenette())
    assert {split: len(some) for split, some in names.items()} == imagenette.IMAGES
    labels = pictures._labels(imagenette.fetch_imagenette(), names)
    assert np.bincount(labels["train"]).tolist() == [963, 955, 993, 858, 941, 956, 961, 931, 951, 960]


