"""Bytes, tokens, durations and rates: parse what people write, format what people read.

Code computes in bytes, tokens and seconds; people see GiB (2^30) and GB/s (10^9). Knows no other room.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BYTE_UNITS = {
    "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB,
}  # fmt: skip
_TOKEN_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_SECOND_UNITS = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


#: Larger counts are nonsense, and neither JSON readers nor SQLite would keep them.
MAX_COUNT = 2**63 - 1


def _split(value: object, what: str, example: str) -> tuple[Decimal, str]:
    """The number and the unit (lower case) of a written value. Raises ValueError, also for what is no text."""
    text = str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""
    match = _NUMBER.fullmatch(text)
    if match is None:
        if re.fullmatch(r"\s*-\s*[0-9.].*", text):
            raise ValueError(f"`{value}` is negative, expected {what} such as `{example}`")
        raise ValueError(f"`{value}` is not {what}, expected e.g. `{example}`")
    return Decimal(match[1].replace("_", "")), match[2].lower()


def _whole(number: Decimal, value: object, what: str) -> int:
    if number > MAX_COUNT:
        raise ValueError(f"`{value}` is larger than any {what} can be")
    return int(number)


def parse_bytes(value: str | int | float) -> int:
    """Bytes of `6GiB`, `24 GB`, `512m` or a plain count; rounded down. Raises ValueError.

    `GiB` and the bare letters k, m, g, t are powers of 1024; `GB` is a power of 1000.
    """
    number, unit = _split(value, "a size", "6GiB")
    if unit == "":
        if number != number.to_integral_value():
            raise ValueError(f"`{value}` has no unit, expected e.g. `{number}GiB`")
        return _whole(number, value, "size")
    if unit not in _BYTE_UNITS:
        raise ValueError(f"`{value}` has the unknown unit `{unit}`, expected e.g. `6GiB` or `24 GB`")
    return _whole(number * _BYTE_UNITS[unit], value, "size")


def parse_tokens(value: str | int | float) -> int:
    """Tokens of `8192`, `8k` (= 8192) or `1m` (= 1048576). Raises ValueError."""
    number, unit = _split(value, "a token count", "8k")
    if unit not in _TOKEN_UNITS:
        raise ValueError(f"`{value}` has the unknown unit `{unit}`, expected e.g. `8192` or `8k`")
    tokens = number * _TOKEN_UNITS[unit]
    if tokens != tokens.to_integral_value():
        raise ValueError(f"`{value}` is not a whole number of tokens")
    return _whole(tokens, value, "token count")


def parse_seconds(value: str | int | float) -> float:
    """Seconds of `8s`, `250ms`, `45m`, `1.5h` or a plain number. Raises ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"`{value}` is not a duration, expected e.g. `45m`")
        return float(value)
    number, unit = _split(value, "a duration", "45m")
    if unit == "":
        return float(number)
    if unit not in _SECOND_UNITS:
        raise ValueError(f"`{value}` has the unknown unit `{unit}`, expected e.g. `8s`, `250ms` or `45m`")
    return float(number * _SECOND_UNITS[unit])


def format_bytes(count: int | float) -> str:
    """`2.52 GiB`, `256 MiB`, `20.0 KiB`, `17 B`: three significant digits above a KiB, sign kept."""
    sign, size = ("-" if count < 0 else ""), abs(count)
    # 1023.6 MiB would read `1,024 MiB`: what rounds up to the next unit is told in it.
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale * (1 - 1 / 2048):
            return f"{sign}{format_significant(max(size / scale, 1.0))} {unit}"
    return f"{sign}{size:.0f} B"


def format_bytes_exactly(count: int) -> str:
    """`6GiB`, `1536MiB` or `17B`: the largest unit that divides `count`, so that `parse_bytes` gives it back."""
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % scale == 0:
            return f"{count // scale}{unit}"
    return f"{count}B"


def format_significant(value: float, digits: int = 3) -> str:
    """A measured figure to `digits` significant digits, without an exponent: `0.0123`, `25.1`, `1,230`."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def format_rate(bytes_per_s: float) -> str:
    """`25.1 GB/s` (10^9): the unit in which links and memories are spoken of."""
    return f"{format_significant(bytes_per_s / 1e9)} GB/s"


def format_tokens(count: int) -> str:
    """`8k` when `count` is a whole multiple of 1024, else the plain count: `parse_tokens` gives it back."""
    if count and count % 1024**2 == 0:
        return f"{count // 1024**2}m"
    if count and count % 1024 == 0:
        return f"{count // 1024}k"
    return str(count)


def format_seconds(seconds: float) -> str:
    """`250 ms`, `8.2 s`, `3 min 05 s`, `1 h 02 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{format_significant(seconds)} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def format_count(count: int) -> str:
    """`10,240`."""
    return f"{count:,}"
