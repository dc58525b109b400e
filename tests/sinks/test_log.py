"""The log: one line a transition, never a flood, never an escape sequence, nobody else's configuration."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.account.account import Account, Taken, Watched
from gradwatch.errors import GradwatchError
from gradwatch.records.decision import Decision, Order
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.runtime import process_identity
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.log import LogFormat, LogSink
from tests.support.alphabet import UNICODE
from tests.support.sink_records import make_event, make_record, make_run, make_sites

SITES = make_sites()
NASTY = "evil\x1b[31m\r\n\0\u202e\ud800\x9b2J<script>../"


class Clock:
    """A monotonic clock that moves when told to."""

    now = 500.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A LogSink into memory."""

    def __init__(self, format: LogFormat = "json", rank: int = 0) -> None:
        self.stream, self.clock = io.StringIO(), Clock()
        self.sink = LogSink(format, self.stream, clock=self.clock)
        self.sink.open(make_run(Path("unused"), rank=rank), Health())

    def write(self, *events: Event, after: float = 0.0) -> None:
        self.clock.now += after
        self.sink.write(make_record(SITES, events=events))

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    @property
    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def firing(step: int = 7, **fields: Any) -> Event:
    return make_event(
        "firing",
        step=step,
        sites=("layers.3.weight", "layers.1.weight"),
        count=2,
        value=math.nan,
        score=1.0,
        actions=("skip_step",),
        **{
            "first_cause": "layers.3.weight",
            "summary": "Non-finite gradients.",
            "description": "2 parameters.",
            **fields,
        },
    )


def test_a_transition_is_one_line_with_everything_needed() -> None:
    """Rule, step, where, how much, what was done; NaN as a string, since JSON has none."""
    log = Log()
    log.write(firing())
    assert log.entries == [
        {
            "event": "gradwatch firing",
            "level": "critical",
            "rule": "non-finite",
            "severity": "critical",
            "step": 7,
            "param": "layers.3.weight",
            "value": "NaN",
            "score": 1.0,
            "threshold": 0.0,
            "params": 2,
            "first_cause": "layers.3.weight",
            "actions": "skip_step",
            "summary": "Non-finite gradients.",
            "description": "2 parameters.",
            "incident": "incident-1",
        }
    ]


@pytest.mark.parametrize(
    ("severity", "level"), [("info", "info"), ("warning", "warning"), ("critical", "warning")]
)
def test_the_cause_of_what_is_only_information_is_no_warning(severity: str, level: str) -> None:
    """Its line has the level of the rule, and never more than a warning: the rule's own line is the alarm."""
    log = Log()
    event = make_event("firing", "exploding", step=7, severity=severity)
    finding = Finding("exploding", "norms", step=7, rule="exploding")
    log.sink.write(dataclasses.replace(make_record(SITES, step=7, events=(event,)), findings=(finding,)))
    assert [entry["level"] for entry in log.entries if entry["event"] == "gradwatch cause"] == [level]


def test_the_console_line_says_the_same() -> None:
    """For a person: no braces, no colour where no terminal is."""
    log = Log("console")
    log.write(firing())
    (line,) = log.lines
    for part in (
        "critical",
        "gradwatch firing",
        "rule=non-finite",
        "step=7",
        "layers.3.weight",
        "Non-finite gradients.",
    ):
        assert part in line
    assert "\x1b" not in line


def test_a_clip_is_told_with_its_numbers_and_a_shadow_with_what_it_would_do() -> None:
    """Coefficient and norms of the smallest factor; a factor that starts a step later says so; a failure by name."""
    log = Log()
    acted = make_event("firing", "exploding", actions=("clip", "rescale"))
    orders = frozenset(
        {
            Order("exploding", "clip", False, "layers.3.weight", 1, 50.0, 5.0, 0.1),
            Order("exploding", "rescale", False, "layers.1.weight", 1, 2.0, 1.0, 0.5),
            Order("other", "clip", True, "", 4, 8.0, 2.0, 0.25),
            Order("other", "stop", True),
        }
    )
    events = (acted, make_event("firing", "other"), make_event("failed", actions=("clip",)))
    log.sink.write(make_record(SITES, events=events, decision=Decision(orders=orders)))
    clip, shadow, failed = log.entries
    assert clip["actions"] == "clip,rescale (from the next step on)"
    assert (clip["coefficient"], clip["norm_before"], clip["norm_after"]) == (0.1, 50.0, 5.0)
    assert (shadow["would"], shadow["coefficient"]) == ("clip,stop", 0.25)
    assert "actions" not in shadow
    assert failed["event"] == "gradwatch action failed"


def test_levels() -> None:
    """The severity of the rule; the end of an incident is information."""
    log = Log()
    log.write(firing(), make_event("firing", "exploding"), make_event("firing", "other"))
    log.write(make_event("resolved"), after=60)
    assert [entry["level"] for entry in log.entries] == ["critical", "warning", "info", "info"]


def test_pending_is_no_news() -> None:
    """Prometheus does not notify of it either, and the line for the firing must not be used up."""
    log = Log()
    log.write(make_event("pending"))
    log.write(firing())
    assert [entry["event"] for entry in log.entries] == ["gradwatch firing"]


def test_a_rule_that_acts_while_it_waits_says_so_once_and_says_that_it_fires_all_the_same() -> None:
    """Incidents have their first line; a rule in shadow mode does not act, and is news when it fires."""
    log = Log()
    acting = Decision(orders=frozenset({Order("exploding", "skip_step"), Order("shadow", "skip_step", True)}))
    for step in range(3):
        events = tuple(
            dataclasses.replace(make_event("pending", rule, step=step, actions=("skip_step",)), incident="")
            for rule in ("exploding", "shadow")
        )
        log.sink.write(make_record(SITES, events=events, decision=acting))
    log.write(make_event("firing", "exploding"), make_event("firing", "shadow"))
    assert [(entry["event"], entry["rule"]) for entry in log.entries] == [
        ("gradwatch acting before it fires", "exploding"),
        ("gradwatch firing", "exploding"),
        ("gradwatch firing", "shadow"),
    ]
    assert ["incident" in entry for entry in log.entries] == [False, True, True]


def test_a_clip_of_what_is_not_finite_is_not_said_to_be_done() -> None:
    """The value of a rule on NaN is a count, which is finite."""
    log = Log()
    log.write(make_event("firing", value=4.0, actions=("clip", "skip_step")))
    (entry,) = log.entries
    assert (entry["actions"], entry["not_done"].split()[0]) == ("skip_step", "clip")


def test_at_most_one_line_per_rule_and_minute_and_the_rest_is_counted() -> None:
    """A rule that flaps for ten minutes writes eleven lines; nothing is lost, and the last state is told."""
    log = Log()
    for step in range(600):
        log.write(make_event("resolved" if step % 2 else "firing", step=step), after=1)
    log.sink.close()
    entries = log.entries
    assert len(entries) == 11
    assert sum(1 + entry.get("suppressed", 0) for entry in entries) == 600
    assert entries[-1]["step"] == 599
    assert entries[-1]["event"] == "gradwatch resolved"


def test_rules_do_not_silence_each_other() -> None:
    """The limit is per rule and optimizer."""
    log = Log()
    log.write(firing(), make_event(rule="exploding"))
    assert [entry["rule"] for entry in log.entries] == ["non-finite", "exploding"]


def test_optimizers_do_not_silence_each_other() -> None:
    """A rule that fires of two optimizers has a line for each; of a thousand not a thousand."""
    log = Log()
    for optimizer in (0, 1, 0, 1):
        log.write(firing(optimizer=optimizer))
    assert [entry.get("optimizer", 0) for entry in log.entries] == [0, 1]
    for optimizer in range(1000):
        log.write(firing(optimizer=optimizer))
    assert len(log.lines) == 9


def test_the_last_state_is_told_a_minute_later_without_another_event() -> None:
    """Fired and resolved within a second: the reader must not be left with "firing"."""
    log = Log()
    log.write(firing())
    log.write(make_event("resolved", step=8), after=1)
    log.write(after=58.9)
    assert len(log.entries) == 1
    log.write(after=0.1)
    log.write(after=200)
    assert [(entry["event"], entry.get("suppressed")) for entry in log.entries[1:]] == [
        ("gradwatch resolved", None)
    ]


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.floats(0, 90), st.booleans()), max_size=60))
def test_the_limit_holds_and_the_count_is_exact(steps: list[tuple[str, float, bool]]) -> None:
    """Any pattern of events: lines of a rule are a minute apart, and no transition is lost."""
    log, written = Log(), []
    for step, (rule, pause, quiet) in enumerate(steps):
        before = len(log.lines)
        log.write(*([] if quiet else [make_event(rule=rule, step=step)]), after=pause)
        written += [(entry["rule"], log.clock.now) for entry in log.entries[before:]]
    log.sink.close()
    for rule in "abc":
        times = [at for name, at in written if name == rule]
        assert all(later - earlier >= 59.999 for earlier, later in itertools.pairwise(times))
        counted = sum(1 + entry.get("suppressed", 0) for entry in log.entries if entry["rule"] == rule)
        assert counted == sum(name == rule and not quiet for name, _, quiet in steps)


def test_a_flood_is_a_trickle() -> None:
    """20,000 incidents in one second (P22, 2 % of the number): one line now, one at the end."""
    log = Log()
    for step in range(20_000):
        log.write(make_event(step=step))
    log.sink.close()
    assert len(log.lines) == 2
    assert log.entries[-1]["suppressed"] == 19_998


@pytest.mark.soak
def test_a_flood_in_full() -> None:
    """P22 in full: 10⁶ incidents over ten minutes."""
    log = Log()
    for step in range(1_000_000):
        log.write(make_event(step=step), after=600 / 1_000_000)
    assert len(log.lines) <= 11


@pytest.mark.parametrize("format", ["console", "json"])
@given(name=st.text(UNICODE, max_size=200) | st.sampled_from([NASTY, NASTY * 5000, "\n" * 100_000]))
def test_any_name_is_one_harmless_line(format: LogFormat, name: str) -> None:
    """Control characters, escape sequences, surrogates, 100 kB names: one printable line of some length."""
    log = Log(format)
    log.write(
        firing(summary=name, description=name, first_cause=name),
        make_event(rule=name, sites=(name,), value=1.0),
    )
    assert len(log.lines) == 2
    for line in log.stream.getvalue().split("\n")[:-1]:
        assert line.isprintable()
        assert len(line) < 6000
        line.encode()


def test_a_rank_without_a_process_group_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that trains apart has nobody else to speak for it, whatever number its launcher gave it."""
    monkeypatch.setattr(process_identity, "_group_rank", [None])
    log = Log(rank=3)
    log.write(firing())
    assert len(log.lines) == 1


def test_only_rank_0_of_a_group_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks do not say everything eight times, nor after their process group was destroyed."""
    monkeypatch.setattr(process_identity, "_group_rank", [3])
    log = Log()  # opened before the group was made, where no launcher had given it a number
    log.write(firing())
    log.sink.internal_error("capture", ValueError())
    log.sink.close()
    assert log.lines == []


def test_the_account_comes_last() -> None:
    """What was kept back about a rule is logged before the account of the run, and once."""
    log = Log()
    log.write(firing())
    log.write(firing(step=8), after=1.0)
    log.sink.conclude(Account(Taken(steps=2), Watched(steps=2)))
    log.sink.close()
    assert [entry["event"] for entry in log.entries] == [
        "gradwatch firing",
        "gradwatch firing",
        "gradwatch account",
    ]


def test_an_internal_error_is_one_line() -> None:
    """Whatever its message holds."""
    log = Log()
    log.sink.internal_error("capture", ValueError(NASTY))
    (entry,) = log.entries
    assert entry["component"] == "capture"
    assert entry["error"].startswith("ValueError: evil\\x1b")


def test_no_password_is_logged() -> None:
    """Of a URL in the message of an error, such as a tracker's."""
    log = Log()
    log.sink.internal_error("mlflow", ValueError("API request to http://me:hunter@host/api failed"))
    log.sink.internal_error("mlflow", GradwatchError("cannot reach http://me:hunter@host"))
    assert [entry.get("error", entry.get("notice")) for entry in log.entries] == [
        "ValueError: API request to http://*********@host/api failed",
        "cannot reach http://*********@host",
    ]


def test_a_notice_is_no_error() -> None:
    """What is said of the training, and is no fault of gradwatch's, stands in a field of its own."""
    log = Log()
    log.sink.internal_error("capture", GradwatchError("a loop without an optimizer"))
    (entry,) = log.entries
    assert entry["event"] == "gradwatch notice"
    assert entry["notice"] == "a loop without an optimizer"
    assert "error" not in entry


@pytest.fixture
def terminal() -> Iterator[Any]:
    """A stream that is a terminal."""
    main, side = os.openpty()
    with os.fdopen(side, "w") as stream:
        yield stream
    os.close(main)


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colours_only_where_wanted(
    environment: dict[str, str], coloured: bool, terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal gets colours unless NO_COLOR is set to something; https://no-color.org."""
    for key in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    kept: list[str] = []
    terminal_write = terminal.write
    sink = LogSink("console", terminal)
    terminal.write = lambda text: kept.append(text) or terminal_write(text)
    sink.write(make_record(SITES, events=(firing(),)))
    assert ("\x1b[" in kept[0]) == coloured


def test_standard_error_is_looked_up_when_writing(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever redirects it later, as pytest does here, gets the lines; standard output is not touched."""
    LogSink().write(make_record(SITES, events=(firing(),)))
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_stream_that_speaks_ascii_only() -> None:
    """A name in Greek does not fail where the locale is C."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", write_through=True)
    LogSink("console", stream).write(make_record(SITES, events=(firing(summary="норма градиента × ∞"),)))
    assert b"\\u0433" in raw.getvalue()


def test_nobody_elses_logging_is_touched_or_heeded(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither structlog nor logging is configured by us, and a hostile configuration changes nothing."""
    root, handlers = logging.getLogger().level, list(logging.getLogger().handlers)
    try:
        structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(RuntimeError("theirs"))])
        before = structlog.get_config()
        log = Log()
        log.write(firing())
        assert len(log.entries) == 1
        assert structlog.get_config() == before
    finally:
        structlog.reset_defaults()
    assert not structlog.is_configured()
    assert (logging.getLogger().level, logging.getLogger().handlers) == (root, handlers)
    assert capsys.readouterr() == ("", "")


def test_the_first_line_draws_no_random_number() -> None:
    """structlog is imported for it, which draws from Python's generator; the training goes on as without."""
    check = (
        "import random, sys, warnings\n"
        "from gradwatch.sinks.log import LogSink\n"
        "sink = LogSink()\n"
        "assert 'structlog' not in sys.modules\n"
        "before = random.getstate(), list(warnings.filters)\n"
        "sink.internal_error('part', ValueError())\n"
        "assert (random.getstate(), list(warnings.filters)) == before\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "gradwatch internal error" in done.stderr


def test_what_another_rule_reports_is_no_second_line() -> None:
    """The beginning and the end of a rule that is part of another's incident are in the journal, not in the log."""
    log = Log()
    log.write(
        make_event("firing", "total"),
        dataclasses.replace(make_event("firing", "each"), inhibited=True, notify=False),
        dataclasses.replace(make_event("resolved", "each"), inhibited=True),
    )
    assert [json.loads(line)["rule"] for line in log.lines] == ["total"]


def test_a_loop_whose_baselines_begin_anew_at_every_step_is_no_flood() -> None:
    """Five lines a minute of each optimizer, the last of which says where the others are."""
    log = Log()
    for step in range(20):
        for optimizer in (0, 1):
            log.write(make_event("rebaselined", step=step, optimizer=optimizer, summary=f"for reason {step}"))
    first = [entry for entry in log.entries if "optimizer" not in entry]
    assert [entry["step"] for entry in first] == [0, 1, 2, 3, 4]
    assert ["note" in entry for entry in first] == [False] * 4 + [True]
    assert len(log.entries) == 10
    log.write(make_event("rebaselined", step=20, summary="later"), after=60.0)
    assert log.entries[-1]["reason"] == "later"
