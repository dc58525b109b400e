"""An incident's page as HTML."""

from __future__ import annotations

import pytest

from gradwatch.report.incident_html import markdown_html


def test_what_the_page_uses() -> None:
    """Headings, lists, code, tables."""
    found = markdown_html(["## a", "", "    code", "", "- `b` c", "", "| x | y |", "|---|---|", "| 1 | 2 |"])
    for part in (
        "<h2>a</h2>",
        "<li><code>b</code> c</li>",
        "<pre><code>code",
        "<th>x</th>",
        "<td>2</td>",
        'class="wide"',
    ):
        assert part in found


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x>",
        "![a](http://x/y.png)",
        "[a](javascript:alert(1))",
        "<http://x>",
        "__init__ *b*",
        "&lt;&#x3c;b>",
    ],
)
def test_nothing_else_is_made_of_names(text: str) -> None:
    """No image, no link, no emphasis, no HTML: the text is shown as it is."""
    found = markdown_html([f"- {text}"])
    tags = {part.partition(">")[0] for part in found.split("<")[1:]}
    assert tags == {"ul", "li", "/li", "/ul"}


def test_a_line_is_one_line() -> None:
    """A cause with a line break cannot open a heading of its own."""
    assert "<h1>" not in markdown_html(["cause\n# owned"])
