"""How native.c is built, where it is kept, and what is loaded: only what is ours alone to write."""

import os
import stat
import subprocess
import sys
import warnings

import pytest

from gft.ops.native import build

pytestmark = pytest.mark.skipif(not build._compiler() or not hasattr(os, "getuid"), reason="no C compiler here")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """(cache folder, fallback folder), neither of which is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.delenv("GFT_NATIVE", raising=False)
    return build._cache_folder(), build._fallback_folder()


def load():
    """As if for the first time in this process."""
    return build._library.__wrapped__()


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_library_is_built_once_for_us_alone(places, monkeypatch):
    old = os.umask(0o002)  # as many systems have it: files that the group may write
    try:
        assert load() is not None
    finally:
        os.umask(old)
    (path,) = places[0].iterdir()
    assert mode(places[0]) == 0o700
    assert mode(path) == 0o700
    built = path.stat().st_mtime_ns
    monkeypatch.setattr(build, "_compile", None)  # must not be needed
    assert load() is not None
    assert path.stat().st_mtime_ns == built


def test_another_source_compiler_or_processor_has_a_library_of_its_own(tmp_path, monkeypatch):
    """A cache folder may be shared by unlike machines, and outlives an update of gft."""
    sources = [build.SOURCE, *map(build.SOURCE.with_name, build.PARTS)]
    assert set(sources) == set(build.SOURCE.parent.glob("*.[ch]"))
    copies = [tmp_path / path.name for path in sources]
    for path, copy in zip(sources, copies, strict=True):
        copy.write_text(path.read_text())
    monkeypatch.setattr(build, "SOURCE", copies[0])
    monkeypatch.setattr(build, "_compile", lambda compiler, target: target.touch())
    folder = tmp_path / "built"
    names = [build.built(["cc"], folder).name, build.built(["other-cc"], folder).name]
    for copy in copies:
        copy.write_text(copy.read_text() + "/* new */")
        names.append(build.built(["cc"], folder).name)
    assert build.built(["cc"], folder).name == names[-1]
    for features in ("Features : asimd asimddp", "Features : asimd asimddp i8mm"):
        monkeypatch.setattr(build, "_processor", lambda features=features: features)
        names.append(build.built(["cc"], folder).name)
    assert len(set(names)) == len(names) == 4 + len(copies)


def test_a_library_that_others_can_write_is_built_anew(tmp_path):
    tmp_path.chmod(0o700)
    path = build.built(build._compiler(), tmp_path)
    path.write_bytes(b"not ours")
    path.chmod(0o766)
    assert build.built(build._compiler(), tmp_path) == path
    assert path.stat().st_size > 1000
    assert mode(path) == 0o700


@pytest.mark.parametrize("unsafe", ["for all to write", "a link"])
def test_nothing_is_loaded_from_a_folder_that_others_can_write(places, tmp_path, unsafe):
    """The fallback's name can be guessed, and anyone can make it first."""
    cache, fallback = places
    cache.parent.mkdir()
    cache.write_text("in the way")  # so the cache folder cannot be used
    if unsafe == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        fallback.symlink_to(tmp_path / "elsewhere")
    else:
        fallback.mkdir()
        fallback.chmod(0o777)
    assert load() is not None
    assert not list(fallback.iterdir())
    assert list(fallback.parent.iterdir()) == [fallback]  # the folder of this process is gone again


def test_the_fallback_is_used_where_it_is_ours(places):
    cache, fallback = places
    cache.parent.mkdir()
    cache.write_text("in the way")
    assert load() is not None
    assert len(list(fallback.iterdir())) == 1
    assert mode(fallback) == 0o700


def test_what_another_user_owns_is_not_ours(tmp_path, monkeypatch):
    assert build.is_ours(tmp_path) == (mode(tmp_path) & 0o022 == 0)
    tmp_path.chmod(0o700)
    assert build.is_ours(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert not build.is_ours(tmp_path)


def test_a_compiler_may_be_a_command_of_several_words(places, monkeypatch):
    """As CC="ccache gcc" is."""
    monkeypatch.setenv("CC", f"env {build._compiler()[0]}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load() is not None


def test_tuning_that_the_compiler_does_not_know_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "TUNINGS", (("-march=of-no-machine",), ()))
    tmp_path.chmod(0o700)
    assert build.built(build._compiler(), tmp_path).stat().st_size > 0


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false", "true"])
def test_a_compiler_that_fails_is_reported_in_one_sentence(places, compiler, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    with pytest.warns(UserWarning, match=compiler) as caught:
        assert load() is None
    (one,) = caught
    message = str(one.message)
    assert "slower torch code is used; set CC to a C compiler that works, or GFT_NATIVE=0" in message
    assert "\n" not in message
    assert ". " not in message


PROGRAM = """
import torch
from gft import ops
from gft.philox import NoiseKey
from gft.storage import Storage
storage, key = Storage(3), NoiseKey(1, 2, 3)
stored, votes = torch.zeros(9, 20, dtype=torch.int8), torch.arange(180, dtype=torch.int32).view(9, 20) - 90
job = ops.RoundingJob(stored, votes, storage, key, 65536.0 * 16, 90)
for _ in range(2):
    ops.round_many([job], 0.5)
print(len(ops.twins("cpu")), bool(stored.any()))
"""


@pytest.mark.parametrize(("settings", "warnings_expected"), [({"CC": "/nowhere/cc"}, 1),
                                                             ({"CC": "/nowhere/cc", "GFT_NATIVE": "0"}, 0)], ids=str)
def test_weights_move_without_a_compiler(settings, warnings_expected, tmp_path):
    outside = {name: value for name, value in os.environ.items() if name != "GFT_NATIVE"}
    environment = {**outside, **settings, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True"]
    assert done.stderr.count("UserWarning") == warnings_expected
    assert bool(done.stderr) == bool(warnings_expected)
