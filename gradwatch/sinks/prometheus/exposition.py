"""Prometheus text format 0.0.4, written from arrays.

prometheus_client needs 38 ms with the GIL held for 10,000 series, and a scrape takes that time from training.
Here the label strings are encoded once, and a scrape writes only digits. Its parser and its `generate_latest`
are what the tests compare this with.

N series, W characters of a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.snapshot import BoolArray, FloatArray
from gradwatch.sinks.prometheus.metric_catalogue import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]

WIDTH = 15
"""Characters of `-1.23456789e-38`: nine significant digits are enough to read the same float32 back."""

_THREE_DIGITS = np.frombuffer(b"".join(b"%03d" % i for i in range(1000)), np.uint8).reshape(1000, 3)
_EXPONENTS = np.frombuffer(b"".join(b"e%+03d" % e for e in range(-50, 51)), np.uint8).reshape(101, 4)
_POWERS = np.array([float(f"1e{8 - e}") for e in range(-50, 51)])
_NAN, _POSITIVE_INF, _NEGATIVE_INF, _ZERO = (
    np.frombuffer(text.rjust(WIDTH), np.uint8) for text in (b"NaN", b"+Inf", b"-Inf", b"0")
)


class Series(NamedTuple):
    """One line: `suffix` is "", "_bucket", "_sum" or "_count"; `labels` are printable already."""

    suffix: str
    labels: Labels
    value: float


class Lines:
    """N series of one gauge whose labels stay and whose values change: all but the values is encoded once."""

    def __init__(self, name: str, labels: Sequence[Labels]) -> None:
        self.labels = tuple(labels)
        heads = [f"{name}{label_text(pairs)} ".encode("utf-8", "replace") for pairs in labels]
        blank = b" " * WIDTH + b"\n"
        self._template = np.frombuffer(blank.join([*heads, b""]), np.uint8)
        self._lengths = np.array([len(head) + WIDTH + 1 for head in heads], np.intp)
        starts = np.cumsum(self._lengths) - (WIDTH + 1)
        self._slots_NW = starts[:, None] + np.arange(WIDTH)

    def render(self, values: FloatArray, present: BoolArray) -> bytes:
        """The lines where `present[N]`, with `values[N]` (read as float32)."""
        text = self._template.copy()
        text[self._slots_NW] = digits(values)
        if not present.all():
            text = text[np.repeat(present, self._lengths)]
        return text.tobytes()


@dataclass(frozen=True, slots=True)
class Block:
    """Values for `Lines`: one per line, and whether the line exists at present."""

    lines: Lines
    values: FloatArray
    present: BoolArray


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its series: a few as `series`, many as `blocks`."""

    metric: Metric
    series: list[Series] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def every(self) -> Iterator[Series]:
        """One by one, those of the blocks too: for readers that are in no hurry."""
        yield from self.series
        for block in self.blocks:
            rows = zip(block.lines.labels, block.values.tolist(), block.present.tolist(), strict=True)
            yield from (Series("", labels, value) for labels, value, present in rows if present)

    def __bool__(self) -> bool:
        return bool(self.series) or any(block.present.any() for block in self.blocks)


def render(families: Iterable[Family]) -> bytes:
    """A whole scrape; families without series are left out, and no sample ever has a timestamp."""
    parts: list[bytes] = []
    for family in families:
        if not family:
            continue
        metric = family.metric
        lines = [f"# HELP {metric.name} {help_text(metric.help)}\n# TYPE {metric.name} {metric.kind}\n"]
        lines += [
            f"{metric.name}{suffix}{label_text(labels)} {number(value)}\n"
            for suffix, labels, value in family.series
        ]
        parts.append("".join(lines).encode("utf-8", "replace"))
        parts += [block.lines.render(block.values, block.present) for block in family.blocks]
    return b"".join(parts)


def number(value: float) -> str:
    """A value as Go's ParseFloat and prometheus_client read it back unchanged."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if isinstance(value, (bool, int)) else repr(float(value))


def label_text(labels: Labels) -> str:
    """Labels as `{a="b",c="d"}`, or nothing."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in labels) + "}"


def escape(value: str) -> str:
    """A label value between quotes: backslash, quote and newline escaped, as the format asks."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def help_text(text: str) -> str:
    """HELP text: backslash and newline escaped, quotes left."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def digits(values: FloatArray) -> NDArray[np.uint8]:
    """uint8[N, W]: each of `values[N]` (read as float32) in ASCII, right-aligned, nine significant digits.

    Every float32, subnormals included, reads back as itself. −0 is written as 0.
    """
    with np.errstate(all="ignore"):  # a signalling NaN, or a float64 beyond float32, is no reason to warn
        single = np.asarray(values, np.float32)
        size = np.abs(single).astype(np.float64)
    special = ~(np.isfinite(size) & (size > 0))
    size[special] = 1.0
    exponent = np.floor(np.log10(size)).astype(np.intp)
    mantissa = np.rint(size * _POWERS[exponent + 50]).astype(np.int64)
    # log10 may be off by one next to a power of ten, and rint may carry into a tenth digit.
    low, high = mantissa < 10**8, mantissa >= 10**9
    if low.any() or high.any():
        exponent += high.astype(np.intp) - low.astype(np.intp)
        mantissa = np.rint(size * _POWERS[exponent + 50]).astype(np.int64)
    out_NW = np.empty((len(single), WIDTH), np.uint8)
    first, rest = _THREE_DIGITS[mantissa // 10**6], (mantissa % 10**6).astype(np.int32)
    out_NW[:, 0] = np.where(single < 0, ord("-"), ord(" "))
    out_NW[:, 1], out_NW[:, 2], out_NW[:, 3:5] = first[:, 0], ord("."), first[:, 1:]
    out_NW[:, 5:8], out_NW[:, 8:11] = _THREE_DIGITS[rest // 1000], _THREE_DIGITS[rest % 1000]
    out_NW[:, 11:] = _EXPONENTS[exponent + 50]
    if special.any():
        out_NW[np.isnan(single)], out_NW[single == 0] = _NAN, _ZERO
        out_NW[single == np.inf], out_NW[single == -np.inf] = _POSITIVE_INF, _NEGATIVE_INF
    return out_NW
