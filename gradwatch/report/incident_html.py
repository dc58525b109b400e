"""The page of an incident as HTML: its Markdown, of which only what that page uses is understood.

No links, images, emphasis or HTML: a name of the job's can become none of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from gradwatch.report.explained import Explained, page
from gradwatch.runtime.printable import one_line

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

LONGEST_LINE = 2000


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    rules = ["heading", "list", "table", "code", "backticks", "escape"]
    return MarkdownIt("zero", {"html": False}).enable(rules)


def incident_html(one: Explained) -> str:
    """The page of an incident, its headings two levels down."""
    return markdown_html(f"##{line}" if line.startswith("##") else line for line in page(one))


def markdown_html(lines: Iterable[str]) -> str:
    """HTML of these lines; each line of text is made printable first."""
    text = "".join(f"{one_line(line, LONGEST_LINE)}\n" for line in lines)
    rendered: str = _parser().render(text)
    return rendered.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
