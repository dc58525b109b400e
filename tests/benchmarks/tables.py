"""What was measured, as tables: text for a terminal, or Markdown ready to paste into gradwatch/docs."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tests.benchmarks.interleave import Comparison
from tests.benchmarks.peers import CONTENDERS
from tests.benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from tests.benchmarks.overhead import Result

Rows = list[list[str]]  # the first is the header

ABSENT = "–"
_CONTROLS = ("bare", "bare-again")


def report(results: Sequence[Result], circumstances: str, markdown: bool) -> str:
    """Step-time ratios, µs added, targets, and whatever was missing or went wrong."""
    render = as_markdown if markdown else as_text
    tables = {
        "Step time ÷ bare (×: whole steps compared; the others: 1 + added ÷ bare step):": render(
            _ratios(results)
        ),
        "Added to a step, µs (median, and its 95 % interval; a clip of the loop's own is part of its row):": render(
            _added(results)
        ),
        "Targets:": render(_targets(results)),
        "Not measured, or not as claimed:": _remarks(results),
    }
    sections = [f"{heading}\n\n{table}" for heading, table in tables.items() if table]
    return "\n\n".join([*sections, circumstances])


def machine(threads: int) -> str:
    """The processor and the versions that a number depends on; nothing that names a host."""
    return (
        f"{_processor()} ({os.cpu_count()} cores), {threads} thread{'s' * (threads != 1)}, "
        f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        found = platform.processor()
    return found or platform.machine()


def as_markdown(rows: Rows) -> str:
    """A Markdown table; empty without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) if rows else ""


def as_text(rows: Rows) -> str:
    """Columns as wide as their cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _columns(results: Sequence[Result]) -> list[str]:
    return [WORKLOADS[result.workload].title for result in results]


def _ratios(results: Sequence[Result]) -> Rows:
    """Where the handover was measured, 1 + added / bare step; elsewhere whole steps compared directly."""
    names = [
        n for n in CONTENDERS if n not in _CONTROLS and any(n in r.handover or n in r.steps for r in results)
    ]
    rows = [[CONTENDERS[name].title, *(_ratio(result, name) for result in results)] for name in names]
    checks = [
        [
            f"{CONTENDERS[name].title}, whole steps compared",
            *(_direct(result.steps.get(name)) for result in results),
        ]
        for name in ("gradwatch", "clip_grad_norm", "gradwatch-clip", "bare-again")
        if any(name in result.steps for result in results)
    ]
    steps = ["bare step, ms", *(_bare_ms(result) for result in results)]
    rounds = ["rounds: handover, whole steps, recorders", *(_rounds(result) for result in results)]
    return [["", *_columns(results)], *rows, *checks, steps, rounds]


def _ratio(result: Result, name: str) -> str:
    bare = result.steps.get("bare")
    if name not in result.handover or bare is None:
        return _direct(result.steps.get(name))
    return f"{1 + result.handover[name].added.value / (bare.median_ms * 1e3):.3f}"


def _direct(compared: Comparison | None) -> str:
    return ABSENT if compared is None else f"× {compared.ratio:.2f}"


def _bare_ms(result: Result) -> str:
    return f"{result.steps['bare'].median_ms:.1f}" if "bare" in result.steps else ABSENT


def _rounds(result: Result) -> str:
    quick, whole = result.handover.get("bare"), result.steps.get("bare")
    slow = next((c for name, c in result.steps.items() if CONTENDERS[name].slow), None)
    return ", ".join(
        ABSENT if compared is None else str(compared.rounds) for compared in (quick, whole, slow)
    )


def _added(results: Sequence[Result]) -> Rows:
    names = [n for n in CONTENDERS if n != "bare" and any(n in r.handover for r in results)]
    rows = [
        [CONTENDERS[name].title, *(_microseconds(result.handover.get(name)) for result in results)]
        for name in names
    ]
    means = [
        [f"{CONTENDERS[name].title}, mean", *(_mean(result.handover.get(name)) for result in results)]
        for name in ("floor", "gradwatch")
        if name in names
    ]
    return [["", *_columns(results)], *rows, *means] if rows else []


def _microseconds(compared: Comparison | None) -> str:
    if compared is None:
        return ABSENT
    return f"{compared.added.value:,.0f} ({compared.added.low:,.0f} to {compared.added.high:,.0f})"


def _mean(compared: Comparison | None) -> str:
    if compared is None:
        return ABSENT
    mean = compared.added_mean
    return f"{mean.value:,.0f} ({mean.low:,.0f} to {mean.high:,.0f})"


def _targets(results: Sequence[Result]) -> Rows:
    rows = [
        [
            target.what,
            WORKLOADS[target.workload].title,
            f"≤ {target.limit:g}",
            f"{target.ratio.value:.2f} ({target.ratio.low:.2f} to {target.ratio.high:.2f})",
            ("pass" if target.reached else "**fail**") + ("" if target.clear else " (within the error)"),
        ]
        for result in results
        for target in result.targets
    ]
    header = ["added", "workload", "target", "measured", ""]
    return [header, *sorted(rows, key=lambda row: row[0])] if rows else []


def _remarks(results: Sequence[Result]) -> str:
    absent = {name: why for result in results for name, why in result.absent.items()}
    lines = [f"{CONTENDERS[name].title}: {why}" for name, why in absent.items()]
    lines += [
        f"{CONTENDERS[name].title} on {WORKLOADS[result.workload].title}: {said}"
        for result in results
        for name, said in result.complaints.items()
    ]
    return "\n".join(f"- {line}" for line in lines)
