"""The log sink: one line when a rule starts or stops firing, and never a flood."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TextIO, get_args

from gradwatch.account import Account, gaps
from gradwatch.account.account_line import fields
from gradwatch.detectors import find_detector
from gradwatch.errors import GradwatchError
from gradwatch.incidents import explanation
from gradwatch.records.columns import OBSERVED_ONLY
from gradwatch.records.decision import Order
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.rules.action_kinds import ACTIONS
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.json_numbers import json_number
from gradwatch.runtime.printable import one_line, printable
from gradwatch.runtime.process_identity import prints
from gradwatch.runtime.secret_values import without_passwords
from gradwatch.runtime.standard_streams import stderr
from gradwatch.sinks.prometheus.metric_values import NO_OPTIMIZER
from gradwatch.sinks.registry import state_restored

LogFormat = Literal["console", "json"]
FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)

QUIET_SECONDS = 60.0
"""After a line about a rule of an optimizer, the next one about the same comes no sooner than this."""
MOST_OPTIMIZERS = 8  # with lines of their own: a loop may make a new one every second
MOST_BEGUN_ANEW = 5
"""Lines a minute on baselines of one optimizer that begin anew: a loop may change its parameters at every step."""

LONGEST_TEXT = 2000
"""Characters of a summary or description; a 100 kB parameter name may be part of it."""

_LOGGED = ("firing", "resolved", "repeat", "escalated", "failed")
CLIPS = frozenset({"clip", "rescale"})
"""Actions that multiply a gradient, which makes nothing finite of NaN or Inf."""
_WORDS = {"failed": "action failed", "pending": "acting before it fires"}
_LATER = {name: kind.later for name, kind in ACTIONS.items()}
_PROSE = (
    "event",
    "not_seen",
    "no_data",
    "not_armed",
    "summary",
    "description",
    "error",
    "notice",
    "cause",
    "source",
    "why",
    "fix",
    "note",
)
_LEVELS = {"info": "info", "warning": "warning", "critical": "critical"}


class _Done(NamedTuple):
    """Actions on an Event: what its rule ordered, and whether the weights are known to be as they were.

    `observed_only`: nothing can be, for no optimizer steps there.
    """

    orders: tuple[Order, ...] = ()
    weights: str = ""
    observed_only: bool = False


@dataclass(slots=True)
class _Said:
    """The last line about a rule: when, and the events held back since."""

    at: float
    suppressed: int = 0
    latest: Event | None = None
    done: _Done | None = None


class LogSink:
    """Writes transitions of rules (firing, resolved, an action repeated while firing) as lines to `stream`.

    Pending is not logged, unless the rule acts meanwhile: it is no news until it fires. At most one line per rule,
    optimizer and minute (from the ninth optimizer on they share one); what was kept back is counted, and
    the next line, or one of its own a minute later, carries `suppressed` and the state the rule is in by then. Only
    rank 0 writes. `format` is "console" (coloured on a terminal unless NO_COLOR is set) or "json" (one object per
    line). `stream` None is whatever `sys.stderr` is at that moment.

    The logger is this sink's own: no configuration of `logging` or structlog is read or changed.
    """

    name = "log"

    def __init__(
        self,
        format: LogFormat = "console",
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if format not in FORMATS:
            raise ValueError(f"format: {format!r} is not one of {', '.join(FORMATS)}")
        self._format, self._stream = format, stream
        self._clock = clock
        self._said: dict[tuple[str, int], _Said] = {}  # by rule and optimizer
        self._acted: dict[tuple[str, int], float] = {}  # when it was last said that one acts before it fires
        # When a rule's cause was last logged, and how exact it was.
        self._caused: dict[str, tuple[float, int]] = {}
        self._mild: set[str] = set()  # rules of severity info, whose causes are no warnings either
        self._begun_anew: dict[int, tuple[float, int]] = {}  # by optimizer: since when, and how many lines
        self._next_due = math.inf

    @cached_property
    def _logger(self) -> Any:
        # Made for the first line: structlog imports rich, 0.1 s that the start of a run should not take.
        with state_restored():
            return make_logger(self._format, self._stream)

    def open(self, run: RunInfo, health: Health) -> None:
        """No-op: every rank of a process group but 0 stays silent, and the group may come later."""

    def write(self, record: Record) -> None:
        """Log the transitions of this step, and sum up what was kept back a minute ago."""
        reportable = record.verdict.events or record.findings
        if (not reportable and self._clock() < self._next_due) or not prints():
            return
        now = self._clock()
        for event in record.verdict.events:
            if event.kind == "rebaselined":
                self._rebaselined(event, now)
            if event.inhibited:
                continue
            if event.kind in _LOGGED:
                (self._mild.add if event.severity == "info" else self._mild.discard)(event.rule)
                self._transition(event, _done_about(event, record), now)
            elif event.kind == "pending":
                self._acts(event, _done_about(event, record), now)
        for finding in record.findings:
            self._cause(finding, now)
        if now >= self._next_due:
            self._sum_up(now)

    def write_all(self, records: Sequence[Record]) -> None:
        """Write the last of several Records on which no rule changed: causes, if any, come with the last."""
        self.write(records[-1])

    def internal_error(self, component: str, error: BaseException) -> None:
        """Say that a part of gradwatch failed, or cannot do as asked; `Health` calls this once per component."""
        if not prints():
            return
        said = without_passwords(str(error))
        if isinstance(error, GradwatchError):  # says something of the training, and how to fix it
            self._logger.warning("gradwatch notice", component=component, notice=said)
        else:
            said = f"{type(error).__name__}: {said}"
            self._logger.warning("gradwatch internal error", component=component, error=said)

    def conclude(self, account: Account) -> None:
        """One line, the last of the run: what was watched of what the process did."""
        if prints():
            self._sum_up(math.inf)
            log = self._logger.warning if gaps(account) else self._logger.info
            log("gradwatch account", **dict(fields(account)))

    def flush(self, timeout: float) -> bool:
        """No-op: every line is written at once."""
        return True

    def close(self) -> None:
        """Say what was kept back, so that the last state of every rule is on record."""
        if prints():
            self._sum_up(math.inf)
        self._said.clear()
        self._acted.clear()
        self._next_due = math.inf

    def _acts(self, event: Event, done: _Done, now: float) -> None:
        """Log that a rule acts on NaN and Inf while it waits for `for`, which delays alerts alone.

        One line a minute, which takes the place of no other: that the rule fires is told when it does.
        """
        key = event.rule, min(event.optimizer, MOST_OPTIMIZERS)
        acted = [order for order in done.orders if not order.shadow]
        if acted and now >= self._acted.get(key, -math.inf) + QUIET_SECONDS:
            self._acted[key] = now
            self._log(event, done, 0)

    def _transition(self, event: Event, done: _Done, now: float) -> None:
        key = event.rule, min(event.optimizer, MOST_OPTIMIZERS)
        said = self._said.get(key)
        if said is not None and now < said.at + QUIET_SECONDS:
            said.suppressed += 1
            said.latest, said.done = event, done
            self._next_due = min(self._next_due, said.at + QUIET_SECONDS)
            return
        suppressed = said.suppressed if said is not None else 0
        self._said[key] = _Said(now)
        self._log(event, done, suppressed)

    def _rebaselined(self, event: Event, now: float) -> None:
        """Log that baselines began anew, on purpose or by a change: some lines a minute of each optimizer."""
        since, said = self._begun_anew.get(event.optimizer, (now, 0))
        if now >= since + QUIET_SECONDS:
            since, said = now, 0
        self._begun_anew[event.optimizer] = since, said + 1
        if said >= MOST_BEGUN_ANEW:
            return
        kept_back = (
            {"note": "more of this minute stand in the journal"} if said + 1 == MOST_BEGUN_ANEW else {}
        )
        optimizer = {"optimizer": event.optimizer} if event.optimizer else {}
        self._logger.info(
            "gradwatch rebaselined",
            reason=event.summary,
            step=event.step,
            **optimizer,
            params=event.count,
            rules=event.description,
            **kept_back,
        )

    def _cause(self, finding: Finding, now: float) -> None:
        """One line a minute for the causes of one rule, and one more for each that is more exact than those before."""
        at, exactness = self._caused.get(finding.rule, (-math.inf, 0))
        if now >= at + QUIET_SECONDS or finding.exactness > exactness:
            self._caused[finding.rule] = now, finding.exactness
            log = self._logger.info if finding.rule in self._mild else self._logger.warning
            log("gradwatch cause", **dict(explanation.fields(finding)))

    def _sum_up(self, now: float) -> None:
        for key, said in list(self._said.items()):
            if now < said.at + QUIET_SECONDS:
                continue
            if said.latest is None:
                del self._said[key]
                continue
            self._said[key] = _Said(now)
            self._log(said.latest, said.done or _Done(), said.suppressed - 1)
        due = (said.at + QUIET_SECONDS for said in self._said.values() if said.suppressed)
        self._next_due = min(due, default=math.inf)

    def _log(self, event: Event, done: _Done, suppressed: int) -> None:
        level = "info" if event.kind == "resolved" else _LEVELS.get(event.severity, "warning")
        fields = dict(_fields(event, done))
        if suppressed > 0:
            fields["suppressed"] = suppressed
        getattr(self._logger, level)(f"gradwatch {_WORDS.get(event.kind, event.kind)}", **fields)


def make_logger(format: LogFormat = "console", stream: TextIO | None = None) -> Any:
    """A structlog logger that writes to `stream` (None: the `sys.stderr` of the moment).

    Every string is made printable, so one call is one line and no escape sequence reaches a terminal.
    """
    import structlog

    writer = _Lines(stream)
    render = _as_json if format == "json" else _console(writer)
    return structlog.wrap_logger(
        writer,
        processors=[structlog.processors.add_log_level, _harmless, render],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        context_class=dict,
        cache_logger_on_first_use=False,
    )


class _Lines:
    """The far end of the logger: one `write` per line."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def stream(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stderr

    @property
    def has_colors(self) -> bool:
        """True if a person with a colour terminal reads this (https://no-color.org)."""
        return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and self.stream.isatty()

    def msg(self, line: str) -> None:
        stderr.write(f"{line}\n", self.stream)

    debug = info = warning = error = critical = msg


def _done_about(event: Event, record: Record) -> _Done:
    """Orders of the rule of an Event on that step, by action, and the known state of the weights after it."""
    observed_only = OBSERVED_ONLY in record.snapshot.scalars
    if event.kind == "resolved":
        return _Done(observed_only=observed_only)
    orders = (order for order in record.decision.orders if order.rule == event.rule)
    looked = None if record.checkpoint is None else record.checkpoint.weights_step
    # Fit after the step before this one, which was kept from the optimizer.
    untouched = record.decision.skip and looked is not None and looked >= event.step - 1
    return _Done(
        tuple(sorted(orders, key=lambda order: order.action)),
        "untouched, finite before" if untouched else "",
        observed_only,
    )


def _fields(event: Event, done: _Done) -> Iterator[tuple[str, Any]]:
    yield "rule", event.rule
    yield "severity", event.severity
    yield "step", event.step
    if done.observed_only:
        yield "optimizer", NO_OPTIMIZER
    elif event.optimizer:
        yield "optimizer", event.optimizer
    if event.sites:
        yield "param", event.sites[0]
    elif event.first_cause:
        yield "first_cause", event.first_cause
    yield from _numbers(event)
    if event.count > 1:
        yield "params", event.count
        yield "first_cause", event.first_cause
    if event.kind != "resolved":
        yield from _actions(event, done.orders)
        yield from _done(done.orders)
        if done.weights:
            yield "weights", done.weights
        yield from ((key, text) for key, text in _texts(event) if text)
    if event.incident:  # a rule that acts before it fires has none
        yield "incident", event.incident


def _numbers(event: Event) -> Iterator[tuple[str, float]]:
    """The value, the score where it is another number, and what the score was compared with."""
    if event.kind == "failed":  # an action's, which has none
        return
    yield "value", event.value
    if event.score != event.value and not (math.isnan(event.score) and math.isnan(event.value)):
        yield "score", event.score
    yield "threshold", event.threshold


def _actions(event: Event, orders: tuple[Order, ...]) -> Iterator[tuple[str, str]]:
    """The actions of a rule, without those that a value which is not finite has left nothing to do for."""
    ordered = {order.action for order in orders}
    kind = find_detector(event.detector)
    finite = math.isfinite(event.value) and not (
        kind is not None and kind.finiteness
    )  # whose value is a count
    left = [] if finite else [one for one in event.actions if one in CLIPS - ordered]
    named = [_LATER.get(action) or action for action in event.actions if action not in left]
    if named:
        yield "actions", ",".join(named)
    if left:
        yield "not_done", f"{','.join(left)} (what is not finite cannot be clipped)"


def _done(orders: tuple[Order, ...]) -> Iterator[tuple[str, Any]]:
    """Log fields of actions: those that shadow mode held back, and the smallest factor."""
    shadow = [order.action for order in orders if order.shadow]
    if shadow:
        yield "would", ",".join(shadow)
    factors = [order for order in orders if order.coefficient is not None]
    if factors:
        least = min(factors, key=lambda order: order.coefficient or 0.0)
        yield "coefficient", least.coefficient
        yield "norm_before", least.before
        yield "norm_after", least.after


def _texts(event: Event) -> Iterator[tuple[str, str]]:
    yield "summary", event.summary
    yield "description", event.description


def _harmless(logger: Any, method: str, fields: MutableMapping[str, Any]) -> Mapping[str, Any]:
    for key, value in fields.items():
        if isinstance(value, str):
            fields[key] = one_line(value, LONGEST_TEXT) if key in _PROSE else printable(value)
    return fields


def _console(writer: _Lines) -> Callable[[Any, str, MutableMapping[str, Any]], str]:
    from structlog.dev import ConsoleRenderer, plain_traceback

    def renderer(colors: bool) -> ConsoleRenderer:
        return ConsoleRenderer(
            colors=colors, sort_keys=False, pad_event_to=0, exception_formatter=plain_traceback
        )

    plain, coloured = renderer(False), renderer(True)

    def render(logger: Any, method: str, fields: MutableMapping[str, Any]) -> str:
        return str((coloured if writer.has_colors else plain)(logger, method, fields))

    return render


def _as_json(logger: Any, method: str, fields: MutableMapping[str, Any]) -> str:
    """One JSON object; non-finite numbers as the strings "NaN", "Infinity", "-Infinity", which JSON lacks."""
    return json.dumps({key: _json_value(value) for key, value in fields.items()}, allow_nan=False)


def _json_value(value: Any) -> Any:
    if isinstance(value, float):
        return json_number(value)
    return value if isinstance(value, (str, int, bool, type(None))) else printable(str(value))
