"""Rotation under an open descriptor, tails, and lines without colours."""

import os
from pathlib import Path

import pytest

from freetoken.supervisor import logs


def test_rotation_keeps_an_open_descriptor_writing_at_the_new_end(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    fd = logs.open_log(log)
    os.write(fd, b"a" * 200)
    assert logs.rotate(log, 100, 2) is True
    os.write(fd, b"after\n")
    os.close(fd)
    assert log.read_bytes() == b"after\n"
    assert (tmp_path / "engine.log.1").read_bytes() == b"a" * 100


def test_rotation_moves_older_parts_up_and_keeps_the_number(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    for text in ("one", "two", "three"):
        log.write_text(text * 10)
        assert logs.rotate(log, 5, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.log", "engine.log.1", "engine.log.2"]
    assert (tmp_path / "engine.log.1").read_text() == "three"
    assert (tmp_path / "engine.log.2").read_text() == "wotwo"


def test_a_log_below_the_cap_and_a_device_are_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("short")
    assert logs.rotate(log, 100, 2) is False
    assert logs.rotate(Path("/dev/full"), 0, 2) is False
    assert logs.free_bytes(Path("/dev/full")) is None


def test_a_rotation_without_space_for_the_copy_empties_the_log_and_says_so(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("x" * 100)
    (tmp_path / "engine.log.1").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        logs.rotate(log, 10, 1)
    assert log.read_text() == ""


def test_no_space_for_a_line_of_the_keeper_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        logs.append_line(Path("/dev/full"), "hello")


def test_a_tail_goes_on_in_the_rotated_part(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    (tmp_path / "engine.log.1").write_text("one\ntwo\n")
    log.write_text("three\n")
    assert logs.read_tail(log, 2) == ["two", "three"]
    assert logs.read_tail(log, 9) == ["one", "two", "three"]
    assert logs.read_tail(log, 0) == []
    assert logs.read_tail(tmp_path / "none", 5) == []


def test_lines_lose_colours_and_overwritten_progress() -> None:
    text = "\x1b[1m[core]\x1b[0m \x1b[32mINFO\x1b[0m ready\nLoading: 0%\rLoading: 50%\rLoading: 100%\r\nlast"
    assert logs.split_lines(text) == ["[core] INFO ready", "Loading: 100%", "last"]


def test_a_follower_reads_whole_lines_across_a_rotation(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("old\n")
    follower = logs.Follower(log)
    with open(log, "a") as file:
        file.write("one\ntw")
    assert follower.read_new() == ["one"]
    with open(log, "a") as file:
        file.write("o\n")
    assert follower.read_new() == ["two"]
    log.write_text("x\n")
    assert follower.read_new() == ["x"]
    assert follower.read_new() == []
