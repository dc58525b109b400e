"""The page of all runs, and the runbooks, for people: no script, nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from gradwatch.endpoint.http_protocol import Content
from gradwatch.endpoint.run_reports import path_of
from gradwatch.runtime.printable import printable
from gradwatch.runtime.readable_numbers import ago
from gradwatch.serve.ended_run_counters import Summary
from gradwatch.serve.run_scanner import STATES, Fleet, Member

MOST_ROWS = 500
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em}
h1{font-size:1.3em}.wide{overflow-x:auto}table{border-collapse:collapse;min-width:64em}
td,th{padding:.2em 1em .2em 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}
th{font-weight:600;white-space:nowrap}pre{white-space:pre-wrap}
.running,.finished{color:#157f3b}.died,.failed,.stopped{color:#c4161c}.silent,.unreadable{color:#8a6d00}
.running,.finished,.died,.failed,.stopped,.silent,.unreadable{white-space:nowrap}
@media(prefers-color-scheme:dark){.running,.finished{color:#3fb950}.died,.failed,.stopped{color:#ff7b72}
.silent,.unreadable{color:#d29922}}
"""


def fleet_page(fleet: Fleet, now: float) -> Content:
    """HTML of every process, the one that last gave a sign of life first; at most 500 rows."""
    shown = fleet.members[:MOST_ROWS]
    rows = "\n".join(_row(member, now) for member in shown)
    more = len(fleet.members) - len(shown)
    counts = " · ".join(f"{fleet.count(state)} {state}" for state in STATES if fleet.count(state))
    body = (
        f"<p>{counts or 'No runs yet: start one with <code>gradwatch run -- python train.py</code>.'}</p>\n"
        '<div class="wide"><table><tr><th>run<th>rank<th>state<th>steps<th>firings<th>last sign of life'
        "<th>machine<th>where\n"
        f"{rows}\n</table></div>\n"
        + (f"<p>{more} older ones are not shown.</p>\n" if more else "")
        + '<p><a href="/runbooks">runbooks</a> · <a href="/metrics">/metrics</a> · <a href="/sd">/sd</a> · '
        '<a href="/runs.json">/runs.json</a></p>\n'
    )
    return _html("gradwatch: runs", body, refresh=10)


def reading_page(read: str) -> Content:
    """Page until the first look at thousands of folders is over; `read` is the number of those read."""
    return _html(
        "gradwatch: runs",
        f"<p>Reading the run folders for the first time: {html.escape(read)}.</p>",
        refresh=2,
    )


def runbook_page(name: str, text: str) -> Content:
    """One runbook, as it was written."""
    return _html(name, f'<p><a href="/runbooks">all runbooks</a></p><pre>{html.escape(text)}</pre>')


def runbook_index(names: Iterable[str]) -> Content:
    """All runbooks."""
    links = "".join(f'<li><a href="/runbooks/{html.escape(name)}">{html.escape(name)}</a>' for name in names)
    return _html("gradwatch: runbooks", f'<p><a href="/">runs</a></p><ul>{links}</ul>')


def _row(member: Member, now: float) -> str:
    summary = member.summary
    cells = [
        _link(member, member.run_id),
        f"{member.rank}, process {member.place}" if member.place else str(member.rank),
        f'<strong class="{member.state}">{member.state}</strong>',
        str(summary.steps) if summary else "",
        "<br>".join(_firings(member, summary)) if summary and summary.firings else "",
        ago(now - member.sign_of_life),
        _text(member.node),
        _where(member),
    ]
    return "<tr><td>" + "<td>".join(cells)


def _firings(member: Member, summary: Summary) -> Iterator[str]:
    """Number of firings, some of them, and how many are not shown."""
    yield str(summary.firings)
    for one in summary.recent:
        yield _link(member, one, "#incidents")
    if (more := summary.firings - len(summary.recent)) > 0:
        yield _link(member, f"and {more:,} more", "#incidents")


def _link(member: Member, text: str, place: str = "") -> str:
    """A text that leads to the report of a run, or to a place in it."""
    return f'<a href="{html.escape(path_of(member.run_id))}{place}">{_text(text)}</a>'


def _where(member: Member) -> str:
    if member.address is not None and member.state == "running":
        url = html.escape(f"http://{member.address}/")
        return f'<a href="{url}">{url}</a>'
    return _text(str(member.folder))


def _text(text: str) -> str:
    return html.escape(printable(text))


def _html(title: str, body: str, refresh: int = 0) -> Content:
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{again}'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>\n{body}</html>\n"
    )
    return Content("text/html; charset=utf-8", page.encode("utf-8", "replace"))
