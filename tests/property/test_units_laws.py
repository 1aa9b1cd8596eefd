import contextlib

from hypothesis import given
from hypothesis import strategies as st

from freetoken import units

counts = st.integers(0, units.MAX_COUNT)


@given(counts)
def test_exactly_written_sizes_are_read_back(count):
    assert units.parse_bytes(units.format_bytes_exactly(count)) == count


@given(counts)
def test_written_token_counts_are_read_back(count):
    assert units.parse_tokens(units.format_tokens(count)) == count


@given(st.integers(1024, 2**60))
def test_a_told_size_is_within_half_a_digit_of_the_truth(count):
    told = units.parse_bytes(units.format_bytes(count).replace(",", ""))
    assert abs(told - count) <= count * 0.005 + 1


@given(st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers())))
def test_a_parser_answers_or_raises_a_value_error(value):
    for parse in (units.parse_bytes, units.parse_tokens, units.parse_seconds):
        with contextlib.suppress(ValueError):  # Anything else, a TypeError say, fails the test.
            assert parse(value) >= 0


@given(st.floats(min_value=1e-12, max_value=1e15), st.integers(1, 6))
def test_significant_figures_are_close_and_plain(value, digits):
    text = units.format_significant(value, digits)
    assert "e" not in text
    assert abs(float(text.replace(",", "")) - value) <= value * 0.5 * 10 ** (1 - digits) * 1.000001
