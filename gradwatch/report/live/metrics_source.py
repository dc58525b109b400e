"""The live view of a process from its /metrics, for a run whose folder is not at hand: as much as is exported."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit

from gradwatch.errors import GradwatchError
from gradwatch.records.event import severity_rank
from gradwatch.report.live.parameter_ranking import LEAST_USUAL, worst_first
from gradwatch.report.live.view_from_journal import NORMS_KEPT, STEPS_KEPT
from gradwatch.report.live.view_records import Firing, Happened, LiveView, OptimizerLine, ParameterLine
from gradwatch.runtime.printable import one_line, printable
from gradwatch.runtime.secret_values import holds_password, without_password

MOST_BYTES = 1 << 24
TIMEOUT_SECONDS = 5.0
_SERVE = "gradwatch_serve_processes"
_MOST_PARAMETERS = 64
_LATELY = 16
_MOST_NAMED = 5

Labels = frozenset[tuple[str, str]]


class _Sample(NamedTuple):
    """/metrics at one moment: by name the values, by their labels."""

    time: float
    values: Mapping[str, Mapping[Labels, float]]

    def each(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        for labels, value in self.values.get(name, {}).items():
            yield dict(labels), value

    def of(self, name: str, optimizer: str) -> float | None:
        for labels, value in self.each(name):
            if labels.get("optimizer", "0") == optimizer:
                return value
        return None

    def total(self, name: str) -> float:
        return sum(value for _, value in self.each(name))

    def label(self, name: str, label: str) -> str:
        return next((labels.get(label, "") for labels, _ in self.each(name)), "")


class MetricsSource:
    """Polls the /metrics of one process. `url` is that of its endpoint, with or without the path.

    Raises GradwatchError where the first answer is none of a training process.
    """

    def __init__(self, url: str) -> None:
        if holds_password(url):
            raise GradwatchError(
                f"{without_password(url)} has a user or password, which gradwatch does not send; write http://HOST:PORT"
            )
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise GradwatchError(f"{url!r} is no address: {error}; write http://HOST:PORT") from None
        path = parts.path if parts.path not in ("", "/") else "/metrics"
        self.url = parts._replace(path=path, query="", fragment="").geturl()
        self._samples: deque[_Sample] = deque(maxlen=STEPS_KEPT)
        self._since: dict[str, int] = {}
        self._lately: deque[Happened] = deque(maxlen=_LATELY)
        try:
            sample = read_metrics(self.url)
        except (OSError, ValueError) as error:
            raise GradwatchError(
                f"cannot read {self.url}: {_reason(error)}; it is the address that the run's `--listen` says, or that "
                "endpoint-rank0.json in its folder has"
            ) from None
        if _SERVE in sample.values:
            raise GradwatchError(
                f"{self.url} is `gradwatch serve`, of many runs; name the folder of a run, or the address of one "
                f"process: {_running(self.url)}"
            )
        if "gradwatch_run_info" not in sample.values:
            raise GradwatchError(
                f"{self.url} has no metrics of gradwatch; name the address of a process that trains"
            )
        self._take(sample)

    def __enter__(self) -> MetricsSource:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is kept open between two polls."""

    def view(self, seconds: float) -> LiveView:
        """The process as of now; `seconds` is not used: an answer is small."""
        if time.time() - self._samples[-1].time > seconds / 2:
            try:
                self._take(read_metrics(self.url))
            except (OSError, ValueError):
                return self._view(reachable=False)
        return self._view(reachable=True)

    def _take(self, sample: _Sample) -> None:
        step = int(sample.total("gradwatch_steps_total"))
        for labels, active in sample.each("gradwatch_rule_active"):
            rule = labels.get("rule", "")
            if active and rule not in self._since:
                self._since[rule] = step if self._samples else -1
                if self._samples:
                    self._lately.append(Happened(step, "firing", rule))
            elif not active and self._since.pop(rule, None) is not None:
                self._lately.append(Happened(step, "resolved", rule))
        self._samples.append(sample)

    def _view(self, reachable: bool) -> LiveView:
        last, now = self._samples[-1], time.time()
        severities = {
            labels["rule"]: labels["severity"] for labels, _ in last.each("gradwatch_rule_firings_total")
        }
        fired = {
            labels["rule"]: int(value) for labels, value in last.each("gradwatch_rule_firings_total") if value
        }
        worst = min(fired, key=lambda rule: severity_rank(severities[rule]), default="")
        stepped = max((at for _, at in last.each("gradwatch_last_step_timestamp_seconds")), default=None)
        quiet = None if stepped is None or not reachable else max(0.0, now - stepped)
        stall = min((at for _, at in last.each("gradwatch_stall_threshold_seconds")), default=math.inf)
        steps = int(last.total("gradwatch_steps_total"))
        coverage = [value for _, value in last.each("gradwatch_coverage_ratio")]
        own = [value for _, value in last.each("gradwatch_overhead_ratio")]
        healthy = [value for _, value in last.each("gradwatch_checkpoint_healthy")]
        actions: dict[str, int] = {}
        for labels, value in last.each("gradwatch_actions_total"):
            if value:
                actions[labels["action"]] = actions.get(labels["action"], 0) + int(value)
        firing = [Firing(rule, severities.get(rule, ""), since) for rule, since in self._since.items()]
        return LiveView(
            where=self.url,
            run_id=last.label("gradwatch_run_info", "run_id"),
            script=last.label("gradwatch_run_info", "script"),
            rank=int(last.label("gradwatch_run_info", "rank") or 0),
            world_size=int(last.label("gradwatch_run_info", "world_size") or 1),
            process="unreachable" if not reachable else "running" if steps else "waiting",
            started=last.total("gradwatch_run_start_timestamp_seconds"),
            steps=steps,
            quiet_seconds=quiet,
            stalled=quiet is not None and quiet > stall,
            optimizers=[self._optimizer(each) for each in _optimizers(last)],
            coverage=min(coverage, default=None),
            own_share=max(own, default=None),
            weights_healthy=bool(min(healthy)) if healthy else None,
            parameters=self._parameters(),
            norms_step=steps - 1,
            firing=sorted(firing, key=lambda one: severity_rank(one.severity)),
            fired=fired,
            worst=worst,
            worst_severity=severities.get(worst, ""),
            lately=tuple(self._lately),
            actions=actions,
            skipped=int(last.total("gradwatch_skipped_steps_total")),
            clipped=int(last.total("gradwatch_clipped_steps_total")),
            notes=("read from /metrics: histories begin where this view did, one point a poll",),
        )

    def _optimizer(self, number: str) -> OptimizerLine:
        last, first = self._samples[-1], self._samples[max(0, len(self._samples) - 20)]
        steps = (last.of("gradwatch_steps_total", number) or 0) - (
            first.of("gradwatch_steps_total", number) or 0
        )
        norms = [each.of("gradwatch_grad_norm", number) for each in self._samples]
        losses = [each.of("gradwatch_loss", number) for each in self._samples]
        seconds = last.time - first.time
        return OptimizerLine(
            int(number) if number.isdecimal() else -1,
            int(last.of("gradwatch_steps_total", number) or 0) - 1,
            steps / seconds if seconds > 0 else 0.0,
            _number(norms[-1]),
            _number(last.of("gradwatch_grad_norm_applied", number)),
            [_number(each) for each in norms if each is not None],
            losses[-1],
            [each for each in losses if each is not None],
            last.of("gradwatch_learning_rate", number),
            last.of("gradwatch_loss_scale", number),
        )

    def _parameters(self) -> list[ParameterLine]:
        """Those that have a series of their own, which are the worst already; in their order by the factor."""
        near = list(self._samples)[-NORMS_KEPT:]
        found = []
        for labels, norm in near[-1].values.get("gradwatch_param_grad_norm", {}).items():
            norms = [
                each.values["gradwatch_param_grad_norm"][labels]
                for each in near
                if labels in each.values.get("gradwatch_param_grad_norm", {})
            ]
            before = sorted(each for each in norms[:-1] if math.isfinite(each))
            usual = before[len(before) // 2] if len(before) >= LEAST_USUAL else math.nan
            found.append(ParameterLine(dict(labels).get("param", ""), norm, usual, norms))
        return worst_first(found, _MOST_PARAMETERS)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _optimizers(sample: _Sample) -> list[str]:
    return sorted({labels.get("optimizer", "0") for labels, _ in sample.each("gradwatch_steps_total")})


def _running(url: str) -> str:
    """The runs that go on, by `gradwatch serve`, and the command for each."""
    try:
        members = json.loads(_fetched(urlsplit(url)._replace(path="/runs.json").geturl()))
        named = [
            f"gradwatch top http://{one_line(str(each['address']), 100)} "
            f"({printable(str(each['run_id']))} rank {each['rank']}{_process(each)})"
            for each in members
            if each["state"] == "running" and each["address"]
        ]
    except (OSError, ValueError, LookupError, TypeError):
        named = []
    return "; ".join(named[:_MOST_NAMED]) or "none is running that can be reached"


def _process(member: Mapping[str, object]) -> str:
    """Words for a process that is not the first of its rank; an earlier version knows only that one."""
    number = member.get("process")
    return f" process {number}" if isinstance(number, int) and number else ""


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error)


def read_metrics(url: str) -> _Sample:
    """Fetch and parse. Raises OSError where there is no answer, ValueError where it is not of this form."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(_fetched(url)):
        for sample in family.samples:
            values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = float(sample.value)
    return _Sample(time.time(), values)


def _fetched(url: str) -> str:
    host = urlsplit(url).hostname or ""
    local = host == "localhost" or host.startswith("127.") or host == "::1"
    # A proxy that the environment names is no way to this machine itself.
    handlers = [urllib.request.ProxyHandler({})] if local else []
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=TIMEOUT_SECONDS) as answer:
            text: bytes = answer.read(MOST_BYTES + 1)
    except HTTPException as error:  # no port number, or no answer of HTTP
        raise ValueError(str(error) or type(error).__name__) from error
    if len(text) > MOST_BYTES:
        raise ValueError(f"an answer of more than {MOST_BYTES >> 20} MiB")
    return text.decode("utf-8", "replace")
