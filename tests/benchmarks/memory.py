"""Does a long run grow? `python -m tests.benchmarks.memory --steps 20000` exits 1 where resident memory does.

A tiny model, so that steps are quick and nothing but gradwatch could grow;
scraped now and then, as Prometheus would.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIB = 1 << 20
SAMPLES = 40
"""Readings of resident memory, evenly spread over the steps after the warm-up."""


def resident_bytes() -> int:
    """Resident memory of this process, bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * _page_size()


def _page_size() -> int:
    import resource

    return resource.getpagesize()


def growth(readings: list[int]) -> int:
    """Bytes from the median of the first eighth of the readings to that of the last: one reading is noise."""
    width = max(1, len(readings) // 8)
    first, last = sorted(readings[:width]), sorted(readings[-width:])
    return last[width // 2] - first[width // 2]


class Loop:
    """A training loop of a few microseconds a step, watched or not."""

    def __init__(self, watched: bool, directory: str) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), 1e-5)
        self._x, self._y = torch.randn(64, 16), torch.randint(0, 4, (64,))
        self._watch: Any = None
        if watched:
            import gradwatch

            self._watch = gradwatch.watch(
                self._model, self._optimizer, run_dir=directory, listen="127.0.0.1:0", run_id="memory"
            )

    def run(self, steps: int) -> None:
        """Train for so many steps, then scrape once and wait for the journal."""
        for _ in range(steps):
            loss = nn.functional.cross_entropy(self._model(self._x), self._y)
            loss.backward()
            self._optimizer.step()
            if self._watch is not None:
                self._watch.observe(loss=loss)
            self._optimizer.zero_grad()
        if self._watch is not None:
            with urllib.request.urlopen(self._watch.url, timeout=10) as response:
                if b"gradwatch_steps_total" not in response.read():
                    raise RuntimeError("the endpoint served something else than this watch's metrics")
            self._watch.flush()

    def errors(self) -> dict[str, int]:
        """gradwatch's own faults so far: a part that has failed costs nothing and proves nothing."""
        return {} if self._watch is None else self._watch.health.errors()

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()


def main(argv: list[str] | None = None) -> int:
    """Train, read resident memory as it goes; 1 if it grew by `--limit` or more after the warm-up."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.memory", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--warmup", type=int, default=2_000, help="steps before the first reading")
    parser.add_argument("--limit", type=float, default=1.0, help="MiB")
    parser.add_argument(
        "--bare", action="store_true", help="without gradwatch: what the allocator does alone"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    readings: list[int] = []
    with tempfile.TemporaryDirectory(prefix="gradwatch-bench-") as directory:
        loop = Loop(not args.bare, directory)
        loop.run(args.warmup)
        for _ in range(SAMPLES):
            loop.run(max(1, args.steps // SAMPLES))
            gc.collect()
            readings.append(resident_bytes())
            if sys.stderr.isatty():
                print(f"\r{len(readings)}/{SAMPLES}: {readings[-1] / MIB:.2f} MiB", end="", file=sys.stderr)
        errors = loop.errors()
        loop.close()
    grown = growth(readings) / MIB
    verdict = "ok" if grown < args.limit else "GROWS"
    print(
        f"{verdict}: {grown:+.3f} MiB over {args.steps} steps after {args.warmup} of warm-up "
        f"(limit {args.limit:g}; resident {readings[0] / MIB:.1f} to {readings[-1] / MIB:.1f} MiB)"
    )
    if errors:
        print(f"internal errors: {errors}")
    return 0 if grown < args.limit and not errors else 1


if __name__ == "__main__":
    raise SystemExit(main())
