"""The page at `/`, for a person who has found the port: one file, no script, nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable

from gradwatch.endpoint.http_protocol import Content
from gradwatch.endpoint.run_reports import path_of
from gradwatch.runtime.printable import printable
from gradwatch.sinks.prometheus.metric_values import OptimizerView, View

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;padding:0 1em}
h1{font-size:1.3em}td,th{padding:.2em 1em .2em 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}
th{font-weight:600;white-space:nowrap}.ok{color:#157f3b}.bad{color:#c4161c}.unknown{color:#8a6d00}
@media(prefers-color-scheme:dark){.ok{color:#3fb950}.bad{color:#ff7b72}.unknown{color:#d29922}}
"""


def status_page(view: View, now: float) -> Content:
    """HTML of the present state; `now` is Unix time."""
    state, css = _state(view, now)
    rows = [
        ("state", f'<strong class="{css}">{_text(state)}</strong>'),
        ("run", _text(view.run.run_id)),
        ("rank", f"{view.run.rank} of {view.run.world_size}"),
        *([("process", str(view.run.place))] if view.run.place else []),
        *([("script", _text(view.run.script))] if view.run.script else []),
        *(row for each in view.optimizers for row in _optimizer_rows(each, now)),
        ("internal errors", _errors(view)),
        *((f"{_text(rule)} is off", _text(reason)) for rule, reason in view.inactive.items()),
        ("report", f'<a href="{html.escape(path_of(view.run.run_id))}">what happened so far</a>'),
        ("links", '<a href="/metrics">/metrics</a> for Prometheus · <a href="/healthz">/healthz</a>'),
    ]
    table = "\n".join(f"<tr><th>{name}<td>{shown}" for name, shown in rows)
    body = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>gradwatch: {_text(state)}</title><style>{_STYLE}</style>"
        f"<h1>gradwatch</h1>\n<table>\n{table}\n</table>\n</html>\n"
    )
    return Content("text/html; charset=utf-8", body.encode("utf-8", "replace"))


def _state(view: View, now: float) -> tuple[str, str]:
    """State in words, and how to colour them; whatever needs a person comes first."""
    firing = _firing(view)
    if firing:
        return f"firing: {', '.join(firing)}", "bad"
    started = [each.run_totals for each in view.optimizers if each.run_totals.record is not None]
    if not started:
        return "waiting for the first step", "unknown"
    quiet = min(now - each.record.wall_time for each in started if each.record is not None)
    if quiet > min(each.stall_threshold_seconds for each in started):
        return f"no step for {quiet:.0f} s", "bad"
    down = [name for name, up in view.up.items() if not up]
    if down:
        return f"switched off after faults: {', '.join(down)}", "unknown"
    return "healthy", "ok"


def _firing(view: View) -> list[str]:
    records = [each.run_totals.record for each in view.optimizers]
    return sorted({rule for record in records if record is not None for rule in record.verdict.firing})


def _optimizer_rows(view: OptimizerView, now: float) -> Iterable[tuple[str, str]]:
    run_totals, record = view.run_totals, view.run_totals.record
    suffix = f" (optimizer {view.label})" if view.label else ""
    yield (
        f"steps{suffix}",
        (
            f"{run_totals.steps} · non-finite {run_totals.nonfinite_steps} · skipped {run_totals.skipped_steps}"
            f" · clipped {run_totals.clipped_steps}"
        ),
    )
    if record is not None:
        ago = max(0.0, now - record.wall_time)
        norm = record.snapshot.total_norm
        yield f"last step{suffix}", f"{ago:.1f} s ago, gradient norm {norm:.6g}"
        yield f"overhead{suffix}", f"{run_totals.overhead_ratio:.2%} of recent steps"


def _errors(view: View) -> str:
    listed = ", ".join(f"{_text(name)} {count}" for name, count in sorted(view.errors.items()) if count)
    return listed or "none"


def _text(text: str) -> str:
    return html.escape(printable(text))
