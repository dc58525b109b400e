"""Advice on words from other tools: each is reached, and none takes the place of a word that means something."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gradwatch.detectors import DETECTORS
from gradwatch.rules.action_kinds import ACTIONS
from gradwatch.rules.files import words_of_other_tools as words
from gradwatch.rules.files.key_validation import keys_of
from gradwatch.rules.files.pydantic_models import Document, RuleEntry
from gradwatch.rules.key_descriptions import described
from gradwatch.rules.sink_kinds import SINKS
from tests.rules.test_refusals import problems_of

START = "version: 1\nrules:\n  r:\n"
PLACES = {
    "kind": (words.KINDS, START + "    detect: {{kind: {}}}\n", DETECTORS),
    "action": (words.ACTIONS, START + "    detect: {{kind: nonfinite}}\n    do: [{}]\n", ACTIONS),
    "sink": (words.SINKS, "version: 1\nsinks: [{}]\n", SINKS),
    "key": (words.RULE_KEYS, START + "    detect: {{kind: nonfinite}}\n    {}: x\n", keys_of(RuleEntry)),
    "file": (words.FILE_KEYS, "version: 1\n{}: x\n", keys_of(Document)),
    "column": (words.COLUMNS, START + "    detect: {{kind: spike, of: {}}}\n", ()),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_advice_is_given(place: str) -> None:
    """At the place of the word, in the place of the list of what is known; no word of ours has one."""
    table: Mapping[str, str]
    table, text, known = PLACES[place]
    assert not set(known) & table.keys()
    for word, advice in table.items():
        error = problems_of(text.format(word))
        assert error is not None, word
        found = [problem for problem in error.problems if problem.hint.startswith(advice)]
        assert len(found) == 1, (word, str(error))
        assert "did you mean" not in found[0].message
        assert found[0].source[found[0].column - 1 :].startswith(word)


@pytest.mark.parametrize("kind", DETECTORS)
def test_advice_on_a_bound_is_what_the_kind_means_by_it(kind: str) -> None:
    """Words for `above` and `threshold` are answered by the kind's own sentence on that key."""
    sentences = described(DETECTORS[kind])
    for key in words.DETECT_KEYS.keys() & sentences.keys():
        for word in set(words.DETECT_KEYS[key]) - sentences.keys():
            error = problems_of(START + f"    detect: {{kind: {kind}, {word}: 1}}\n")
            assert error is not None
            (problem,) = [one for one in error.problems if one.code == "GW101"]
            assert problem.hint in {
                f"write {one}: {sentences[one]}" for one in words.DETECT_KEYS if one in sentences
            }
            assert sentences[key]
