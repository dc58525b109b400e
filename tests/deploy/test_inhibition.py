"""Which alerts the shipped Alertmanager keeps quiet because another one speaks for them, and which it must not."""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from gradwatch.sinks.alert_names import FALLBACK
from gradwatch.sinks.http_post import post_json
from tests.deploy.servers import alertmanager, wait_until, webhook

RUN = {"run_id": "a", "rank": "0"}
NAN = {"alertname": "GradwatchNonFiniteGradients", "severity": "critical", "rule": "non-finite", **RUN}
MINE = {"alertname": FALLBACK, "severity": "critical", "rule": "mine", "kind": "above", **RUN}
DOWN = {"alertname": "GradwatchTargetDown", "severity": "warning", **RUN}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Alertmanager with the shipped inhibition."""
    with webhook() as inbox, alertmanager(tmp_path_factory.mktemp("inhibition"), inbox) as port:
        yield f"http://127.0.0.1:{port}/api/v2/alerts"


def is_quiet(url: str, source: dict[str, str], target: dict[str, str], seconds: float) -> bool:
    """Whether `target` is inhibited while `source` fires, at most so many seconds after both are known."""
    question = secrets.token_hex(4)
    pair = [{**each, "question": question} for each in (source, target)]
    for each in pair:
        if "run_id" in each:  # earlier questions are about other runs
            each["run_id"] += question
    post_json(url, [{"labels": each} for each in pair])

    def state() -> list[Any]:
        with urllib.request.urlopen(url, timeout=60) as response:
            told = json.load(response)
        return [each for each in told if each["labels"] in pair]

    wait_until(lambda: len(state()) == 2, "both alerts")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        (found,) = [each for each in state() if each["labels"] == pair[1]]
        if found["status"]["inhibitedBy"]:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (NAN, {**NAN, "alertname": "GradwatchExplodingGradients", "rule": "spike"}),
        (NAN, {**NAN, "severity": "warning", "rule": "milder"}),
        (DOWN, {"alertname": "GradwatchRunStalled", "severity": "critical", **RUN}),
    ],
)
def test_one_message_for_one_trouble(url: str, source: dict[str, str], target: dict[str, str]) -> None:
    """NaN speaks for an explosion, a grave rule for a milder one of its kind, a dead process for its stall."""
    assert is_quiet(url, source, target, 60)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (MINE, {**MINE, "rule": "other", "severity": "warning"}),
        ({"alertname": "DiskFull", "severity": "critical"}, {"alertname": "DiskFull", "severity": "warning"}),
        (NAN, {**NAN, "run_id": "b", "severity": "warning"}),
        (DOWN, {"alertname": "GradwatchRunStalled", "severity": "critical", "run_id": "a", "rank": "1"}),
        (DOWN, {"alertname": "GradwatchRunStalled", "severity": "critical", **RUN, "process": "1"}),
        (NAN, {**NAN, "alertname": "GradwatchExplodingGradients", "rule": "spike", "process": "1"}),
        (NAN, {**NAN, "severity": "warning", "rule": "milder", "process": "1"}),
    ],
)
def test_nobody_else_is_silenced(url: str, source: dict[str, str], target: dict[str, str]) -> None:
    """Neither rules of one's own, which share only a name, nor alerts of others, of another rank or process."""
    assert not is_quiet(url, source, target, 1)
