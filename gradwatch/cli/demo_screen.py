"""The demo's screen: a progress bar with a line of health, events as they come, the verdict."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gradwatch.cli.terminal import console, paint, redrawable, table
from gradwatch.demo.faults import Fault, Finding, Plan
from gradwatch.demo.follow_run import Seen
from gradwatch.records.event import Event

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

BAR = 24


class Screen:
    """Draws a run: on a terminal a bar on `progress` that is redrawn below the events, else lines on `stream` alone.

    A context manager; it leaves the last state on the screen, and the cursor as it was.
    """

    def __init__(
        self, plan: Plan, stream: TextIO | None = None, progress: TextIO | None = None, plain: bool = False
    ) -> None:
        self._plan, self._stream, self._progress = plan, stream or sys.stdout, progress or sys.stderr
        live = not plain and redrawable(self._stream) and redrawable(self._progress)
        self._live = _live(self._progress) if live else None
        self._said_tenths = 0
        self._faults: set[str] = set()
        self._events = 0

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

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
        if self._live is not None:
            self._live.start()
            self._live.update(self._drawn(seen, self._live.console.width), refresh=True)
        elif (tenths := 10 * (seen.step + 1) // self._plan.steps) > self._said_tenths:
            self._said_tenths = tenths
            print(status(seen, self._plan.steps), file=self._stream, flush=True)

    def finish(self) -> None:
        """Leave the last state on the screen and go on below it. Idempotent."""
        if self._live is not None:
            self._live.stop()

    def _say(self, line: str) -> None:
        if self._live is None:
            print(line, file=self._stream, flush=True)
            return
        from rich.text import Text

        self._live.console.print(Text.from_ansi(line), soft_wrap=True)

    def _drawn(self, seen: Seen, columns: int) -> RenderableType:
        """The bar and the state on one line; of a narrow terminal as much of the state as fits."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        state = Text.from_ansi(status(seen, self._plan.steps), no_wrap=True, overflow="crop")
        if state.cell_len + BAR + 1 > columns:
            return state
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(ProgressBar(self._plan.steps, seen.step + 1, width=BAR), state)
        return line


def _live(stream: TextIO) -> Live:
    """A place on `stream` that is drawn again where it stands. It is drawn only when asked for."""
    from rich.live import Live

    return Live(console=console(stream), auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


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
    """Line for the fault that the script has just injected."""
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
        (f"gradwatch explain --run {directory}", "the causes: operation, line, likely fix"),
        ("gradwatch demo --hold", "the same, with the endpoint kept up at the end"),
        ("gradwatch rules list", "the rules that found them"),
        ("gradwatch run -- python train.py", "your own script, unmodified"),
    ]
    commands = table((), [(command, paint(f"# {why}", "dim")) for command, why in lines], indent="  ")
    return f"journal: {directory}\n\n{paint('next', 'bold')}\n{commands}"
