"""The newest run as `gradwatch doctor` shows it: its account if it has ended, its counters while it runs."""

from __future__ import annotations

import math
import platform
import urllib.request
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gradwatch.account import Account, Taken, Watched, gaps, lines, merged, total
from gradwatch.account.account_line import PREFIX
from gradwatch.cli.run_argument import newest
from gradwatch.errors import GradwatchError
from gradwatch.journal.audit import Audit, read
from gradwatch.journal.rank_journals import rank_journals
from gradwatch.runtime.printable import plural
from gradwatch.runtime.process_identity import is_running
from gradwatch.serve.process_discovery import EndpointFile, read_endpoint
from gradwatch.sinks.prometheus.metric_values import NO_OPTIMIZER

_LOOPBACK = ("127.0.0.1", "::1")
_LARGEST = 16 << 20
_SECONDS = 2.0


def newest_account(directory: Path) -> tuple[str, list[str], bool] | None:
    """(the run's name, its summary, whether all was seen); None where there is no run.

    A run that has not ended is asked at its endpoint, if that is on this machine.
    """
    try:
        where = newest(directory)
        audit = Audit()
        rank, own, _ = rank_journals(where)
        for journal in own:
            for _ in read(journal, audit):
                continue
    except GradwatchError:
        return None
    accounts = audit.accounts()
    account = accounts[-1] if accounts else None  # none is written yet, or it is of an earlier version
    running = account_of_endpoint(where, rank) if account is None or account.running else None
    if running is None:
        if account is None:
            return where.name, [f"{plural(audit.steps, 'step')} recorded, and no summary of the run"], False
        return where.name, _plain(lines(account)), not (gaps(account) or account.unended)
    taken = running.taken
    if not (taken.steps or taken.rejected or running.watched.unowned):  # what will come of it is not known
        return where.name, [f"running: no optimizer step yet, {plural(taken.backwards, 'backward')}"], False
    return where.name, ["running: " + line for line in _plain(lines(running))], not gaps(running)


def account_of_endpoint(where: Path, rank: int) -> Account | None:
    """Account from the endpoints of a rank of a running run, as one; None where nothing answers."""
    endpoints = map(read_endpoint, sorted(where.glob(f"endpoint-rank{rank}*.json")))
    watches: dict[int, list[Account]] = {}
    for endpoint in endpoints:
        if endpoint is not None and endpoint.rank == rank and (one := _account_at(endpoint)) is not None:
            watches.setdefault(endpoint.pid, []).append(one)
    found = [_of_one_process(each) for each in watches.values()]
    whole = merged(found, total(one.taken for one in found))
    return replace(whole, processes=len(found)) if found else None


def _of_one_process(watches: list[Account]) -> Account:
    """The watches of one process; what it did, and how much of that is watched, stands in the metrics of each."""
    whole, last = merged(watches, watches[-1].taken), watches[-1].watched
    return replace(whole, watched=replace(whole.watched, steps=last.steps, waiting=last.waiting))


def _account_at(endpoint: EndpointFile) -> Account | None:
    """Account of one watch from its endpoint; None where that is of another machine, gone, or does not answer."""
    if endpoint.node != platform.node() or not is_running(endpoint.pid, endpoint.started):
        return None
    host = endpoint.address.host if endpoint.address.host in _LOOPBACK else "127.0.0.1"
    url = (
        f"http://[{host}]:{endpoint.address.port}"
        if ":" in host
        else f"http://{host}:{endpoint.address.port}"
    )
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_SECONDS) as answer:
            return account_of_metrics(answer.read(_LARGEST).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None


def account_of_metrics(text: str) -> Account:
    """The account that a scrape amounts to, as far as metrics hold it: not how many optimizers there were.

    An `optimizer` label is taken over by the next optimizer once one is gone.
    """
    totals: dict[str, float] = {}
    unowned = 0
    coverage, fired, actions, inactive = 1.0, dict[str, int](), dict[str, int](), dict[str, str]()
    rules: set[str] = set()
    for sample in (one for family in text_string_to_metric_families(text) for one in family.samples):
        name, labels, value = sample.name, sample.labels, sample.value
        if math.isnan(value):
            continue
        totals[name] = totals.get(name, 0.0) + value
        if name == "gradwatch_coverage_ratio":
            coverage = min(coverage, value)
        elif name == "gradwatch_steps_total" and labels.get("optimizer", "").startswith(NO_OPTIMIZER):
            unowned += int(value)
        elif name == "gradwatch_rule_firings_total":
            rules.add(labels["rule"])
            _add(fired, labels["rule"], value)
        elif name == "gradwatch_actions_total":
            _add(actions, labels["action"], value)
        elif name == "gradwatch_rule_inactive":
            inactive[labels["rule"]] = labels["reason"]

    def number(name: str) -> int:
        return int(totals.get(f"gradwatch_{name}", 0))

    rejected = number("scaler_skips_total")
    of_rejected, waiting = number("process_rejected_steps_total"), number("process_waiting_steps")
    # The optimizer was not called for those; for these a fused one was, which left the step out by itself.
    inside = max(0, rejected - of_rejected)
    taken = number("process_steps_total")
    # A step that has begun is perhaps not measured yet, and steps go on being measured while they are counted.
    watched = min(taken, number("process_watched_steps_total") + number("process_steps_under_way"))
    return Account(
        Taken(
            backwards=number("process_backwards_total"),
            grad_calls=number("process_grad_calls_total"),
            steps=taken,
            rejected=of_rejected,
            clips=number("process_clips_total"),
        ),
        Watched(
            steps=watched,
            rejected=min(of_rejected, rejected + waiting),
            rejected_inside=inside,
            waiting=waiting,
            unowned=unowned,
            parameters=number("params"),
            coverage=coverage,
        ),
        fired=fired,
        actions=actions,
        inactive=inactive,
        rules=len(rules),
    )


def _add(counts: dict[str, int], key: str, value: float) -> None:
    if value:
        counts[key] = counts.get(key, 0) + int(value)


def _plain(label_values: list[str]) -> list[str]:
    return [line.removeprefix(PREFIX) for line in label_values]
