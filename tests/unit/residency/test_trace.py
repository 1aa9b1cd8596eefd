from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.errors import BadFileError
from freetoken.residency import HitCounters, TraceHeader, TraceWriter, compute_hit_curve, read_trace, replay
from freetoken.residency.trace import Reset, Resize, Step


def write(path: Path) -> Path:
    with TraceWriter(path, TraceHeader(2, 8, 2, 3, "tiny")) as writer:
        writer.step(0, (1, 2))
        writer.resize(70_000)
        writer.reset()
        writer.step(1, (7,))
    return path


def test_replay_at_the_recorded_slots_follows_resizes_and_resets(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.trace"))
    assert trace.events == (Step(0, (1, 2)), Resize(70_000), Reset(), Step(1, (7,)))
    assert trace.largest_step == 2
    assert replay(trace) == HitCounters(3, 0, 3)


def test_a_killed_engine_leaves_a_trace_that_lacks_its_last_record_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.trace")
    path.write_bytes(path.read_bytes()[:-1])
    assert read_trace(path).events == (Step(0, (1, 2)), Resize(70_000), Reset())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a routing trace"),
        (b"FTTRACE1\xff\xff\xff\x7f{}", "the header claims 2147483647 bytes"),
        (b"FTTRACE1\x02\x00\x00\x00{}", "the trace header cannot be read"),
        (b"FTTRACE1\x02\x00\x00\x00xx", "the trace header cannot be read"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(BadFileError, match=words):
        read_trace(tmp_path / "bad")


def test_a_record_beyond_the_header_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a", TraceHeader(2, 8, 2, 3)) as writer:
        writer.step(2, (1,))
    with pytest.raises(BadFileError, match="record 0 names layer 2, expert 1; the header has 2 layers of 8 experts"):
        read_trace(tmp_path / "a")


def test_an_empty_trace_has_a_flat_curve(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a", TraceHeader(2, 8, 2, 3)):
        pass
    curve = compute_hit_curve(read_trace(tmp_path / "a"))
    assert (curve.hit_ratio(5), curve.exact_from, curve.counters(99)) == (0.0, 0, HitCounters())
