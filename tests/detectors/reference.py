"""Slow and plain: every detector for one site at a time, in Python floats, straight from its formula.

Written from the formulas, not from the package; the differential tests hold the two against each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

NAN = math.nan


def gain(half_life: float) -> float:
    """1 - 2^(-1/h)."""
    return 1 - 2 ** (-1 / half_life)


class Spike:
    """z of ln value against a winsorised exponentially weighted level; `scale` may be asinh."""

    def __init__(self, half_life: int = 100, warmup: int = 20, scale: Any = math.log) -> None:
        self.a, self.warmup, self.scale = gain(half_life), warmup, scale
        self.n, self.m, self.s, self.first = 0, 0.0, 0.0, []

    def __call__(self, value: float | None) -> float:
        """The score of the next sample (None = missing), which is then learned."""
        if value is None or not math.isfinite(value) or (self.scale is math.log and value <= 0):
            return NAN
        x, sigma = self.scale(value), max(1.2533 * self.s, 0.10)
        z = (x - self.m) / sigma if self.n >= self.warmup else NAN
        d = x - self.m
        if self.n >= 20:
            d = max(-3 * sigma, min(3 * sigma, d))
        a = max(self.a, 1 / (self.n + 1))
        self.m += a * d
        if self.n > 0:
            self.s += a * (abs(d) - self.s)
        self.n += 1
        if self.n <= 20:
            self.first.append(x)
        if self.n == 20:
            self.m = statistics.median(self.first)
            self.s = statistics.median(abs(one - self.m) for one in self.first) * 1.4826 / 1.2533
        return z


class Trend:
    """exp of the fast minus the slow exponentially weighted mean of ln value."""

    def __init__(self, fast: int = 10, slow: int = 500, warmup: int = 20) -> None:
        self.fast, self.slow, self.warmup = gain(fast), gain(slow), warmup
        self.n, self.f, self.s = 0, 0.0, 0.0

    def __call__(self, value: float | None) -> float:
        """The factor, this sample included."""
        if value is None or not math.isfinite(value) or value <= 0:
            return NAN
        x = math.log(value)
        self.f += max(self.fast, 1 / (self.n + 1)) * (x - self.f)
        self.s += max(self.slow, 1 / (self.n + 1)) * (x - self.s)
        self.n += 1
        return math.exp(self.f - self.s) if self.n > self.warmup else NAN


class Drift:
    """exp of an exponential mean of ln value minus the largest of such means a while before."""

    def __init__(self, above: float, fast: int, window: int, lag: int, warmup: int) -> None:
        self.a, self.n, self.mean = gain(fast), 0, 0.0
        self.extreme = RecentExtreme(1, above, window, lag, warmup)

    def __call__(self, value: float | None) -> float:
        """The factor, this sample included; it moves the mean as twenty times the mean at most."""
        if value is None or not math.isfinite(value) or value <= 0:
            return NAN
        away = math.log(value) - self.mean
        self.mean += max(self.a, 1 / (self.n + 1)) * (away if self.n < 20 else min(away, 3.0))
        self.n += 1
        return self.extreme.of_log(self.mean)


class Share:
    """How far a site's norm rose (sign 1) or fell (-1) beyond the others'; takes all sites at once."""

    def __init__(self, size: int, sign: int, half_life: int = 100, warmup: int = 40) -> None:
        self.sign, self.a, self.warmup = sign, gain(half_life), warmup
        self.n, self.b = [0] * size, [0.0] * size

    def __call__(self, values: Sequence[float | None]) -> list[float]:
        """exp of ±(d - m), at most of three times ±d, for each site."""
        d = {
            i: math.log(max(v, 1e-30)) - self.b[i]
            for i, v in enumerate(values)
            if v is not None and 0 <= v < math.inf
        }
        judged = sorted(one for i, one in d.items() if self.n[i] >= self.warmup)
        scores = [NAN] * len(values)
        for i, one in d.items():
            moved = one
            if self.n[i] >= self.warmup:
                middle = judged[(len(judged) - 1) // 2 if self.sign > 0 else len(judged) // 2]
                scores[i] = math.exp(min(self.sign * (one - middle), 3 * self.sign * one))
                moved = middle + max(-0.5, min(0.5, one - middle))
            if values[i]:
                self.b[i] += max(self.a, 1 / (self.n[i] + 1)) * moved
                self.n[i] += 1
        return scores


class Fade:
    """How many times further the norm has fallen below its long-term mean than the loss below its own."""

    def __init__(self, fast: int = 10, slow: int = 500, warmup: int = 100) -> None:
        self.norm, self.loss = Trend(fast, slow, warmup), Trend(fast, slow, 0)

    def __call__(self, norm: float | None, loss: float | None) -> float:
        """The factor, this sample included; without a norm none of the two is learned."""
        if norm is None or not math.isfinite(norm) or norm <= 0:
            return NAN
        fall, explained = self.norm(norm), self.loss(loss and abs(loss))
        return 1 / fall / max(1.0, 1.0 if math.isnan(explained) else 1 / explained)


class Stale:
    """1 when a gradient is missing that used to come."""

    def __init__(self) -> None:
        self.seen = False

    def __call__(self, calls: int) -> float:
        """0 when it came, NaN when it never did."""
        self.seen = self.seen or calls > 0
        return NAN if not self.seen else float(calls == 0)


class Never:
    """Steps without any gradient so far."""

    def __init__(self) -> None:
        self.waited, self.seen = 0, False

    def __call__(self, calls: int) -> float:
        """0 once one has come."""
        self.seen = self.seen or calls > 0
        self.waited += 1
        return 0.0 if self.seen else float(self.waited)


def all_zero(values: Sequence[float | None]) -> list[float]:
    """1 for a zero norm while some other is not."""
    others = any(v is not None and v > 0 for v in values)
    return [NAN if v is None else float(v == 0 and others) for v in values]


def depth_ratio(values: Sequence[float | None], ends: int = 1) -> float:
    """First ends over last ends, root mean squares."""
    chosen = [*values[:ends], *values[-ends:]]
    if len(values) < 2 * ends or any(v is None or not math.isfinite(v) for v in chosen):
        return NAN
    first, last = sum(v * v for v in values[:ends]), sum(v * v for v in values[-ends:])
    return math.sqrt(first / last) if last > 0 else NAN


class Temporal:
    """Pending, firing, resolved for one series; `state` after each sample is "", "pending" or "firing"."""

    def __init__(self, for_: int, keep: int) -> None:
        self.for_, self.keep = for_, keep
        self.streak, self.firing, self.quiet = 0, False, None

    def __call__(self, step: int, breach: bool, clear: bool, judged: bool) -> str:
        """Where the series stands after this sample."""
        if judged:
            if breach:
                self.streak, self.quiet = min(self.streak + 1, self.for_), None
                self.firing = self.firing or self.streak == self.for_
            else:
                self.streak = 0
                if self.firing and clear and self.quiet is None:
                    self.quiet = step
                if self.firing and self.quiet is not None and step - self.quiet >= self.keep:
                    self.firing, self.quiet = False, None
        return "firing" if self.firing else "pending" if self.streak else ""


class ScaleCollapse:
    """Halvings among the last `within` scales, over `halvings`; or 1 / scale, for one that was larger once, or is.

    Written as a list of falls.
    """

    def __init__(self, halvings: int, within: int, settle: int) -> None:
        self.halvings, self.within, self.settle = halvings, within, settle
        self.scales: list[float] = []
        self.falls: list[float] = []

    def __call__(self, scale: float | None) -> float:
        """The score of the next scale (None = none this step)."""
        if scale is None or not math.isfinite(scale):
            return NAN
        if scale == 0:
            return math.inf
        if self.scales and scale > 4 * self.scales[-1]:
            self.scales, self.falls = [], []
        settled = len(self.scales) > self.settle
        self.falls.append(max(0.0, math.log2(self.scales[-1] / scale)) if settled else 0.0)
        self.scales.append(scale)
        began_there = scale <= 1 and scale >= max(self.scales)
        return max(sum(self.falls[-self.within :]) / self.halvings, 0.0 if began_there else 1 / scale)


class RecentExtreme:
    """A sample over the largest of a window in ten parts (sign 1), or the smallest of it over the sample (-1)."""

    def __init__(self, sign: int, above: float, window: int, lag: int, warmup: int) -> None:
        self.sign, self.above, self.window, self.lag, self.warmup = sign, above, window, lag, warmup
        self.learned: list[float] = []

    def __call__(self, value: float | None) -> float:
        """The factor of the next sample, which is then learned, up to `above` beyond what it is compared with."""
        if value is None or not math.isfinite(value) or value < 0 or (value == 0 and self.sign > 0):
            return NAN
        return self.of_log(self.sign * math.log(max(value, 1e-30)), learn=value > 0)

    def of_log(self, x: float, learn: bool = True) -> float:
        """As for a value of this logarithm, times the sign."""
        n, part = len(self.learned), -(-self.window // 10)
        newest = n // part - -(-self.lag // part)  # the first part that is too new
        oldest = newest - -(-self.window // part)
        compared = [
            y
            for i, y in enumerate(self.learned)
            if oldest <= i // part < newest or (not self.lag and i // part == newest)
        ]
        reference = max(compared, default=math.inf)
        if learn:
            self.learned.append(min(x, reference + math.log(self.above)))
        return math.exp(x - reference) if compared and n >= self.warmup else NAN


class OffUsual:
    """The factor above (`sign` 1) or below (-1) the level of `Spike`, which learns none beyond `above`."""

    def __init__(self, sign: int, above: float, half_life: int, warmup: int) -> None:
        self.sign, self.above, self.warmup = sign, above, warmup
        self.level = Spike(half_life, warmup)

    def __call__(self, value: float | None) -> float:
        """The factor of the next sample, which is then learned."""
        if value is None or not math.isfinite(value) or value < 0 or (value == 0 and self.sign > 0):
            return NAN
        factor = math.exp(min(self.sign * (math.log(max(value, 1e-30)) - self.level.m), 700))
        known = self.level.n >= self.warmup
        if value > 0 and not (known and factor > self.above):
            self.level(value)
        return factor if known else NAN
