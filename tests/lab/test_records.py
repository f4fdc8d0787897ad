"""What is kept beside numbers, and the one way tables and files are made."""

from pathlib import Path

import pytest

from gft import files
from gft.errors import UsageError
from gft.lab import markdown, provenance


def test_markdown_tables_escape_bars_and_align():
    assert markdown.table(["a", "b|c"], [["1", "x\ny"], ["|", ""]], align="r").splitlines() == [
        "| a | b\\|c |", "|---:|---|", "| 1 | x y |", "| \\| |  |"]


def test_commands_can_be_typed_again():
    asked = provenance.command_line("gft energy measure", "a", "b c", steps=None, full=True, set=["x=1", "y=a b"],
                                    out=Path("runs"))
    assert asked == "gft energy measure a 'b c' --full --set x=1 --set 'y=a b' --out runs"


def test_a_block_that_fails_leaves_the_old_file(tmp_path):
    file = files.write_text(tmp_path / "new" / "file.txt", "old")
    with pytest.raises(FileNotFoundError, match="elsewhere"), files.written_atomically(file) as unfinished:
        unfinished.write_text(Path("elsewhere").read_text())  # an error of the block's own stays what it is
    assert file.read_text() == "old"
    assert [one.name for one in file.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("reason", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_places_that_cannot_be_written_get_a_sentence(reason, tmp_path, monkeypatch, refuses):
    def refused(*_, **__):
        raise reason

    monkeypatch.setattr(Path, "touch" if isinstance(reason, PermissionError) else "write_text", refused)
    with refuses(UsageError, f"file.txt cannot be written .{reason.strerror}"):
        files.write_text(tmp_path / "file.txt", "new")
    assert not any(tmp_path.iterdir())
