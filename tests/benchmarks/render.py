"""What a scrape costs: `python -m tests.benchmarks.render [SERIES …]`.

Milliseconds of one thread with the GIL held, medians and 90th percentiles, for our renderer and, beside it,
for prometheus_client's `generate_latest` over the same series; and microseconds a step costs training.
Target: 10,000 series in at most 10 ms.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.support.sink_records import make_record, make_run, make_sites

STEPS = 20


def timed(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median and 90th percentile of a call, in seconds of CPU time of this thread."""
    call()
    spent = []
    for _ in range(rounds):
        started = time.thread_time()
        call()
        spent.append(time.thread_time() - started)
    return float(np.median(spent)), float(np.quantile(spent, 0.9))


def measure(series: int) -> dict[str, tuple[float, float]]:
    """Seconds per scrape by either way, and per `STEPS` steps, with `series` parameters exported."""
    names = [f"model.layers.{i // 10}.block.{i % 10}.weight" for i in range(series)]
    sites, chance = make_sites(names=names), np.random.default_rng(0)
    sink, registry = PrometheusSink(None, params="all", max_series=series), CollectorRegistry()
    sink.open(make_run(Path("unused")), Health())
    records = [make_record(sites, chance.lognormal(-5, 3, series), step=step) for step in range(STEPS)]
    for record in records:
        sink.write(record)
    registry.register(sink.collector())
    return {
        "render": timed(sink.render, 60),
        "generate_latest": timed(lambda: generate_latest(registry), 10),
        "write": timed(lambda: [sink.write(record) for record in records], 60),
    }


def main() -> None:
    """Print a table, one row per number of series."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("series", nargs="*", type=int, default=[20, 200, 1_000, 10_000])
    print(f"{'series':>8} {'render ms':>10} {'p90':>7} {'prometheus_client ms':>21} {'write µs/step':>14}")
    for series in parser.parse_args().series:
        found = measure(series)
        (median, p90), (theirs, _), (write, _) = found["render"], found["generate_latest"], found["write"]
        ours, step = f"{median * 1e3:>10.2f} {p90 * 1e3:>7.2f}", write / STEPS
        print(f"{series:>8,} {ours} {theirs * 1e3:>21.1f} {step * 1e6:>14.1f}")


if __name__ == "__main__":
    main()
