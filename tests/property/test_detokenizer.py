"""Streamed text is the text: for any ids, in any grouping, the pieces add up to decoding all at once."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.server.text import Detokenizer, StopScanner, TextCodec
from tests.fakes.stock_text import make_codec


@cache
def codec() -> TextCodec:
    return make_codec()


@given(st.lists(st.integers(0, 262), max_size=40), st.integers(1, 7))
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_ids_add_up_to_the_whole_text(ids: list[int], size: int) -> None:
    detokenizer = Detokenizer(codec())
    pieces = [detokenizer.add(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(pieces) + detokenizer.flush() == codec().decode(ids)


@given(st.text(max_size=60), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_pieces_of_real_text_hold_whole_characters_alone(text: str, size: int) -> None:
    text = text.replace("\ufffd", "")
    ids = codec().encode_rendered(text) if text else []
    detokenizer = Detokenizer(codec())
    pieces = [detokenizer.add(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_a_stop_string_cuts_at_its_first_place_whatever_the_pieces(text: str, stops: list[str], size: int) -> None:
    scanner = StopScanner(stops)
    shown = "".join(scanner.add(text[start : start + size]) for start in range(0, len(text), size)) + scanner.flush()
    # A later piece may complete a longer stop string that begins earlier; what counts is which ends first.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert (text.startswith(shown), scanner.is_stopped) == (True, bool(ends))
    if not ends:
        assert shown == text
    else:
        assert not any(stop in shown for stop in stops)
