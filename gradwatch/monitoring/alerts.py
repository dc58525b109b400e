"""Alerts: one for every rule of a rule file, and those about the run and gradwatch itself.

NaN hides in PromQL (`NaN > 100` and `NaN < 100` are both empty), so alerts look at counters and at
`gradwatch_rule_active`, never at a norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Literal

from gradwatch.monitoring.scrape_interval import Pace
from gradwatch.records.event import Severity
from gradwatch.rules.rule_set import Rule, RuleSet
from gradwatch.sinks.alert_names import FALLBACK, alert_name

JOB = "gradwatch"
SERVE_JOB = "gradwatch-serve"
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Alert:
    """An alerting rule of Prometheus, less its links; `for_` "" = at once. `expr` may have several lines.

    `of_run`: its series have the label `run_id`.
    """

    name: str
    severity: Severity | Literal["{{ $labels.severity }}"]
    expr: str
    summary: str
    description: str
    for_: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    of_run: bool = True


def rule_alerts(ruleset: RuleSet, pace: Pace) -> Iterator[Alert]:
    """An alert for every enabled rule, in file order, under the name of its kind of trouble.

    It fires while the rule does, and for `pace.window` after a firing too short to be scraped. Rules wait by
    themselves (`for`, `keep_firing_for`, in steps): Prometheus adds nothing to that.
    """
    for rule in ruleset.rules:
        if rule.enabled:
            yield Alert(
                name=alert_name(rule.kind, str(getattr(rule.detect, "of", ""))),
                severity=rule.severity,
                expr=_firing(rule.id, pace),
                summary=_summary(rule),
                description=_description(rule),
                labels={**_labels(rule), "rule": rule.id, "kind": rule.kind},
            )


def other_alert(ruleset: RuleSet, pace: Pace) -> Alert:
    """Alert for rules of runs that have another rule file: one Prometheus watches many runs, and none may be silent.

    Severity and kind are those that the run itself says.
    """
    # Ids are of letters, digits, "_", "-" and ".".
    known = "|".join(rule.id.replace(".", r"\\.") for rule in ruleset.rules if rule.enabled)
    total = "gradwatch_rule_firings_total"
    expr = dedent(f"""\
        (
          {total} and ignoring (kind, severity) gradwatch_rule_active == 1
          or increase({total}[{pace.window}]) > 0
          or {total}
            > {_known_of_process(total, ("rule",), pace.window)}
        )
        unless on (rule) {total}{{rule=~"{known}"}}
        """)
    return Alert(
        FALLBACK,
        "{{ $labels.severity }}",
        expr,
        "A rule that these alerts were not made from is firing.",
        "Rule {{ $labels.rule }} (kind {{ $labels.kind }}) fired on rank {{ $labels.rank }} of run "
        "{{ $labels.run_id }}, which has another rule file. The journal and the log of the run name the parameters, "
        "the step and the values.",
    )


def _firing(rule: str, pace: Pace) -> str:
    active = f'gradwatch_rule_active{{rule="{rule}"}}'
    total = f'gradwatch_rule_firings_total{{rule="{rule}"}}'
    return dedent(f"""\
        {active} == 1
        or sum without (kind, severity) (increase({total}[{pace.window}])) > 0
        or sum without (kind, severity) ({total})
          > {_known_of_process(total, (), pace.window)}
        """)


def _known_of_process(total: str, also: tuple[str, ...], window: str) -> str:
    """The right side of `total > …`: true for `window` where a counter is above 0, and news, when first seen.

    `increase` needs two samples: what happened before the first scrape it never sees. But a series that begins is
    not yet news. A run goes on under other labels when `gradwatch serve` or a Pushgateway shows its last counters, and
    when a second optimizer makes the label `optimizer` appear: so it is compared with the most that the run had under
    any labels. An hour back, as long as serve shows a run that has ended: its restarts are no news either. All ranks
    of a run have the same news; not so a second process of a rank, which is another training.
    """
    by = ", ".join(("run_id", "process", *also))
    known = f"max by ({by}) (last_over_time({total}[1h] offset {window}))"
    return f"on ({by}) group_left () ({known} or 0 * max by ({by}) ({total}))"


def _summary(rule: Rule) -> str:
    """The rule's own summary where it says something without the numbers of a step."""
    text = _known(rule, rule.annotations.get("summary", ""))
    return text if text and not _PLACEHOLDER.search(text) else f"Rule {rule.id} is firing."


def _description(rule: Rule) -> str:
    actions = ", ".join(action.name for action in rule.do)
    does = {True: f" In its shadow mode it would: {actions}.", False: f" It acts: {actions}."}
    return (
        f"Rule {rule.id} (kind {rule.kind}) fired on rank {{{{ $labels.rank }}}} of run {{{{ $labels.run_id }}}}."
        f"{does[rule.mode == 'shadow'] if actions else ''} The journal and the log of the run name the"
        " parameters, the step and the values."
    )


def _known(rule: Rule, text: str) -> str:
    """The template with what is known before any step filled in."""
    facts = {"rule": rule.id, "kind": rule.kind}
    return _PLACEHOLDER.sub(lambda match: facts.get(match.group(1), match.group(0)), text)


def _labels(rule: Rule) -> dict[str, str]:
    """The labels of the rule file as they stand: Prometheus would take two opening braces for a template."""
    return {name: text.replace("{{", '{{ "{{" }}') for name, text in rule.labels.items()}


def run_alerts(pace: Pace) -> tuple[Alert, ...]:
    """Alerts on what happens to a run, whatever its rules are."""
    return (
        Alert(
            "GradwatchRunStalled",
            "critical",
            # Not per optimizer: a GAN may be done with one of two. The first step may take long (compilation, data),
            # but a job that hangs before it has no last step to be late after.
            "time() - max without (optimizer) (gradwatch_last_step_timestamp_seconds)\n"
            "> max without (optimizer) (gradwatch_stall_threshold_seconds)\n"
            "or (\n"
            "  time() - gradwatch_run_start_timestamp_seconds\n"
            "  > 3 * max without (optimizer) (gradwatch_stall_threshold_seconds)\n"
            "  unless max without (optimizer) (gradwatch_last_step_timestamp_seconds)\n"
            ")\n",
            "Training has stopped stepping.",
            "No optimizer step for {{ $value | humanizeDuration }} on rank {{ $labels.rank }} of run "
            "{{ $labels.run_id }}, and the process still answers.",
        ),
        Alert(
            "GradwatchTargetDown",
            "warning",
            f'up{{job="{JOB}"}} == 0',
            "A training process no longer answers.",
            "Rank {{ $labels.rank }} of run {{ $labels.run_id }} did not end in order (a clean exit takes it off "
            "the list of targets): it was killed, its machine is gone, or it is cut off.",
            for_=pace.absence,
        ),
        Alert(
            "GradwatchClippingPersistent",
            "warning",
            "rate(gradwatch_clipped_steps_total[5m]) / rate(gradwatch_steps_total[5m]) > 0.9",
            "Nearly every step is clipped.",
            "{{ $value | humanizePercentage }} of the steps of run {{ $labels.run_id }} (rank {{ $labels.rank }}) "
            "are clipped: the bound, not the gradient, decides the size of updates.",
            for_="30m",
        ),
        Alert(
            "GradwatchStepsSkipped",
            "warning",
            "rate(gradwatch_skipped_steps_total[5m]) / rate(gradwatch_steps_total[5m]) > 0.05",
            "More than one step in twenty is being skipped.",
            "gradwatch skips {{ $value | humanizePercentage }} of the steps of run {{ $labels.run_id }} (rank "
            "{{ $labels.rank }}).",
            for_="5m",
        ),
    )


def health_alerts(pace: Pace) -> tuple[Alert, ...]:
    """Alerts on gradwatch itself: a monitor that has gone blind is worse than none."""
    return (*_measuring_alerts(pace), *_fault_alerts(), *_reporting_alerts(pace))


def _measuring_alerts(pace: Pace) -> tuple[Alert, ...]:
    """Alerts on coverage and overhead."""
    return (
        Alert(
            "GradwatchBlind",
            "critical",
            "gradwatch_coverage_ratio < 1",
            "Some parameters are not watched.",
            "Only {{ $value | humanizePercentage }} of the parameters of run {{ $labels.run_id }} (rank "
            "{{ $labels.rank }}) can be measured; the log names the others.",
            for_=pace.patience,
        ),
        Alert(
            "GradwatchOverheadHigh",
            "warning",
            "gradwatch_overhead_ratio > 0.05",
            "gradwatch takes more than 5 % of the time of a step.",
            "gradwatch takes {{ $value | humanizePercentage }} of the time of run {{ $labels.run_id }} (rank "
            "{{ $labels.rank }}).",
            for_="10m",
        ),
    )


def _fault_alerts() -> tuple[Alert, ...]:
    """Alerts on internal errors."""
    errors = "gradwatch_internal_errors_total"
    # Most parts have no counter before their first fault.
    first = f"{errors} > " + _known_of_process(errors, ("component",), "15m")
    return (
        Alert(
            "GradwatchInternalErrors",
            "warning",
            f"sum without (component) (increase({errors}[15m])) > 0\n"
            f"or sum without (component) ({first}) > 0\n"
            "or count without (component) (gradwatch_component_up == 0) > 0\n",
            "A component of gradwatch fails; training is not affected.",
            "gradwatch had internal errors in run {{ $labels.run_id }} (rank {{ $labels.rank }}); training was "
            "not affected, and the log names the component. Its output (journal, metrics, a detector) may be "
            "missing.",
        ),
    )


def _reporting_alerts(pace: Pace) -> tuple[Alert, ...]:
    """Alerts on what does not reach Prometheus."""
    return (
        Alert(
            "GradwatchSeriesTruncated",
            "info",
            "gradwatch_series_dropped > 0",
            "Not every parameter that should have a series has one.",
            "{{ $value }} parameters of run {{ $labels.run_id }} (rank {{ $labels.rank }}) have no series of their "
            "own; raise max_series of the prometheus sink, or ask for fewer.",
            for_=pace.patience,
        ),
        Alert(
            "GradwatchServeDown",
            "warning",
            # Up, but stuck on a file system that hangs: as good as away.
            f'up{{job="{SERVE_JOB}"}} == 0\n'
            f'or time() - gradwatch_serve_last_scan_timestamp_seconds{{job="{SERVE_JOB}"}} > 300\n',
            "gradwatch serve does not answer, or no longer scans the run folders.",
            "New runs are not found, and the last counters of runs that end are not taken, while "
            "{{ $labels.instance }} is away.",
            for_=pace.patience,
            of_run=False,
        ),
    )


def alerts(ruleset: RuleSet, pace: Pace) -> tuple[Alert, ...]:
    """Everything there is to alert on."""
    return (
        *rule_alerts(ruleset, pace),
        other_alert(ruleset, pace),
        *run_alerts(pace),
        *health_alerts(pace),
    )
