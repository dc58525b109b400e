"""The page of an Incident, in Markdown: the cause first, then the evidence, what was done, how to see it again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping

from gradwatch.incidents import explanation
from gradwatch.incidents.incident import Incident
from gradwatch.records.decision import Order
from gradwatch.runtime.printable import one_line
from gradwatch.runtime.readable_numbers import number

LONGEST_LINE = 2000
MOST_LEVELS = 20  # parameters shown with their usual level
SCRIPT = "MODULE:FUNCTION"


def page(
    incident: Incident, bundle: str = "", obstacle: str = "", missing: Iterable[str] = ()
) -> Iterator[str]:
    """The whole of it, line by line; lines may hold any text of the job's, so print each as `runtime.printable` does.

    `bundle` is the folder in which it is kept ("" = in none), `obstacle` why that one cannot be run again, `missing`
    what was left out of it.
    """
    if incident.finding is not None:
        yield from explanation.page(incident.finding)
    else:
        yield f"## {incident.name}: {incident.title}"
    yield ""
    yield from _happened(incident)
    yield from _norms(incident)
    yield from _done(incident.done)
    yield from _kept(bundle, obstacle, tuple(missing))


def reproduce(bundle: str) -> str:
    """The command that runs the step of a bundle again."""
    return f"gradwatch replay {shlex.quote(bundle)} --script {SCRIPT}"


def _happened(incident: Incident) -> Iterator[str]:
    event = incident.event
    if event is None:
        return
    yield "### What happened"
    yield ""
    rank = f", rank {incident.rank} of {incident.world_size}" if incident.world_size > 1 else ""
    yield f"- rule `{event.rule}` ({event.detector}, {event.severity}) fired at step {event.step}{rank}"
    yield from (f"- {text}" for text in (event.summary, event.description) if text)
    if event.sites:
        worst = ", ".join(f"`{site}`" for site in event.sites)
        more = f" and {event.count - len(event.sites)} more" if event.count > len(event.sites) else ""
        yield f"- worst first: {worst}{more}; first in backward order: `{event.first_cause}`"
    if event.kind != "failed":
        yield f"- value {event.value:.4g}, score {event.score:.4g}, fires at {event.threshold:.4g}"
    yield ""


def _norms(incident: Incident) -> Iterator[str]:
    if not incident.around:
        return
    yield "### Norms around it"
    yield ""
    yield "| step | total norm | as applied | loss | |"
    yield "|---|---|---|---|---|"
    for one in incident.around:
        loss = "" if one.loss is None else number(one.loss)
        said = [*_row_notes(incident, one.step), *(["skipped"] if one.skipped else [])]
        applied = "" if one.skipped else number(one.total_norm_applied)
        yield f"| {one.step} | {number(one.total_norm)} | {applied} | {loss} | {', '.join(said)} |"
    yield ""


def _row_notes(incident: Incident, step: int) -> list[str]:
    """Notes on a step of the incident: where it fired, and where its cause was found, which may be a later step."""
    event, finding = incident.event, incident.finding
    fired = incident.step if event is None else event.step
    found = fired if finding is None or not finding.found else finding.step
    if fired == found:
        return ["← here"] if step == fired else []
    return {fired: ["← fired here"], found: ["← cause found here"]}.get(step, [])


def _done(done: tuple[Order, ...]) -> Iterator[str]:
    if not done:
        return
    yield "### What was done"
    yield ""
    for order in done:
        at = f" at `{order.site}`" if order.site else ""
        more = f" and {order.count - 1} more" if order.count > 1 else ""
        factor = ""
        if order.coefficient is not None:
            known = order.before is not None and order.after is not None
            norms = f" (norm {order.before:.4g} → {order.after:.4g})" if known else ""
            factor = f" × {order.coefficient:.4g}{norms}"
        would = "would have: " if order.shadow else ""
        yield f"- {would}`{order.action}`{factor}, by rule `{order.rule}`{at}{more}"
    yield ""


def _kept(bundle: str, obstacle: str, missing: tuple[str, ...]) -> Iterator[str]:
    if not bundle:
        return
    yield "### Run it again"
    yield ""
    if obstacle:
        yield f"- kept in `{bundle}`; cannot be run again: {obstacle}"
    else:
        yield f"    {reproduce(bundle)}"
        yield ""
        yield f"- {SCRIPT}() is yours: it builds the model and returns it (or `model, loss_fn`)"
    yield from (f"- not kept: {one}" for one in missing)
    yield ""


def usual_levels(norms: Mapping[str, float], usual: Mapping[str, float]) -> Iterator[str]:
    """Norms of a step beside their usual levels, by parameter, the furthest off first; nothing where none is known."""
    known = [(name, norm, usual[name]) for name, norm in norms.items() if usual.get(name)]
    if not known:
        return
    yield "## Gradient norms and their usual levels"
    yield ""
    yield "| parameter | norm | usual | norm ÷ usual |"
    yield "| --- | --- | --- | --- |"
    for name, norm, level in sorted(known, key=lambda one: -_off(one[1], one[2]))[:MOST_LEVELS]:
        yield f"| {name} | {norm:.4g} | {level:.4g} | {norm / level:.3g} |"
    if len(known) > MOST_LEVELS:
        yield ""
        yield f"{len(known) - MOST_LEVELS} more are in `site.norm` and `site.usual`."
    yield ""


def _off(norm: float, level: float) -> float:
    """Distance of a norm from its level, in either direction; infinite where it is not finite, or 0."""
    return abs(math.log(norm / level)) if math.isfinite(norm) and norm > 0 else math.inf


def markdown(lines: Iterable[str]) -> str:
    """The page as a file: every line printable, and no HTML, image or link from elsewhere outside code."""
    return "".join(f"{_harmless(one_line(line, LONGEST_LINE))}\n" for line in lines)


def _harmless(line: str) -> str:
    if line.startswith("    "):
        return line
    return line.replace("<", "&lt;").replace("![", "!&#91;").replace("](", "]&#40;")
