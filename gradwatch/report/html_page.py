"""One page of HTML that opens offline: everything in it, nothing from elsewhere, no script but its own.

A content security policy in the page refuses any request, and any script whose hash it does not name.
"""

from __future__ import annotations

import hashlib
import html
from base64 import b64encode
from collections.abc import Iterator, Sequence
from importlib.resources import files

from gradwatch.report import html_sections as sections
from gradwatch.report.chart_data import script_data
from gradwatch.report.run_report import RunReport

SCRIPTS = (
    *("uPlot.iife.min.js", "charts.js", "timeline.js", "heatmap.js", "flow.js"),
    *("parameters.js", "compare.js", "page.js"),
)
STYLES = ("uPlot.min.css", "report.css")
FRAME_HEIGHT = 900
"""Pixels of the frame in a notebook."""


def page(reports: Sequence[RunReport]) -> str:
    """The page of one run, or of several: then a comparison comes first."""
    script, style = asset(*SCRIPTS), asset(*STYLES)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    title = " · ".join(sections.name(one.name) for one in reports)
    several = len(reports) > 1
    body = "".join(
        (_comparison(reports) if several else "", *(_run(one, at) for at, one in enumerate(reports)))
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{title} · gradwatch report</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<header>gradwatch report</header>\n{body}<noscript><p class="notes">The charts need JavaScript; nothing '
        "is loaded from anywhere.</p></noscript>\n"
        f'<script type="application/json" id="data">{script_data(reports)}</script>\n<script>{script}</script>\n'
        "</body>\n</html>\n"
    )


def asset(*names: str) -> str:
    """The text of files that are shipped with the package, one after the other."""
    folder = files("gradwatch.report") / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def frame(report: RunReport) -> str:
    """The page in a frame, so that a notebook's styles and the page's do not meet."""
    inside = html.escape(page([report]))
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{inside}" '
        f'style="width:100%;height:{FRAME_HEIGHT}px;border:0"></iframe>'
    )


def _run(report: RunReport, at: int) -> str:
    return f'<article class="run" data-run="{at}">\n{"".join(_parts(report))}</article>\n'


def _parts(report: RunReport) -> Iterator[str]:
    yield f"<h1>{sections.name(report.name)}</h1>\n{sections.verdict(report)}{sections.about(report)}"
    if report.tracks:
        yield (
            '<nav class="tracks" hidden></nav>\n'
            "<section><h2>Timeline</h2>\n"
            '<div class="timeline"></div></section>\n'
            '<section><h2>Parameters by depth and step</h2>\n<div class="heatmap"></div></section>\n'
            '<section><h2>Gradient flow by depth</h2>\n<div class="flow"></div></section>\n'
            '<section class="ratios" hidden><h2>Update ratios</h2>\n<div></div></section>\n'
            '<section><h2>Parameters</h2>\n<div class="parameters"></div></section>\n'
        )
    yield f'<section id="incidents"><h2>Incidents</h2>\n{sections.incidents(report)}</section>\n'
    if report.saved.taken:
        yield f"<section><h2>Saved states</h2>\n{sections.saved(report)}</section>\n"
    yield f"<section><h2>Rules</h2>\n{sections.rules(report)}</section>\n"
    yield f"<section><h2>What gradwatch did</h2>\n{sections.actions(report)}</section>\n"
    yield f"<section><h2>What gradwatch cost</h2>\n{sections.cost(report.cost)}</section>\n"


def _comparison(reports: Sequence[RunReport]) -> str:
    head = ("", *(sections.name(one.name) for one in reports))
    rows = (
        ("verdict", *(sections.text(one.verdict.sentence) for one in reports)),
        ("steps recorded", *(f"{one.steps:,}" for one in reports)),
        ("rules fired", *(sections.fired_rules(one.rules) for one in reports)),
        ("skipped", *(f"{sum(track.total('skipped') for track in one.tracks):,}" for one in reports)),
        ("own cost", *(_share(one) for one in reports)),
    )
    return (
        '<article class="comparison"><h1>Side by side</h1>\n'
        f'{sections.table(head, rows)}<div class="compare"></div></article>\n'
    )


def _share(report: RunReport) -> str:
    share = report.cost.share if report.cost else None
    return "not known" if share is None else f"{share:.1%}"
