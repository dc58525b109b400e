"""`gradwatch backtest RUN…`: what other rules would have said of runs that are recorded."""

from __future__ import annotations

import argparse
import collections
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from gradwatch.cli.run_argument import add_directory, add_jobs, add_rank, add_run, chosen_runs
from gradwatch.cli.terminal import Counter, paint, table
from gradwatch.runtime.printable import plural, printable

if TYPE_CHECKING:
    from gradwatch.backtest.outcome import PlacedEvent, RunBacktest
    from gradwatch.backtest.rule_coverage import Extent

DESCRIPTION = """Judge recorded runs by the rules of a file, with the engine that judges them live: what fires when and
where, how that differs from other rules (--against) or from what fired in the run, and what the actions would have
been. Nothing is guessed: rules on what was not recorded are named.

RUN is a run's folder or one of its journal files; without one, the newest run of --dir. With --healthy each alarm
(severity warning or critical) is a false one. Exit 1 where a rule could not be judged on all that was recorded."""
MOST_SHOWN = 10
"""Lines of each list; --json has all."""
LONGEST_REASON = 200
UNKNOWN = (
    "What the training would have become after the first of these cannot be known: the recording goes on as it was "
    "made."
)
LIVE = "the run"
_SAMPLES = re.compile(r"(\d[\d,]*) of(?= [\d,]+ samples)")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch backtest` to argparse."""
    parser = commands.add_parser(
        "backtest",
        help="what other rules would have said of recorded runs, and done",
        description=DESCRIPTION,
    )
    add_run(parser, "runs", nargs="*")
    parser.add_argument("--rules", required=True, metavar="FILE", help="rule file, or a shipped pack by name")
    parser.add_argument(
        "--against", metavar="FILE", help="rules to compare with (default: what fired in the run)"
    )
    parser.add_argument(
        "--healthy", action="store_true", help="nothing went wrong in these runs: each alarm is a false one"
    )
    add_directory(parser)
    add_rank(parser, "judge the journal")
    add_jobs(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with every event")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Judge, print; 1 where a rule could not be judged on all that was recorded."""
    from gradwatch.backtest.many_runs import backtest_runs
    from gradwatch.rules.files import load_rules

    runs = chosen_runs(arguments)
    rules = load_rules(arguments.rules)
    against = None if arguments.against is None else load_rules(arguments.against)
    with closing(Counter("{:,} steps judged")) as count:
        found = backtest_runs(runs, rules, against, arguments.rank, arguments.jobs, arguments.backend, count)
    if arguments.json:
        from gradwatch.backtest import json_document

        print(json_document.text(found, arguments.rules, arguments.against, arguments.healthy), end="")
    else:
        print("\n".join(shown(found, arguments.rules, arguments.against or LIVE, arguments.healthy)))
    return int(any(one.extent in ("part", "not recorded") for run in found for one in run.outcome.coverage))


def shown(runs: Sequence[RunBacktest], new: str, old: str, healthy: bool) -> Iterator[str]:
    """The backtest for a person."""
    new, old = Path(new).name, old if old == LIVE else Path(old).name
    yield from _heading(runs, new, old, healthy)
    yield from _fired(runs, new, old)
    yield from _differences(runs, new, old)
    yield from _actions(runs)
    yield from _coverage(runs)
    notes = [(one, note) for one in runs for note in one.notes]
    yield from (f"  note: {_of(one, runs)}{note}" for one, note in notes)


def _heading(runs: Sequence[RunBacktest], new: str, old: str, healthy: bool) -> Iterator[str]:
    from gradwatch.backtest.firings import alarms, per_thousand

    steps = sum(one.steps for one in runs)
    which = plural(len(runs), "run")
    if len(runs) == 1:
        another = " that have a journal (another: --rank N)" if len(runs[0].ranks) > 1 else ""
        which = f"{_with_rank(runs[0].folder, runs[0])}{another}"
    sides = (new, sum(alarms(one.outcome) for one in runs)), (old, sum(alarms(one.compared) for one in runs))
    rates = (
        f"{printable(name)} {count:,} ({per_thousand(count, steps):.2f} per 1,000 steps)"
        for name, count in sides
    )
    yield f"{which}: {steps:,} steps judged by {printable(new)}"
    yield f"  {'false alarms' if healthy else 'alarms (warning, critical)'}: {', '.join(rates)}"
    if len(runs) > 1:
        rows = [
            (_with_rank(one.run, one), f"{one.steps:,}", str(alarms(one.outcome)), str(alarms(one.compared)))
            for one in runs
        ]
        yield table(("run", "steps", printable(new), printable(old)), rows, indent="  ")


def _with_rank(name: str, one: RunBacktest) -> str:
    """The name of a run; with the rank whose journal is judged, where others have one."""
    several = len(one.ranks) > 1
    return printable(name) + (f", rank {one.rank} of {len(one.ranks):,}" if several else "")


def _fired(runs: Sequence[RunBacktest], new: str, old: str) -> Iterator[str]:
    from gradwatch.backtest.firings import by_rule

    rows = [
        (
            printable(one.rule),
            one.severity,
            str(one.new),
            str(one.old),
            f"step {one.first.event.step:,}",
            printable(", ".join(one.first.event.sites[:1]) or one.first.event.first_cause),
        )
        for one in by_rule(runs)
    ]
    if rows:
        yield table(("rule", "severity", printable(new), printable(old), "first", "where"), rows, indent="  ")
    else:
        yield "  no rule fires"
    yield from _quiet(runs, new, old)


def _quiet(runs: Sequence[RunBacktest], new: str, old: str) -> Iterator[str]:
    """The firings that no table has, since they raise no alarm; `audit` counts them, too."""
    from gradwatch.backtest.firings import quiet

    of_new = sum((quiet(one.outcome) for one in runs), collections.Counter[str]())
    of_old = sum((quiet(one.compared) for one in runs), collections.Counter[str]())
    sides = [(f"{new} and {old}", of_new)] if of_new == of_old else [(new, of_new), (old, of_old)]
    for name, counted in sides:
        if counted:
            rules = ", ".join(f"{printable(rule)} ×{count:,}" for rule, count in sorted(counted.items()))
            yield f"  no alarm, as part of an incident that another firing reports: {rules} ({printable(name)})"


def _differences(runs: Sequence[RunBacktest], new: str, old: str) -> Iterator[str]:
    from gradwatch.backtest.firings import differences, firings

    found = [(one, differences(one)) for one in runs]
    if all(each.same for _, each in found):
        yield f"  the same events as by {printable(old)}, byte for byte"
        return
    for name, of in ((new, "only_new"), (old, "only_old")):
        lines = [(one, placed) for one, each in found for placed in getattr(each, of)]
        if lines:
            yield f"  only by {printable(name)}:"
            yield from _listed([_event(one, placed, runs) for one, placed in lines])
    if not any(each.only_new or each.only_old for _, each in found):
        fires = any(map(firings, (side for one in runs for side in (one.outcome, one.compared))))
        same = "fires at the same steps as by" if fires else "nor does any by"
        yield f"  {same} {printable(old)}; details of the events differ (--json has both)"


def _event(one: RunBacktest, placed: PlacedEvent, runs: Sequence[RunBacktest]) -> str:
    event = placed.event
    process = f"process {placed.process}, " if placed.process else ""
    severity = paint(event.severity, "red" if event.severity == "critical" else "yellow")
    return (
        f"{_of(one, runs)}{process}step {event.step:,}: {printable(event.rule)} ({severity}): "
        f"{printable(event.summary, LONGEST_REASON)}"
    )


def _actions(runs: Sequence[RunBacktest]) -> Iterator[str]:
    from gradwatch.cli.audit import actions_table

    for one in runs:
        outcome = one.outcome
        if outcome.actions:
            yield f"  {_of(one, runs)}would have been done at the steps as they were recorded:"
            yield actions_table(outcome.actions, one.steps)
        if outcome.stop is not None:
            process, step = outcome.stop
            where = f" of process {process}" if process else ""
            yield f"  {_of(one, runs)}the training would have been stopped at step {step:,}{where}"
        if outcome.unknown:
            yield (
                f"  {_of(one, runs)}at {plural(outcome.unknown, 'step')} gradwatch changed the gradients of the run: "
                "what these rules would have made of them is not known"
            )
    on_elements = runs[0].outcome.on_elements
    if on_elements:
        yield f"  clip: {', '.join(on_elements)}: works on elements, which are not recorded: not known"
    if any(one.outcome.actions for one in runs):
        yield f"  {UNKNOWN}"


def _coverage(runs: Sequence[RunBacktest]) -> Iterator[str]:
    """The rules that were not judged on the whole of each run, by reason."""
    headings: dict[Extent, str] = {
        "not recorded": "not judged, for want of a recording",
        "part": "judged in part",
        "no data": "without data in the run",
        "no site": "about nothing that this model has",
    }
    for extent, heading in headings.items():
        reasons = _reasons(runs, extent)
        if reasons:
            yield f"  {paint(heading, 'yellow') if extent in ('part', 'not recorded') else heading}:"
            yield from _listed([f"{', '.join(rules)}: {why}" for why, rules in reasons.items()])


def _reasons(runs: Sequence[RunBacktest], extent: Extent) -> dict[str, list[str]]:
    """The rules judged to this extent, by reason; those without data only where they had none in any run."""
    found: dict[tuple[str, str], list[int | None]] = {}
    judged = {
        one.rule for run in runs for one in run.outcome.coverage if one.extent not in ("no data", "no site")
    }
    for run in runs:
        for one in run.outcome.coverage:
            hidden = extent in ("no data", "no site") and one.rule in judged
            if one.extent != extent or hidden or (one.optional and extent == "no site"):
                continue
            part = f" (at {one.judged:,} of {one.steps:,} steps)" if 0 < one.judged < one.steps else ""
            # A warm-up is over after as many samples in each run, and each run has another number of them.
            samples = _SAMPLES.search(one.why)
            why = _SAMPLES.sub("{} of", one.why) if samples else one.why.replace("{", "{{").replace("}", "}}")
            key = printable(one.rule), f"{why}{part}"
            found.setdefault(key, []).append(int(samples[1].replace(",", "")) if samples else None)
    reasons: dict[str, list[str]] = {}
    for (rule, why), samples_of in found.items():
        where = f" (in {len(samples_of):,} of {len(runs):,} runs)" if len(samples_of) < len(runs) else ""
        reasons.setdefault(f"{why.format(_range(samples_of))}{where}", []).append(rule)
    return reasons


def _range(samples: Sequence[int | None]) -> str:
    """`94`, or `94 to 300`."""
    numbers = sorted({one for one in samples if one is not None})
    return " to ".join(f"{one:,}" for one in dict.fromkeys((numbers[0], numbers[-1]))) if numbers else ""


def _listed(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"    {line}" for line in lines[:MOST_SHOWN])
    if len(lines) > MOST_SHOWN:
        yield f"    … and {len(lines) - MOST_SHOWN:,} more (--json has all)"


def _of(one: RunBacktest, runs: Sequence[RunBacktest]) -> str:
    return f"{printable(one.run)}: " if len(runs) > 1 else ""
