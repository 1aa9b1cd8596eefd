"""Where a file that a user named ends up: beside what is there, through a symlink, or into a pipe."""

import os
import threading
from pathlib import Path

import pytest

from freetoken.errors import FtError, UsageError
from freetoken.outfile import check_output, is_file_there, write_output


def read_fifo(path):
    """A thread that reads `path` to its end, and the list that what it read comes in."""
    found = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    reader.start()
    return reader, found


def test_a_file_is_written_whole_and_keeps_its_rights(tmp_path):
    path = tmp_path / "a.txt"
    assert write_output(path, "é") == 2
    path.chmod(0o640)
    assert write_output(path, b"new") == 3
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


def test_a_fifo_is_written_into_and_stays_one(tmp_path):
    path, data = tmp_path / "pipe", b"x" * 300_000
    os.mkfifo(path)
    reader, found = read_fifo(path)
    assert write_output(path, data) == len(data)
    reader.join(30)
    assert found == [data]
    assert path.is_fifo()
    assert not is_file_there(path)


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_symlink_is_written_through_and_stays_one(tmp_path, is_dangling):
    (tmp_path / "deep").mkdir()
    real, link = tmp_path / "deep" / "real", tmp_path / "link"
    if not is_dangling:
        real.write_text("old")
    link.symlink_to(real)
    assert is_file_there(link) is not is_dangling
    write_output(link, "new")
    assert (link.is_symlink(), real.read_text()) == (True, "new")
    assert [one.name for one in (tmp_path / "deep").iterdir()] == ["real"]


def test_an_open_stream_is_added_to(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        file.write(b"before ")
        file.flush()
        name = f"/dev/fd/{file.fileno()}"
        write_output(Path(name), "after")
    assert (tmp_path / "log").read_text() == "before after"


def test_a_missing_folder_a_folder_and_a_file_for_a_folder_are_wrong_usage(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "none" / "x")
    cases = {"none/x": "there is no folder", "link": "there is no folder", "": "is a folder", "file/x": "is no folder"}
    for name, words in cases.items():
        with pytest.raises(UsageError, match=words):
            write_output(tmp_path / name, "x")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "link"]


def test_a_loop_and_a_refused_write_are_failures_that_leave_nothing(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FtError, match="cannot write "):
        check_output(tmp_path / "loop")

    def refuse(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(FtError, match="No space left on device"):
        write_output(tmp_path / "new", "x")
    assert [one.name for one in tmp_path.iterdir()] == ["loop"]
