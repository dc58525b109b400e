"""The answer of `/healthz`: 503 where no run folder could be read for long."""

from __future__ import annotations

import time

from gradwatch.endpoint.http_protocol import Content, RequestError, plain

_LATE_SECONDS = 60.0


class ScanHealth:
    """Time since a run folder was read last, of a scanner that looks every `every_seconds`."""

    def __init__(self, every_seconds: float) -> None:
        self._every = every_seconds
        self._alive = time.monotonic()

    def progressed(self) -> None:
        """A folder was read."""
        self._alive = time.monotonic()

    def answer(self, hurried: bool) -> Content:
        """`ok`; RequestError 503 after a minute and three intervals without progress."""
        late = time.monotonic() - self._alive
        if late > _LATE_SECONDS + 3 * self._every:
            raise RequestError(503, f"No run folder could be read for {late:.0f} s.")
        return plain("ok")
