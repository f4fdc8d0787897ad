"""How native.c is built, where it is kept, and what is loaded: only what is ours alone to write."""

import os
import shutil
import stat
import subprocess
import sys
import warnings

import pytest

from gft.ops.native import build
from gft.ops.native.build import is_kept

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
pytestmark = pytest.mark.skipif(COMPILER is None or not hasattr(os, "getuid"), reason="no C compiler here")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """(cache folder, which is not there yet, folder for temporary files)"""
    # tmp_path may lie in a folder that others can write; what is above the cache folder is looked at by one test alone.
    monkeypatch.setattr(build, "is_kept", lambda path: path in tmp_path.parents or is_kept(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.delenv("GFT_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    return build._cache_folder(), tmp_path / "temporary"


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
    folder.mkdir(mode=0o700)
    names = [build.built(["cc"], folder).name, build.built(["other-cc"], folder).name]
    for copy in copies:
        copy.write_text(copy.read_text() + "/* new */")
        names.append(build.built(["cc"], folder).name)
    assert build.built(["cc"], folder).name == names[-1]
    for features in ("Features : asimd asimddp", "Features : asimd asimddp i8mm"):
        monkeypatch.setattr(build, "_processor", lambda features=features: features)
        names.append(build.built(["cc"], folder).name)
    assert len(set(names)) == len(names) == 4 + len(copies)


def cut_short(path):
    """As after a crash of the machine: the name is on the disk, the bytes are not. To load it would end the process."""
    os.truncate(path, path.stat().st_size // 2)


def for_all_to_write(path):
    path.chmod(0o766)


def of_other_bytes(path):
    path.write_bytes(path.read_bytes()[::-1])


@pytest.fixture
def quick(monkeypatch):
    """Builds and loads without a compiler: a file of known bytes, and these; returns the folders it has built in."""
    folders = []

    def write(compiler, target):
        folders.append(target.parent.parent)
        target.write_bytes(b"a library" * 100)

    monkeypatch.setattr(build, "_compile", write)
    monkeypatch.setattr(build, "_loaded", lambda path: path.read_bytes())
    return folders


@pytest.mark.parametrize("spoil", [cut_short, for_all_to_write, of_other_bytes])
def test_a_library_that_is_not_whole_or_not_ours_alone_is_built_anew(places, quick, spoil):
    whole = load()
    (path,) = places[0].iterdir()
    spoil(path)
    assert load() == whole
    assert len(quick) == 2
    (path,) = places[0].iterdir()
    assert path.read_bytes() == whole
    assert mode(path) == 0o700


@pytest.mark.parametrize("unsafe", ["cannot be made", "for all to write", "in a folder for all to write"])
def test_each_process_has_a_library_of_its_own_where_the_cache_folder_will_not_do(places, quick, unsafe):
    """In a folder whose name nobody can guess, and plant a library in, and which is gone again once it is loaded."""
    cache, temporary = places
    cache.parent.mkdir()
    if unsafe == "cannot be made":
        cache.write_text("in the way")
    elif unsafe == "for all to write":
        cache.mkdir()
        cache.chmod(0o777)
    else:
        cache.parent.chmod(0o777)
    assert load() == load()
    assert not cache.is_dir() or not list(cache.iterdir())
    assert len(set(quick)) == 2
    assert all(folder.parent == temporary for folder in quick)
    assert not list(temporary.iterdir())


def test_what_lies_in_a_folder_that_all_can_write_is_ours_only_where_that_is_sticky(tmp_path, monkeypatch):
    for mode_of_parent, kept in ((0o700, True), (0o755, True), (0o775, True), (0o777, False), (0o1777, True)):
        tmp_path.chmod(mode_of_parent)
        assert is_kept(tmp_path) == kept
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert is_kept(tmp_path) == (tmp_path.stat().st_uid == 0)


def test_what_another_user_owns_is_not_ours(tmp_path, monkeypatch):
    assert build.is_ours(tmp_path) == (mode(tmp_path) & 0o022 == 0)
    tmp_path.chmod(0o700)
    assert build.is_ours(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert not build.is_ours(tmp_path)


@pytest.mark.parametrize("command", ["env {} -O2", "'{}' -D 'A=a b'"])
def test_a_compiler_may_be_a_command_of_several_words(places, command, monkeypatch):
    """As CC="ccache gcc" and CC="gcc -O2" are."""
    monkeypatch.setenv("CC", command.format(COMPILER))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load() is not None


def test_tuning_that_the_compiler_does_not_know_is_left_out(places, monkeypatch):
    monkeypatch.setattr(build, "TUNINGS", (("-march=of-no-machine",), ()))
    assert load() is not None


@pytest.mark.parametrize(("compiler", "said"), [("/nowhere/cc", "'/nowhere/cc' does not run"),
                                                ("false", "'false' does not compile"), ("true", "'true' does not compile"),
                                                ("gcc 'a", "No closing quotation"), (" ", "neither cc nor gcc nor clang")])
def test_a_compiler_that_fails_is_reported_in_one_sentence(places, compiler, said, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    if not compiler.strip():
        monkeypatch.setenv("PATH", "/nowhere")
    with pytest.warns(UserWarning, match=said) as caught:
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


@pytest.mark.parametrize("granted", [True, False])
def test_a_processor_whose_tiles_the_system_refuses_gets_code_without_them(monkeypatch, granted):
    monkeypatch.setattr(build, "_processor", lambda: "flags : avx512_vnni amx_int8")
    monkeypatch.setattr(build, "has_tiles", lambda: granted)
    aimed = [tuning for tuning in build._tunings() if tuning]
    assert len(aimed) == len(build.TUNINGS) - 1
    assert [set(build.WITHOUT_TILES) <= set(tuning) for tuning in aimed] == [not granted] * len(aimed)
