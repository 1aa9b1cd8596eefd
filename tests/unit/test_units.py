import pytest

from freetoken import units


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("6GiB", 6 << 30), ("24 GB", 24_000_000_000), ("512m", 512 << 20), ("1.5 k", 1536), (17, 17), ("17", 17),
        ("17B", 17), (6.0, 6), ("010", 10), ("1_000", 1000), (".5 GiB", 1 << 29), (" 5.5GiB ", 5_905_580_032),
    ],
)  # fmt: skip
def test_sizes_are_read_with_their_units(text, count):
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("6 GX", "`6 GX` has the unknown unit `gx`, expected e.g. `6GiB` or `24 GB`"),
        (5.5, "`5.5` has no unit, expected e.g. `5.5GiB`"),
        ("-5", "`-5` is negative, expected a size such as `6GiB`"),
        (-5, "`-5` is negative, expected a size such as `6GiB`"),
        (True, "`True` is not a size, expected e.g. `6GiB`"),
        ("lots", "`lots` is not a size, expected e.g. `6GiB`"),
        (float("nan"), "`nan` is not a size, expected e.g. `6GiB`"),
        ([6], "`[6]` is not a size, expected e.g. `6GiB`"),
        ("9" * 30, f"`{'9' * 30}` is larger than any size can be"),
    ],
)
def test_what_is_no_size_is_refused_with_a_sentence(value, sentence):
    with pytest.raises(ValueError) as caught:
        units.parse_bytes(value)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("text", "count"), [("8k", 8192), (8192, 8192), ("1m", 1048576), ("0.5k", 512), (1e3, 1000)])
def test_token_counts_are_powers_of_1024(text, count):
    assert units.parse_tokens(text) == count


@pytest.mark.parametrize("value", ["8.3", "8GiB", "-1", None, True, float("inf"), "0.0001k"])
def test_what_is_no_token_count_is_refused(value):
    with pytest.raises(ValueError):
        units.parse_tokens(value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8s", 8), ("250ms", 0.25), ("45m", 2700), ("1.5h", 5400), (3, 3), ("2 min", 120), ("1d", 86400)],
)
def test_durations_are_read_as_seconds(text, seconds):
    assert units.parse_seconds(text) == seconds


@pytest.mark.parametrize("value", ["8q", -1, float("nan"), float("inf"), True, "soon", None])
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(ValueError):
        units.parse_seconds(value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2_705_000_000, "2.52 GiB"), (256 << 20, "256 MiB"),
        (1048575, "1.00 MiB"), (104_815_656, "100 MiB"), (-(3 << 30), "-3.00 GiB"), (20480, "20.0 KiB"),
        (2**40 * 12, "12.0 TiB"),
    ],
)  # fmt: skip
def test_sizes_are_told_with_three_significant_digits(count, text):
    assert units.format_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.0123"),
        (25.14, "25.1"),
        (1234, "1,230"),
        (99.96, "100"),
        (0.9999, "1.00"),
        (0, "0"),
        (-2.5, "-2.50"),
    ],
)
def test_measured_figures_have_three_digits_and_no_exponent(value, text):
    assert units.format_significant(value) == text


def test_rates_durations_and_counts_are_told_in_people_s_units():
    told = [units.format_rate(25_140_000_000), units.format_rate(1.8e12), units.format_seconds(0.25),
            units.format_seconds(8.2), units.format_seconds(185), units.format_seconds(3720),
            units.format_tokens(8192), units.format_tokens(8193), units.format_count(10240)]  # fmt: skip
    assert told == ["25.1 GB/s", "1,800 GB/s", "250 ms", "8.20 s", "3 min 05 s", "1 h 02 min", "8k", "8193", "10,240"]
