"""The known word that a misspelt one is most like."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, letter case aside; "" where none is (`difflib`, ratio 0.6)."""
    lower = {option.lower(): option for option in known}
    close = difflib.get_close_matches(word.lower(), list(lower), 1, 0.6)
    return lower[close[0]] if close else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: "; did you mean 'x'?", or ""."""
    close = closest(word, known)
    return f"; did you mean {close!r}?" if close else ""
