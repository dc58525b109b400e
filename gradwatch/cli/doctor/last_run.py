"""The newest run as `gradwatch doctor` shows it: its account if it has ended, its counters while it runs."""

from __future__ import annotations

import platform
import re
import urllib.request
from dataclasses import replace
from pathlib import Path

from gradwatch.account import Account, Taken, Watched, gaps, lines, merged, total
from gradwatch.account.account_line import PREFIX
from gradwatch.cli.run_argument import newest
from gradwatch.errors import GradwatchError
from gradwatch.journal.audit import Audit, read
from gradwatch.journal.rank_journals import rank_journals
from gradwatch.runtime.process_identity import is_running
from gradwatch.serve.process_discovery import EndpointFile, read_endpoint

_SERIES = re.compile(r"^(gradwatch_\w+?)(?:\{(.*)\})? ([0-9.e+-]+)$", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
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
    if not accounts:  # of an earlier version
        return where.name, [f"{audit.steps:,} steps recorded, and no summary of the run"], False
    account = accounts[-1]
    running = account_of_endpoint(where, rank) if account.running else None
    if running is None:
        return where.name, _plain(lines(account)), not (gaps(account) or account.unended)
    return where.name, ["running: " + line for line in _plain(lines(running))], not gaps(running)


def account_of_endpoint(where: Path, rank: int) -> Account | None:
    """Account from the endpoints of a rank of a running run, as one; None where nothing answers."""
    endpoints = map(read_endpoint, sorted(where.glob(f"endpoint-rank{rank}*.json")))
    watches: dict[int, list[Account]] = {}
    for endpoint in endpoints:
        if endpoint is not None and endpoint.rank == rank and (one := _account_at(endpoint)) is not None:
            watches.setdefault(endpoint.pid, []).append(one)
    # What the process did stands in the metrics of each of its watches.
    found = [merged(each, each[-1].taken) for each in watches.values()]
    whole = merged(found, total(one.taken for one in found))
    return replace(whole, processes=len(found)) if found else None


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
    coverage, fired, actions, inactive = 1.0, dict[str, int](), dict[str, int](), dict[str, str]()
    rules: set[str] = set()
    for name, labels, value in _SERIES.findall(text):
        label_values = dict(_LABEL.findall(labels))
        totals[name] = totals.get(name, 0.0) + float(value)
        if name == "gradwatch_coverage_ratio":
            coverage = min(coverage, float(value))
        elif name == "gradwatch_rule_firings_total":
            rules.add(label_values["rule"])
            _add(fired, label_values["rule"], float(value))
        elif name == "gradwatch_actions_total":
            _add(actions, label_values["action"], float(value))
        elif name == "gradwatch_rule_inactive":
            inactive[label_values["rule"]] = label_values["reason"]

    def number(name: str) -> int:
        return int(totals.get(f"gradwatch_{name}", 0))

    rejected = number("scaler_skips_total")
    # The optimizer was not called for these; for the others a fused one was, which left the step out by itself.
    uncalled = min(rejected, number("process_rejected_steps_total"))
    return Account(
        Taken(
            backwards=number("process_backwards_total"),
            grad_calls=number("process_grad_calls_total"),
            steps=number("process_steps_total"),
            rejected=number("process_rejected_steps_total"),
            clips=number("process_clips_total"),
        ),
        Watched(
            steps=number("steps_total") - uncalled,
            rejected=uncalled,
            rejected_inside=rejected - uncalled,
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
