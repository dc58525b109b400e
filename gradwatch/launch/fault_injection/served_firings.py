"""The firings of rules as /metrics of this process serves them."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Collection, Mapping
from contextlib import suppress

_SECONDS = 5.0
_FIRINGS, _RULE = "gradwatch_rule_firings_total{", 'rule="'


def served_firings(url: str | None) -> dict[str, float] | None:
    """The firings by rule that are served at `url`; None without an endpoint, or an answer."""
    if url is None:
        return None
    with suppress(OSError, ValueError):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_SECONDS) as answer:
            lines = answer.read().decode("utf-8", "replace").splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line.startswith(_FIRINGS):
                rule = line.partition(_RULE)[2].partition('"')[0]
                found[rule] = found.get(rule, 0.0) + float(line.rpartition(" ")[2])
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
