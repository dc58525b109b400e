"""Metrics that leave their process: labelled with the run they are of, and cut down to what outlives it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradwatch.sinks.prometheus.exposition import Family, Labels, Series

_OUTLIVES = (
    "gradwatch_run_start_timestamp_seconds",
    "gradwatch_run_end_timestamp_seconds",
    "gradwatch_run_outcome",
)


def labelled(families: Iterable[Family], labels: Labels) -> Iterator[Family]:
    """The same families, every series with `labels` but those that it has itself.

    For places that serve many runs at once, where no service discovery adds them.
    """
    for family in families:
        wide = Family(family.metric)
        for suffix, own, value in family.every():
            names = {name for name, _ in own}
            added = tuple(pair for pair in labels if pair[0] not in names)
            wide.series.append(Series(suffix, (*added, *own), value))
        yield wide


def final_families(families: Iterable[Family]) -> Iterator[Family]:
    """Counters, histograms and identities: what is still true of a run that has ended.

    Gauges are not: a norm of last week would look like one of now, and a last step long ago like a stall.
    """
    for family in families:
        metric = family.metric
        if metric.kind != "gauge" or metric.name.endswith("_info") or metric.name in _OUTLIVES:
            yield family
