"""Findings: plain data that survives JSON, and words that say what they hold."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.incidents.explanation import fields, page, sentence
from gradwatch.incidents.suggestions import suggestion_for
from gradwatch.records.finding import PHASES, Finding, Frame, Layer, Operand
from tests.support.alphabet import UNICODE

texts = st.text(UNICODE)
floats = st.floats(allow_nan=True, allow_infinity=True)
counts = st.integers(0, 2**40)
operands = st.builds(
    Operand,
    texts,
    texts,
    st.lists(counts, max_size=3).map(tuple),
    counts,
    counts,
    counts,
    counts,
    floats,
    floats,
)
findings = st.builds(
    Finding,
    st.sampled_from(PHASES),
    st.sampled_from(("replay", "record", "closure")),
    step=counts,
    module=texts,
    op=st.sampled_from(("sqrt", "log", "div", "", "softmax", "nobody")),
    frames=st.lists(st.builds(Frame, texts, counts, texts, texts), max_size=3).map(tuple),
    operands=st.lists(operands, max_size=3).map(tuple),
    result=st.none() | operands,
    profile=st.lists(st.builds(Layer, texts, texts, floats, floats), max_size=3).map(tuple),
    note=texts,
)


@given(findings)
def test_round_trip_through_strict_json(finding: Finding) -> None:
    """What goes out as JSON without NaN comes back the same."""
    text = json.dumps(finding.to_dict(), allow_nan=False)
    again = Finding.from_dict(json.loads(text))
    assert json.dumps(again.to_dict(), allow_nan=False) == text


@given(findings)
def test_words_never_fail(finding: Finding) -> None:
    """Any finding has a sentence, a page and fields; one that is known has a remedy."""
    assert sentence(finding)
    assert list(page(finding))
    assert dict(fields(finding))["cause"] == sentence(finding)
    assert (suggestion_for(finding) is not None) == finding.found


@pytest.mark.parametrize(
    "document",
    [{}, {"phase": "nowhere", "by": "replay"}, {"phase": "loss", "by": "replay", "frames": [{"x": 1}]}],
)
def test_what_is_no_finding_is_refused(document: dict[str, object]) -> None:
    """With a ValueError, whatever is wrong."""
    with pytest.raises(ValueError):
        Finding.from_dict(document)


def test_the_users_own_line_is_shown_before_a_librarys() -> None:
    """`frame` is the innermost line that was not installed."""
    library = Frame("/venv/lib/python3.11/site-packages/nets/block.py", 3, "forward")
    own = Frame("/home/me/train.py", 9, "forward", "y = block(x)")
    assert Finding("forward", "replay", frames=(library, own)).where == "/home/me/train.py:9"
    assert Finding("forward", "replay", frames=(library,)).where == f"{library.file}:3"
    assert Finding("forward", "replay").where == ""


def test_an_operand_says_what_it_holds() -> None:
    """Type, shape, odd elements, range of the finite ones."""
    told = str(Operand("input 0", "float32", (16, 1), 16, nan=1, inf=2, zeros=3, smallest=-1.25, largest=3.0))
    assert told == "input 0: float32[16, 1], 1 NaN, 2 Inf, 3 zero of 16, -1.25 … 3"
    assert str(Operand("x", "int64", (), 1, smallest=math.nan)) == "x: int64[]"


def test_what_was_read_and_found_is_shown_once() -> None:
    """Of a batch that was not finite, the tensor that was read is the one that was found."""
    batch = Operand("input", "float32", (4, 3), 12, nan=1)
    lines = list(page(Finding("input", "replay", step=3, op="conv", operands=(batch,), result=batch)))
    assert [line for line in lines if line.startswith("- input")] == [f"- {batch}"]


def test_what_was_run_again_is_said() -> None:
    """Only the model's call where no more is known than the side of the loss, the step where its operation is."""
    assert "- the model's call was run again" in page(Finding("loss", "replay"))
    assert "- the model's call was run again" in page(Finding("forward", "replay", module="a", op="div"))
    assert "- the step was run again" in page(Finding("forward", "replay", op="div"))
