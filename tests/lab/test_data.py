"""The data room: what is found, fetched, decoded and kept, and the batches made of it."""

import contextlib
import dataclasses
import gzip
import hashlib
import http.server
import itertools
import math
import os
import signal
import stat
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from gft.lab import data, train
from gft.lab.data import folder, imagenette, mnist, text
from gft.lab.data.folder import retrieve

NOWHERE = ("http://127.0.0.1:9/",)  # nothing listens there


def take(batches, n):
    return list(itertools.islice(batches, n))


def same(a, b):
    return len(a) == len(b) and all(torch.equal(p, q) for one, other in zip(a, b, strict=True)
                                    for p, q in zip(one, other, strict=True))


# ---------------------------------------------------------------------------------------------------- MNIST


def idx(values: torch.Tensor) -> bytes:
    header = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}i", *values.shape)
    return header + bytes(values.flatten().byte().tolist())


@pytest.fixture
def mnist_like(tmp_path, monkeypatch):
    """Seven images in torchvision's layout, unpacked; four are to train on."""
    monkeypatch.setenv("GFT_DATA", str(tmp_path))
    monkeypatch.setattr(mnist, "MNIST_TRAIN", 4)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for source in data.MNIST_FILES:
        shape = (7, 28, 28) if "images" in source.name else (7,)
        (raw / source.name.removesuffix(".gz")).write_bytes(idx(torch.arange(torch.Size(shape).numel()).view(shape) % 10))
    return raw


def test_mnist_is_read_from_torchvisions_folder(mnist_like):
    read = data._read_idx(mnist_like / "train-labels-idx1-ubyte", "")
    assert read.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert data.find_mnist() is not None
    assert data.found("mnist-images") == str(mnist_like)
    assert data.load_mnist().train[0].shape == (4, 784)


def test_mnist_with_a_wrong_checksum_is_refused(mnist_like):
    plain = mnist_like / "t10k-labels-idx1-ubyte"
    (mnist_like / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(data.DataError, match="its checksum is not MNIST's"):
        data.load_mnist()


def test_mnist_cut_short_is_refused(mnist_like):
    file = mnist_like / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(data.DataError, match="cut short"):
        data.load_mnist()


@pytest.mark.parametrize(("file", "values", "says"), [
    ("train-images-idx3-ubyte", torch.zeros(4, 28, 28), r"images of \(4, 28, 28\) and labels of \(7,\)"),
    ("train-labels-idx1-ubyte", torch.full((7,), 98), "an image labelled 98, and digits end at 9"),
    ("t10k-images-idx3-ubyte", torch.zeros(7, 5, 28), r"images of \(7, 5, 28\)"),
    ("t10k-images-idx3-ubyte", torch.zeros(7, 784), r"images of \(7, 784\)"),
], ids=["fewer images than labels", "a label beyond 9", "another size", "flat"])
def test_mnist_that_does_not_fit_together_is_refused(file, values, says, mnist_like, refuses):
    (mnist_like / file).write_bytes(idx(values))
    with refuses(data.DataError, says):
        data.load_mnist()


def test_mnist_without_images_to_validate_is_refused(mnist_like, monkeypatch, refuses):
    monkeypatch.setattr(mnist, "MNIST_TRAIN", 7)
    with refuses(data.DataError, "has 7 images and at least 8 are needed"):
        data.load_mnist()


def test_missing_mnist_is_downloaded_and_a_bad_mirror_passed_over(tmp_path, monkeypatch):
    folders = {name: tmp_path / "web" / name for name in ("bad", "good")}
    sources = []
    for source in data.MNIST_FILES:
        content = gzip.compress(idx(torch.zeros((3, 2, 2) if "images" in source.name else (3,))))
        for name, place in folders.items():
            place.mkdir(parents=True, exist_ok=True)
            (place / source.name).write_bytes(content if name == "good" else content + b"x")
        sources.append(data.Source(source.name, hashlib.md5(content).hexdigest()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(SilentHandler, directory=tmp_path / "web"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GFT_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(mnist, "MNIST_FILES", tuple(sources))
    monkeypatch.setattr(mnist, "MNIST_TRAIN", 2)
    mirrors = tuple(f"http://127.0.0.1:{server.server_port}/{name}/" for name in folders)
    monkeypatch.setattr(mnist, "MNIST_MIRRORS", mirrors[:1])
    with pytest.raises(data.DataError, match="hash"):
        data.fetch_mnist()
    monkeypatch.setattr(mnist, "MNIST_MIRRORS", mirrors)
    assert all(path.parent == tmp_path / "cache" / "mnist" for path in data.fetch_mnist().values())
    server.shutdown()
    assert data.load_mnist().test[0].shape == (3, 4)  # and now it is found without a network


def test_downloads_at_once_are_both_fine_and_a_killed_one_leaves_no_file(empty, monkeypatch):
    content = bytes(range(256)) * 4000
    source = data.Source("input.txt", hashlib.md5(content).hexdigest())
    half_sent, go_on = threading.Semaphore(0), threading.Event()

    class Slow(SilentHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            half_sent.release()
            go_on.wait(30)
            with contextlib.suppress(OSError):  # of the one that was killed
                self.wfile.write(content[len(content) // 2 :])

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place, mirrors = empty / "shakespeare", (f"http://127.0.0.1:{server.server_port}/",)

    def fetch():
        return retrieve("it", source, mirrors, place, False, "mend")

    if not (killed := os.fork()):
        fetch()
        os._exit(0)
    half_sent.acquire(timeout=30)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert [path.name.endswith(".unfinished") for path in place.iterdir()] == [True]
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(fetch) for _ in range(2)]
        for _ in both:
            half_sent.acquire(timeout=30)
        assert not (place / "input.txt").exists()
        go_on.set()
        assert {done.result() for done in both} == {place / "input.txt"}
    server.shutdown()
    assert (place / "input.txt").read_bytes() == content
    assert [path.name for path in place.iterdir()] == ["input.txt"]  # what the killed one left is gone


def test_a_cache_among_temporary_files_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(folder.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(folder, "_may_write", lambda place: place.parent == tmp_path)
    ours = folder.writable_cache()
    assert ours.parent == tmp_path
    assert ours == folder.cache_folders()[-1]
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700
    ours.chmod(0o777)
    assert ours not in folder.cache_folders()
    ours.rmdir()
    ours.symlink_to(tmp_path)
    assert ours not in folder.cache_folders()


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_mnist_images_are_the_flat_ones(mnist_like):
    flat, images = data.load("mnist"), data.load("mnist-images")
    assert isinstance(images, data.Dataset)
    assert images.shape == (1, 28, 28)
    assert images.inputs == flat.inputs == 784
    assert images.train[0].dtype == torch.uint8
    for split in data.SPLITS:
        flattened = [(x.flatten(1), y) for x, y in images.evaluation_batches(split, 3)]
        assert same(flattened, list(flat.evaluation_batches(split, 3)))
    (x, _), (flat_x, _) = (next(some.batches(3, seed=2)) for some in (images, flat))
    assert torch.equal(x.flatten(1), flat_x)


def test_mnist_has_the_papers_split():
    if data.find_mnist() is None:
        pytest.skip("MNIST is not in the data folder; set GFT_DATA or run: gft data fetch mnist")
    found = data.load("mnist")
    assert [len(split[0]) for split in (found.train, found.val, found.test)] == [50_000, 10_000, 10_000]
    assert found.train[0].mean().abs() < 0.01


def test_digits_images_are_the_flat_ones_in_256_steps():
    flat, images = data.load("digits"), data.load("digits-images")
    x, y = next(images.evaluation_batches("train", 1200))
    assert x.shape == (1200, 1, 8, 8)
    assert (x.flatten(1) - flat.train[0]).abs().max() <= 16 / 255 / 2 / 6 + 1e-5  # half a step, normalised
    assert torch.equal(y, flat.train[1])


# ---------------------------------------------------------------------------------------------------- batches


def test_batches_resume_where_they_were():
    digits = data.load("digits")
    every = take(digits.batches(500, seed=3), 7)
    assert same(every[4:], take(digits.batches(500, seed=3, first_step=4), 3))
    assert sorted(len(x) for x, _ in every[:3]) == [200, 500, 500]
    assert digits.per_epoch(500) == 3
    assert not torch.equal(every[0][0], every[3][0])


@pytest.mark.parametrize(("flips", "augment"), [(False, "light"), (True, "light"), (False, "jitter")])
def test_augmented_batches_depend_on_seed_and_step_alone(flips, augment, rng_untouched):
    images = dataclasses.replace(data.load("digits-images"), flips=flips)
    with rng_untouched():
        every = take(images.batches(500, seed=3, augment=augment), 5)
    assert same(every, take(images.batches(500, seed=3, augment=augment), 5))
    assert same(every[4:], take(images.batches(500, seed=3, first_step=4, augment=augment), 1))
    assert not torch.equal(every[0][0], next(images.batches(500, seed=4, augment=augment))[0])
    for (x, y), (plain, plain_y) in zip(every, images.batches(500, seed=3), strict=False):
        assert torch.equal(y, plain_y)
        assert x.shape == plain.shape
        assert not torch.equal(x, plain)
        assert plain.min() - 1e-5 <= x.min() < x.max() <= plain.max() + 1e-5  # between pixels, never beyond them


def test_the_same_image_is_cropped_differently_at_each_step():
    one = data.Dataset(*[(torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8), torch.zeros(1, dtype=torch.long))] * 3,
                       mean=(0.5,), std=(0.25,))
    seen = torch.stack([x for x, _ in take(one.batches(1, seed=0, augment="light"), 20)])
    assert len(seen.unique(dim=0)) == 20


def test_strong_batches_are_mixed_as_their_labels_say(rng_untouched):
    digits = data.load("digits-images")
    with rng_untouched():
        every = take(digits.batches(200, seed=3, augment="strong"), 3)
    assert same(every[2:], take(digits.batches(200, seed=3, first_step=2, augment="strong"), 1))
    for (x, shares), (_, labels) in zip(every, digits.batches(200, seed=3), strict=False):
        assert x.shape == (200, 1, 8, 8)
        assert shares.shape == (200, 10)
        torch.testing.assert_close(shares.sum(1), torch.ones(200))
        own = shares.gather(1, labels[:, None])[:, 0]
        others = shares.gather(1, labels.roll(1)[:, None])[:, 0]
        assert (torch.where(labels == labels.roll(1), own, own + others) - 1).abs().max() < 1e-6
        assert 0.3 < (own == 1).float().mean() < 0.7
    loss = train.cross_entropy(torch.zeros(200, 10), shares, 0.1)
    assert float(loss) == pytest.approx(math.log(10))


def test_blended_batches_are_strong_ones_with_others_shining_through():
    digits = data.load("digits-images")
    every = zip(digits.batches(200, seed=3, augment="strong"), digits.batches(200, seed=3, augment="blended"), strict=True)
    for (strong, shares), (x, blended) in itertools.islice(every, 3):
        same_ones = (x == strong).flatten(1).all(1)
        assert 0.3 < same_ones.float().mean() < 0.7
        assert torch.equal(blended[same_ones], shares[same_ones])
        torch.testing.assert_close(blended.sum(1), torch.ones(200))
        others = torch.stack([shares, shares.roll(2, 0)]).sum(0) > 0
        assert (blended[~others] == 0).all()


@pytest.mark.parametrize("augment", data.AUGMENT)
def test_compiled_batches_are_the_same(augment, monkeypatch):
    traced = []
    backend = lambda graph, inputs: traced.append(graph) or graph.forward  # noqa: E731
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    digits = data.load("digits-images")
    compiled, plain = (take(digits.batches(500, seed=3, augment=augment, compiled=one), 4) for one in (True, False))
    torch.testing.assert_close(compiled, plain)
    assert len(traced) == 1  # the third batch, of 200, is not compiled


@pytest.mark.parametrize(("name", "augment", "says"), [
    ("digits", "light", "needs images and these are flat"), ("verses", "light", "needs images and this is text"),
    ("digits-images", "heavy", "augment='heavy': choose one of none, light, strong, blended, jitter")])
def test_augmentation_that_makes_no_sense_is_refused_at_once(name, augment, says, refuses):
    with refuses(data.DataError, says):
        data.load(name).batches(4, seed=0, augment=augment)


def test_unknown_names_are_refused(refuses, empty):
    for name in ("cifar", "imagenette-", "imagenette-big", "text:"):
        with refuses(data.DataError, f"no data set '{name}'; choose one of mnist, "):
            data.check(name)
    for name in (*data.names, "imagenette-64", "text:there.txt"):
        data.check(name)
    with refuses(data.DataError, "split='valid': choose one of train, val, test"):
        next(data.load("digits").evaluation_batches("valid", 4))
    with refuses(data.DataError, "context=9 is for text and digits is none"):
        data.load("digits", context=9)
    with refuses(data.DataError, "a size from 8 to 1024"):
        data.load("imagenette-4000")
    with refuses(data.DataError, "need a mean and a std"):
        data.Dataset(*[(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.zeros(1))] * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["digits-images", "verses"])
@pytest.mark.parametrize("compiled", [False, True])
def test_batches_are_made_where_the_data_is(name, compiled):
    there, here = data.load(name).to("cuda"), data.load(name)
    augment = "strong" if name == "digits-images" else "none"
    for (x, y), (x_here, y_here) in zip(take(there.batches(32, 5, augment=augment, compiled=compiled), 3),
                                        take(here.batches(32, 5, augment=augment), 3), strict=True):
        assert x.is_cuda
        assert y.is_cuda
        torch.testing.assert_close(x.cpu(), x_here, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(y.cpu(), y_here)


# ---------------------------------------------------------------------------------------------------- what is missing


@pytest.mark.parametrize(("name", "says"), [
    ("mnist", r"put the four .* into .* or set GFT_DATA"), ("mnist-images", "MNIST is not in"),
    ("imagenette", r"put fastai's imagenette2-160.tgz into .* or set GFT_DATA"),
    ("shakespeare", r"put its input.txt into .* or set GFT_DATA")])
def test_missing_data_offline_says_what_to_do(name, says, empty, monkeypatch):
    for module, mirrors in ((mnist, "MNIST_MIRRORS"), (imagenette, "IMAGENETTE_MIRRORS"), (text, "SHAKESPEARE_MIRRORS")):
        monkeypatch.setattr(module, mirrors, NOWHERE)
    assert data.found(name) is None
    with pytest.raises(data.DataError, match=says) as caught:
        data.fetch(name, progress=False)
    assert r"is there a network?" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_downloaded_into_a_folder_marked_read_only(empty, monkeypatch):
    monkeypatch.setattr(text, "SHAKESPEARE_MIRRORS", NOWHERE)
    empty.mkdir()
    empty.chmod(0o555)
    with pytest.raises(data.DataError, match="nothing may be written there; set GFT_DATA to a folder of yours"):
        data.fetch("shakespeare")
    empty.chmod(0o755)


def test_what_needs_no_download_is_always_found(empty):
    for name in ("digits", "digits-images", "verses"):
        assert data.found(name) == data.fetch(name)
    assert set(data.LOADERS) == set(data.names)
