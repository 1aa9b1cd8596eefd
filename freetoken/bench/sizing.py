"""Texts of a wanted number of tokens, by the served model's own count; no tokenizer is loaded here.

The first request tells how many tokens a known text has. Between such readings tokens are estimated by pieces of
text (words cut at five letters, digits in pairs, signs), which holds to about 12 % over 3,000 characters where bytes
hold to 20 %. Where the engine counts on request, `count` makes the cut exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_PIECE = re.compile(r"[ \t]*\n[ \t]*|[A-Za-z]{1,5}|[0-9]{1,2}|[^\w\s]|_|\s+|\w")
#: Tokens per piece before anything was measured.
FIRST_GUESS = 0.75
#: English has about 4.5, code about 3.4.
MOST_CHARACTERS_PER_TOKEN = 7
_ROUNDS = 6


class Sizer:
    """Estimates tokens, learns from every count it is told, and cuts texts to size."""

    def __init__(self, count: Callable[[str], int | None] | None = None) -> None:
        self._count = count
        self._tokens, self._pieces = 0, 0

    def use_count(self, count: Callable[[str], int | None]) -> None:
        """From now on the engine counts."""
        self._count = count

    @property
    def tokens_per_piece(self) -> float:
        """Measured over all that was noted; a guess before."""
        return self._tokens / self._pieces if self._pieces else FIRST_GUESS

    @property
    def can_count(self) -> bool:
        """Whether cuts are exact."""
        return self._count is not None

    def note(self, text: str, tokens: int) -> None:
        """Learns that `text` has `tokens`."""
        if tokens > 0:
            self._tokens += tokens
            self._pieces += len(_PIECE.findall(text))

    def estimate(self, text: str) -> int:
        """Tokens of `text`, about."""
        return round(len(_PIECE.findall(text)) * self.tokens_per_piece)

    def characters_for(self, tokens: int) -> int:
        """Characters that surely hold `tokens`: what is too much is cut off again.

        No measured ratio goes in: how much is taken decides what comes next, and that is the seed's alone.
        """
        return tokens * MOST_CHARACTERS_PER_TOKEN + 200

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of `text` that has `tokens` at most: exactly where the engine counts, else by estimate."""
        ends = [0, *(match.end() for match in _PIECE.finditer(text))]
        pieces = min(len(ends) - 1, int(tokens / self.tokens_per_piece))
        if self._count is not None:
            pieces = self._refine(text, ends, pieces, tokens, self._count)
        return text[: ends[pieces]]

    def trim(self, text: str, tokens: int) -> str:
        """The beginning of `text` that has about `tokens`, by estimate: the engine is asked nothing."""
        ends = [0, *(match.end() for match in _PIECE.finditer(text))]
        return text[: ends[min(len(ends) - 1, int(tokens / self.tokens_per_piece))]]

    def _refine(
        self, text: str, ends: list[int], pieces: int, tokens: int, count: Callable[[str], int | None]
    ) -> int:  # fmt: skip
        """Pieces whose text the engine counts as `tokens`, or a few less; interpolates between what it counted."""
        low, high = (0, 0), None
        for _ in range(_ROUNDS):
            found = count(text[: ends[pieces]]) if pieces else 0
            if found is None:
                return low[0] or pieces
            self.note(text[: ends[pieces]], found)
            if found <= tokens:
                low = (pieces, found)
            else:
                high = (pieces, found)
            if tokens - low[1] <= tokens // 500 or low[0] == len(ends) - 1:
                break
            per_piece = (high[1] - low[1]) / (high[0] - low[0]) if high else max(0.05, found / max(1, pieces))
            # A little under the aim: a text that is too long is of no use.
            wanted = low[0] + int((tokens - low[1]) / max(0.01, per_piece) * 0.998)
            pieces = max(low[0] + 1, min(wanted, (high[0] if high else len(ends)) - 1))
            if high and pieces >= high[0]:
                break
        return low[0]
