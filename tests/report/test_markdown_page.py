"""The report in Markdown."""

from __future__ import annotations

from pathlib import Path

from gradwatch.report import markdown_page, read_run
from tests.report.runs import HOSTILE, broken, finished, recorded, steps
from tests.support.sink_records import make_sites


def test_a_broken_run(tmp_path: Path) -> None:
    """Verdict first; the stretch with the NaN, the skip and the clips; the incident's page; the rules; the cost."""
    run = recorded(
        tmp_path, broken(), account=finished(60, fired={"non-finite": 1}, no_data={"exploding": "warm-up"})
    )
    text = markdown_page.page([read_run(run)])
    assert text.startswith(
        "# run-1\n\n**Went wrong: rule non-finite (critical) fired at step 40 (the backward of sqrt"
    )
    for line in (
        "| 0–5 | ",
        "not finite | ",
        "## incident-1: the backward of sqrt in encoder.norm at train.py:11",
        "| 40 | NaN |  | 1.667 | ← here, skipped |",
        "| `non-finite` | critical | 1 | 40 | 40 | the backward of sqrt in encoder.norm at train.py:11 |",
        "- no data: `exploding`: warm-up",
        "gradwatch's own cost: 5.0% of the time of the loop.",
    ):
        assert line in text, line
    assert "| `layers.3.weight` | " in text


def test_of_a_killed_run_no_rule_is_named_for_what_is_not_known_of_any(tmp_path: Path) -> None:
    """It has left no account: the list would be all rules."""
    page = markdown_page.page([read_run(recorded(tmp_path, steps(5)))])
    assert "- all 2 rules: not known whether they had data\n" in page


IMAGE = "![a](http://127.0.0.1:9/x.png)"


def test_names_make_no_html_and_no_column(tmp_path: Path) -> None:
    """A name with a bar or with markup stays inside its cell; none is an image, which a wiki would fetch, or a link."""
    sites = make_sites(names=[IMAGE, HOSTILE, "b", "c"])
    text = markdown_page.page(
        [read_run(recorded(tmp_path, broken(sites=sites, name=f"{HOSTILE}{IMAGE}"), run_id=IMAGE))]
    )
    outside_code = "".join(line for line in text.splitlines() if not line.startswith("    "))
    for mark in ("<", "![", "]("):
        assert mark not in outside_code
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert {row.count("|") for row in rows} == {7}
