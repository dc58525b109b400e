"""The firings of rules as /metrics of this process serves them."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Collection, Mapping
from contextlib import suppress

from prometheus_client.parser import text_string_to_metric_families

_SECONDS = 5.0
_FIRINGS = "gradwatch_rule_firings_total"


def served_firings(url: str | None) -> dict[str, float] | None:
    """The firings by rule that are served at `url`; None without an endpoint, or an answer."""
    if url is None:
        return None
    with suppress(OSError, ValueError):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_SECONDS) as answer:
            families = [*text_string_to_metric_families(answer.read().decode("utf-8", "replace"))]
        found: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == _FIRINGS:
                found[sample.labels["rule"]] = found.get(sample.labels["rule"], 0.0) + sample.value
        return found
    return None


def newly_served(
    url: str | None, before: Mapping[str, float] | None, fired: Collection[str]
) -> list[str] | None:
    """The rules of `fired` whose counter has gone up since `before`; /metrics is rendered a moment after the step."""
    if before is None:
        return None
    deadline = time.monotonic() + _SECONDS
    while True:
        now = served_firings(url) or {}
        found = [rule for rule in fired if now.get(rule, 0.0) > before.get(rule, 0.0)]
        if len(found) == len(fired) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
