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


IN_PLACE = {
    START
    + "    detect: {kind: nonfinite}\n    do: [{clip: {max_norm: 1}}]\n": "write to: the norm that is left",
    START + "    detect: {kind: nonfinite}\n    do: {skip_step: }\n": "own map: [skip_step]",
    "version: 1\nsinks: {slack: {}, email: {}}\n": "write sinks: [prometheus, journal, log, slack, {email: …}]: a list",
    "version: 1\nclip: 1.0\n": f"write {words.CLIP}",
    "version: 1\noverrides: [{match: {run: x}, slack: {}}]\n": "write sinks: [prometheus, journal, log, slack]: a list",
    START
    + "    detect: {kind: nonfinite}\n    slack: {}\n": "write `sinks: [prometheus, journal, log, slack]` beside",
    START + "    detect: {kind: nonfinite}\n    clip: 1.0\n": "write do: [{clip: {to: 1.0}}] for",
    START + "    detect: {kind: nonfinite, of: loss}\n": "`kind: loss_nonfinite` for a NaN or Inf of it",
    "version: 1\nsinks: [pushgateway: {every_seconds: 15}]\n": "once, when the run ends",
    "version: 1\nsinks: [pushgateway: {interval: 15}]\n": "have Prometheus scrape it",
}


@pytest.mark.parametrize("text", IN_PLACE)
def test_what_is_written_in_another_shape_or_place(text: str) -> None:
    """A map for a list, a number for a section, a section in a rule: the one problem says what to write."""
    error = problems_of(text)
    assert error is not None
    (problem,) = error.problems
    assert IN_PLACE[text] in problem.hint


def test_what_is_advised_is_accepted() -> None:
    """Sections and actions that hints spell out are right as they stand."""
    advised = ["sinks: [prometheus, journal, log, slack]", words.CLIP]
    for line in advised:
        assert any(line in hint for hint in {**words.FILE_KEYS, **words.RULE_KEYS}.values()), line
        assert problems_of(f"version: 1\n{line}\n") is None
    clip = "do: [{clip: {to: 1.0}}]"
    assert clip in words.RULE_KEYS["clip"]
    assert problems_of(START + f"    detect: {{kind: above, of: norm, threshold: 1}}\n    {clip}\n") is None


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
