"""What the demo shows: a progress bar with a line of health, events as they come, the verdict."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from gradwatch.cli.terminal import paint, table, unpainted, width
from gradwatch.demo.faults import Fault, Finding, Plan
from gradwatch.demo.play import Seen
from gradwatch.records.snapshot import Event

BAR = 24


class Screen:
    """Draws a run on `stream`: redrawn in place on a terminal, else one line in ten per cent of the way."""

    def __init__(self, plan: Plan, stream: TextIO = sys.stdout, plain: bool = False) -> None:
        self._plan, self._stream = plan, stream
        self._live = stream.isatty() and not plain
        self._drawn = False
        self._said_tenths = 0
        self._faults: set[str] = set()
        self._events = 0

    def update(self, seen: Seen) -> None:
        """Show what is new, then the state."""
        for fault in self._plan.faults:
            if fault.name in seen.faults and fault.name not in self._faults:
                self._faults.add(fault.name)
                self._say(injected(fault, seen.faults[fault.name]))
        for event in seen.events[self._events :]:
            if event.kind in ("firing", "resolved"):
                self._say(happened(event))
        self._events = len(seen.events)
        if self._live:
            self._redraw(seen)
        elif (tenths := 10 * (seen.step + 1) // self._plan.steps) > self._said_tenths:
            self._said_tenths = tenths
            print(status(seen, self._plan.steps), file=self._stream, flush=True)

    def finish(self) -> None:
        """Leave the last state on the screen and go on below it."""
        if self._drawn:
            print(file=self._stream)
        self._drawn = False

    def _say(self, line: str) -> None:
        clear = "\r\x1b[2K" if self._drawn else ""
        print(clear + line, file=self._stream, flush=True)

    def _redraw(self, seen: Seen) -> None:
        columns = shutil.get_terminal_size().columns
        line = f"{bar((seen.step + 1) / self._plan.steps)} {status(seen, self._plan.steps)}"
        if width(line) >= columns:
            line = unpainted(status(seen, self._plan.steps))[: columns - 1]
        self._stream.write("\r\x1b[2K" + line)
        self._stream.flush()
        self._drawn = True


def bar(share: float) -> str:
    """A bar of BAR cells, eighths of a cell shown."""
    eighths = round(min(1.0, max(0.0, share)) * BAR * 8)
    full, part = divmod(eighths, 8)
    cells = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
    return f"▕{paint(cells, 'green')}{' ' * (BAR - full - bool(part))}▏"


def status(seen: Seen, steps: int) -> str:
    """One line: where, how fast, loss, gradient norm, own cost, rules firing."""
    firing = ", ".join(sorted(seen.firing))
    health = paint(f"firing: {firing}", "red") if firing else paint("healthy", "green")
    if seen.step < 0:
        return "starting (importing torch) …"
    return (
        f"step {seen.step + 1}/{steps}  {seen.steps_per_second:.1f} steps/s  loss {seen.loss:.3f}  "
        f"grad norm {seen.total_norm:.3g}  overhead {seen.overhead:.1%}  {health}"
    )


def injected(fault: Fault, step: int) -> str:
    """What the script has just done to itself."""
    return f"{paint(f'step {step:>4}', 'dim')}  {paint('injected', 'bold')}  {fault.title}: {fault.how}"


def happened(event: Event) -> str:
    """A rule's transition."""
    styles = {"critical": "red", "warning": "yellow", "info": "cyan"}
    word = paint("firing  ", styles[event.severity]) if event.kind == "firing" else paint("resolved", "green")
    where = f" at {event.sites[0]}" if event.sites and event.kind == "firing" else ""
    more = f" and {event.count - 1} more" if where and event.count > 1 else ""
    does = f" → {', '.join(event.actions)}" if event.actions and event.kind == "firing" else ""
    return f"{paint(f'step {event.step:>4}', 'dim')}  {word}  {event.rule}{where}{more}{does}"


def verdict(findings: Sequence[Finding]) -> str:
    """The table: fault, when injected, when detected, which parameter, what rule, what was done."""
    header = ("", "fault", "injected", "detected", "parameter", "rule", "action")
    return table(header, [_row(finding) for finding in findings])


def _row(finding: Finding) -> tuple[str, ...]:
    fault, event = finding.fault, finding.event
    mark = paint("found", "green") if finding.found else paint("MISSED", "red")
    if event is None:
        return mark, fault.title, f"step {fault.step}", "–", "–", "–", "–"
    late = event.step - fault.step
    when = f"step {event.step}" + (f" (+{late})" if late else " (same)")
    site = next((site for site in event.sites if site.startswith(fault.where)), event.first_cause or "all")
    site += f" (+{event.count - 1} more)" if event.count > 1 else ""
    acted = "step skipped" if finding.skipped else "alert"
    return mark, fault.title, f"step {fault.step}", when, site, event.rule, acted


def report(plan: Plan, findings: Sequence[Finding], alarms: Sequence[Event], seen: Seen) -> dict[str, Any]:
    """The verdict for a machine."""
    rows = [
        {
            "fault": finding.fault.name,
            "injected_step": finding.fault.step,
            "found": finding.found,
            "detected_step": None if finding.event is None else finding.event.step,
            "rule": None if finding.event is None else finding.event.rule,
            "parameters": [] if finding.event is None else list(finding.event.sites),
            "skipped": finding.skipped,
        }
        for finding in findings
    ]
    return {
        "passed": all(finding.found for finding in findings),
        "steps": plan.steps,
        "faults": rows,
        "false_alarms": [{"rule": event.rule, "step": event.step} for event in alarms],
        "steps_per_second": seen.steps_per_second,
        "overhead_ratio": seen.overhead,
    }


def next_commands(directory: Path, url: str | None) -> str:
    """Commands to type next, each complete."""
    lines = []
    if url is not None:
        lines.append((f"curl -s {url} | grep gradwatch_rule", "what Prometheus would scrape, now"))
    lines += [
        ("gradwatch demo --hold", "the same, with the endpoint kept up at the end"),
        ("gradwatch rules list", "the rules that found them"),
        ("gradwatch run -- python train.py", "your own script, unmodified"),
    ]
    wide = max(len(command) for command, _ in lines)
    told = "\n".join(f"  {command:<{wide}}  {paint('# ' + why, 'dim')}" for command, why in lines)
    return f"journal: {directory}\n\n{paint('next', 'bold')}\n{told}"
