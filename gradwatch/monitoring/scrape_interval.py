"""The scrape interval, and every duration that follows from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """`scrape_seconds` between scrapes, and between evaluations of the rules; a whole number of seconds."""

    scrape_seconds: int = 15

    def __post_init__(self) -> None:
        if not 1 <= self.scrape_seconds <= 300:
            # Beyond 5 minutes Prometheus takes every series for stale between two scrapes.
            raise ValueError(f"scrape interval: {self.scrape_seconds} s is not within 1 s and 300 s")

    @property
    def interval(self) -> str:
        """The scrape interval as Prometheus writes it."""
        return duration(self.scrape_seconds)

    @property
    def window(self) -> str:
        """Range of `rate` and `increase`: four scrapes, so that one may fail."""
        return duration(4 * self.scrape_seconds)

    @property
    def patience(self) -> str:
        """`for:` of alerts that a single failed scrape could cause."""
        return duration(3 * self.scrape_seconds)

    @property
    def absence(self) -> str:
        """Time without an answer after which a target counts as dead: it may just have exited.

        Discovery learns of a clean exit after a refresh at most, and Prometheus passes such news on every 5 s.
        """
        return duration(2 * self.scrape_seconds + 10)


def duration(seconds: int) -> str:
    """`90` as `1m30s`, the way Prometheus prints a duration."""
    parts = []
    for unit, size in (("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
