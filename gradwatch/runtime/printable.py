"""Text from strangers, made safe to show: parameter names may hold anything a Python string can."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

LONGEST_LABEL = 300
"""Characters a label value keeps; the longest FQNs of real models have about 150."""
MOST_NAMED = 5
"""Names in a sentence; those beyond are counted."""


def printable(text: str, limit: int = LONGEST_LABEL) -> str:
    """`text` if it is short and printable, else something that is, and that still differs where two texts do.

    Control characters, escape sequences, bidirectional marks, unusual spaces and lone surrogates
    (everything `str.isprintable` refuses) become `\\x1b`, `\\u202e` or `\\U000e0001` in plain letters. Text
    changed in this way, or cut to `limit` characters, ends in `~` and 8 hexadecimal digits of its SHA-256.
    """
    if len(text) <= limit and text.isprintable():
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{_spelled_out(text[:limit])[: limit - 9]}~{digest}"


def one_line(text: str, limit: int) -> str:
    """Prose as one printable line, cut to `limit` characters; two texts may come out equal."""
    shown = text if text.isprintable() else _spelled_out(text[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def plural(count: int, noun: str) -> str:
    """`1 rule`, `2 rules`, `1,024 rules`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shortened(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def distinct(texts: Iterable[str]) -> list[str]:
    """`printable` of each, with `#2`, `#3`, … where two would be equal: equal labels void a whole scrape."""
    shown: list[str] = []
    taken: set[str] = set()
    for text in texts:
        candidate, number = printable(text), 1
        while candidate in taken:
            number += 1
            candidate = f"{printable(text)}#{number}"
        taken.add(candidate)
        shown.append(candidate)
    return shown


def _spelled_out(text: str) -> str:
    return "".join(char if char.isprintable() else _spelled(ord(char)) for char in text)


def _spelled(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
