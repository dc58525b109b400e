"""The picture of the live view: lines of text in the width and height of a terminal."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from gradwatch.cli.terminal import console, paint, redrawable
from gradwatch.report.live.sparkline import ASCII_BARS, BARS, NOT_FINITE, sparkline
from gradwatch.report.live.view_records import Firing, Happened, LiveView, OptimizerLine, ParameterLine
from gradwatch.runtime.printable import one_line, plural, printable
from gradwatch.runtime.readable_numbers import ago, duration, number

if TYPE_CHECKING:
    from rich.live import Live

WIDTH = 100
"""Columns where the stream is no terminal."""
WIDEST = 160
_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
FEW_STEPS = 100
"""Steps before which most rules on levels are still learning, so that their silence says nothing."""
_MOST_OPTIMIZERS = 4
_MOST_FIRING = 6
_LEAST_PARAMETERS = 3
_MOST_PARAMETERS = 12
_MOST_LATELY = 6
_LONGEST_NAME = 500
_FURTHEST = "furthest from usual norm"


class Picture:
    """Draws views on the second screen of a terminal, which goes away with its contents when the context ends."""

    def __init__(self, stream: TextIO) -> None:
        from rich.live import Live

        self._stream = stream
        self._live: Live = Live(
            console=console(stream),
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Picture:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def draw(self, view: LiveView) -> None:
        """Show this view in the place of the one before."""
        from rich.text import Text

        size = self._live.console.size
        drawn = Text.from_ansi("\n".join(lines(view, self._stream, size.width, size.height)))
        drawn.no_wrap, drawn.overflow = True, "crop"
        self._live.update(drawn, refresh=True)


def lines(view: LiveView, stream: TextIO, width: int | None = None, height: int | None = None) -> list[str]:
    """The view as text, coloured as `stream` allows; no longer than `height`, which None does not limit."""
    if width is None:
        width = shutil.get_terminal_size((WIDTH, 24)).columns if redrawable(stream) else WIDTH
    return _Drawing(view, stream, min(width, WIDEST), height).lines()


class _Drawing:
    """One view on one stream, `width` columns wide."""

    def __init__(self, view: LiveView, stream: TextIO, width: int, height: int | None) -> None:
        self.view, self.stream, self.width, self.height = view, stream, width, height
        self.bars = BARS if _encodes(stream, BARS) else ASCII_BARS

    def lines(self) -> list[str]:
        """All of it; what is least needed is left out where it is too high."""
        head = [self._title(), self._health(), self._pace(), "", *self._norms()]
        firing = self._firing()
        last = self._last()
        room = math.inf if self.height is None else self.height - len(head) - len(firing) - len(last)
        parameters = self._parameters(int(min(_MOST_PARAMETERS, max(_LEAST_PARAMETERS, room - 2))))
        room -= len(parameters)
        lately = self._lately(int(min(_MOST_LATELY, max(0, room - 2))))
        found = [*head, *firing, *parameters, *lately, *last]
        return found if self.height is None else found[: self.height]

    def _paint(self, text: str, style: str) -> str:
        return paint(text, style, self.stream)

    def _cut(self, text: str, used: int = 0) -> str:
        """As much of a line as fits; `used` columns are taken already."""
        return one_line(text, max(10, self.width - used))

    # -- head ------------------------------------------------------------------------------------------------

    def _title(self) -> str:
        view = self.view
        name = printable(view.run_id) or one_line(view.where, 60)
        rank = f" · rank {view.rank} of {view.world_size}" if view.world_size > 1 else ""
        script = f" · {printable(view.script)}" if view.script else ""
        text = self._cut(f"gradwatch top · {name}{rank}{script} · {_process(view)}")
        return self._paint(text, "bold")

    def _health(self) -> str:
        sentence, style = health(self.view)
        mark = "●" if _encodes(self.stream, "●") else "*"
        return self._paint(self._cut(f"{mark} {sentence}"), style)

    def _pace(self) -> str:
        view = self.view
        if view.reading:
            return f"reading what was recorded before: {plural(view.steps, 'step')} so far"
        lines = view.optimizers
        parts = [f"step {max((one.step for one in lines), default=-1):,}"] if lines else []
        if speed := max((one.steps_per_second for one in lines), default=0.0):
            parts.append(f"{speed:.3g} steps/s")
        if view.quiet_seconds is not None and lines:
            parts.append(f"last step {ago(view.quiet_seconds)}")
        if view.coverage is not None:
            parts.append(f"coverage {view.coverage:.0%}")
        if view.own_share is not None:
            parts.append(f"own cost {view.own_share:.1%}")
        return self._cut("   ".join(parts))

    def _norms(self) -> Iterator[str]:
        several = len(self.view.optimizers) > 1
        for one in self.view.optimizers[:_MOST_OPTIMIZERS]:
            of = f" {one.optimizer}" if several else ""
            yield self._series(f"total norm{of}", one.total_norm, one.total_norms, True)
            if math.isfinite(one.applied) and one.applied < one.total_norm * (1 - 1e-6):
                yield f"  {'after clip':<13}{number(one.applied, 3)}"
            if one.loss is not None and self._has_own_loss(one):
                positive = all(each > 0 for each in one.losses if each == each)
                yield self._series(f"loss{of}", one.loss, one.losses, positive)
            yield from self._rates(one, of)
        if len(self.view.optimizers) > _MOST_OPTIMIZERS:
            yield f"  and {len(self.view.optimizers) - _MOST_OPTIMIZERS} more optimizers"

    def _has_own_loss(self, one: OptimizerLine) -> bool:
        """False where it is the loss of the first optimizer, too: all of a model have one, those of a GAN do not."""
        first = self.view.optimizers[0]
        return one is first or repr((one.loss, one.losses)) != repr((first.loss, first.losses))  # NaN is NaN

    def _rates(self, one: OptimizerLine, of: str) -> Iterator[str]:
        parts = [] if one.lr is None else [f"{one.lr:.4g}"]
        if one.loss_scale is not None:
            parts.append(f"loss scale {one.loss_scale:.6g}")
        if parts:
            yield f"  {f'lr{of}':<13}{'   '.join(parts)}"

    def _series(self, name: str, last: float, values: Sequence[float], logarithmic: bool) -> str:
        head = f"  {name:<13}{number(last, 3):<11}"
        finite = [each for each in values if math.isfinite(each)]
        between = f"  {number(min(finite), 3)} … {number(max(finite), 3)}" if finite else ""
        between += f" in {plural(len(values), 'step')}" if finite else ""
        if self.width - len(head) - len(between) < 12:
            between = ""
        width = max(1, min(60, self.width - len(head) - len(between) - 1))
        return head + self._spark(values, width, logarithmic) + between

    def _spark(self, values: Sequence[float], width: int, logarithmic: bool) -> str:
        drawn = sparkline(values, width, logarithmic=logarithmic, bars=self.bars)
        return drawn.replace(NOT_FINITE, self._paint(NOT_FINITE, "bold red"))

    # -- rules -----------------------------------------------------------------------------------------------

    def _firing(self) -> list[str]:
        firing = self.view.firing
        if not firing:
            return []
        found = ["", self._paint("firing now", "bold")]
        found += [self._rule(one) for one in firing[:_MOST_FIRING]]
        more = len(firing) - _MOST_FIRING
        return found + ([f"  and {plural(more, 'more rule')}"] if more > 0 else [])

    def _rule(self, one: Firing) -> str:
        word = f"  {one.severity:<9}"
        since = f"since step {one.since:,}" if one.since >= 0 else "since before this view began"
        where = f" at {printable(one.sites[0])}" if one.sites else ""
        where += f" and {one.count - 1:,} more" if where and one.count > 1 else ""
        does = f", does {', '.join(one.actions)}" if one.actions else ""
        elsewhere = " in another process" if one.rank == self.view.rank else f" on rank {one.rank}"
        on = "" if one.rank is None else elsewhere
        text = self._cut(f"{printable(one.rule)}  {since}{on}{where}{does}", len(word))
        return self._paint(word, _STYLES.get(one.severity, "bold")) + text

    def _lately(self, most: int) -> list[str]:
        happened = self.view.lately[-most:] if most else ()
        if not happened:
            return []
        return ["", self._paint("lately", "bold"), *map(self._event, happened)]

    def _event(self, one: Happened) -> str:
        style = {"firing": _STYLES.get(one.severity, "bold"), "resolved": "green"}.get(one.kind, "bold")
        head = f"  step {one.step:>7,}  "
        kind = f"{one.kind:<9}"
        said = one.text.replace(f"{os.getcwd()}/", "")
        text = f"{printable(one.rule)}{': ' if said and one.rule else ''}{said}"
        return head + self._paint(kind, style) + " " + self._cut(text, len(head) + 10)

    # -- parameters ------------------------------------------------------------------------------------------

    def _parameters(self, most: int) -> list[str]:
        shown = self.view.parameters[:most]
        if not shown:
            return []
        longest = max(len(printable(one.name, _LONGEST_NAME)) for one in shown)
        name = max(12, min(max(longest, len(_FURTHEST)), self.width - 46))
        head = f"  {_FURTHEST[:name]:<{name}}  {'norm':<10}{'÷ usual':<9} recent"
        title = self._paint(one_line(head, self.width), "bold")
        return ["", title, *(self._parameter(one, name) for one in shown)]

    def _parameter(self, one: ParameterLine, width: int) -> str:
        text = f"  {_fitted(printable(one.name, _LONGEST_NAME), width):<{width}}  "
        norm = f"{number(one.norm, 3):<10}"
        if not math.isfinite(one.norm):
            norm = self._paint(norm, "bold red")
        ratio = "" if math.isnan(one.ratio) else f"×{number(one.ratio, 3)}"
        off = one.ratio > 10 or 0 <= one.ratio < 0.1
        factor = self._paint(f"{ratio:<9}", "yellow") if off else f"{ratio:<9}"
        left = self.width - width - 24
        spark = self._spark(one.norms, min(24, left), True) if left > 4 else ""
        rules, rest = ", ".join(map(printable, one.firing)), left - 26
        return f"{text}{norm}{factor} {spark}" + (f" {one_line(rules, rest)}" if rules and rest > 4 else "")

    # -- foot ------------------------------------------------------------------------------------------------

    def _last(self) -> list[str]:
        view = self.view
        parts = [
            ", ".join(f"{printable(name)} ×{count:,}" for name, count in sorted(view.actions.items())),
            f"{view.skipped:,} skipped" if view.skipped else "",
            f"{view.clipped:,} clipped" if view.clipped else "",
        ]
        done = " · ".join(filter(None, parts)) or "nothing was done to gradients or steps"
        found = ["", self._cut(f"done: {done}")]
        found += [self._paint(self._cut(f"note: {note}"), "yellow") for note in view.notes]
        if view.over:
            where = one_line(view.where, 4096)
            return [*found, f"next: gradwatch {'explain --run' if view.fired else 'report'} {where}"]
        return found


def health(view: LiveView) -> tuple[str, str]:
    """The state of the run in a sentence, and its colour; what needs a person comes first."""
    steps = plural(view.steps, "step")
    if view.firing:
        worst = view.firing[0]
        more = f" and {plural(len(view.firing) - 1, 'more rule')}" if len(view.firing) > 1 else ""
        when = "still firing when the process ended" if view.over else "firing"
        return (
            f"{when}: {printable(worst.rule)}{more}",
            "bold red" if worst.severity == "critical" else "yellow",
        )
    if view.process == "unreachable":
        return (
            "its endpoint does not answer any more: the process has ended, or the way to it is cut",
            "bold red",
        )
    if view.process == "killed":
        return "the process is gone, and left no account: it was killed", "bold red"
    if view.process == "failed":
        return "the training ended with an exception", "bold red"
    if view.stalled and view.quiet_seconds is not None:
        return f"no step for {duration(view.quiet_seconds)}: far longer than usual", "bold red"
    if view.worst_severity == "critical":
        at = f" at step {view.worst_step:,}" if view.worst_step >= 0 else ""
        return f"went wrong{at}: rule {printable(view.worst)} (critical) fired, and is over", "yellow"
    if not view.steps:
        return "waiting for the first step", "yellow"
    # A GradScaler rejects what is not finite, and looks for its scale so.
    if broken := [
        one for one in view.optimizers if one.loss_scale is None and not math.isfinite(one.total_norm)
    ]:
        return f"gradients are not finite at step {broken[0].step:,}, and no rule says so", "bold red"
    if view.weights_healthy is False:
        why = f": {one_line(view.unfit, 200)}" if view.unfit else ""
        return f"the weights are not healthy{why}", "bold red"
    if view.coverage is not None and view.coverage < 1:
        return f"{1 - view.coverage:.1%} of the parameters are not watched", "yellow"
    count = plural(sum(view.fired.values()), "firing")
    fired = f"{count} in {steps}, none critical" if view.fired else f"no rule has fired in {steps}"
    if view.weights_healthy is None:
        return f"{fired}; of the weights nothing is known", "yellow"
    if view.reservations:
        return f"nothing found: {fired}; {'; '.join(view.reservations)}", "yellow"
    if view.process == "running" and view.steps < FEW_STEPS:
        return f"so far {fired}", "yellow"
    return f"healthy{' now' if view.fired else ''}: {fired}", "green"


def _process(view: LiveView) -> str:
    if view.process in ("running", "waiting") and view.started:
        return f"running {duration(max(0.0, time.time() - view.started))}"
    return view.process


def _fitted(name: str, width: int) -> str:
    """A name in so many columns: its end says most, as in `…layers.11.mlp.weight`."""
    return name if len(name) <= width else f"…{name[len(name) - width + 1 :]}"


def _encodes(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
