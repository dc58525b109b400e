"""Suggestions for misspelt words."""

from __future__ import annotations

import pytest

from gradwatch.runtime.spelling import closest, did_you_mean


@pytest.mark.parametrize(
    ("word", "found"), [("threshhold", "threshold"), ("GW101", "gw101"), ("xyz", ""), ("", "")]
)
def test_the_closest_word_or_none(word: str, found: str) -> None:
    """Letter case aside; nothing is suggested for what is like no word."""
    assert closest(word, ["threshold", "gw101", "for"]) == found
    assert did_you_mean(word, ["threshold", "gw101", "for"]) == (
        f"; did you mean {found!r}?" if found else ""
    )
