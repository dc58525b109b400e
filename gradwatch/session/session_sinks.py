"""The sinks of one session: chosen, opened before the first step, flushed, given its account, closed once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

from gradwatch.account import Account
from gradwatch.errors import AttachError
from gradwatch.records.record import CheckpointHealth
from gradwatch.records.run_info import RunInfo
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.internal_errors import Health
from gradwatch.session.settings import DEFAULT_SINKS, Settings, check_directory, sink_specs
from gradwatch.sinks import Sink, make_sink
from gradwatch.sinks.circuit_breaker import Breaker


def chosen_sinks(given: Sequence[Sink] | None, ruleset: RuleSet, settings: Settings) -> list[Sink]:
    """The sinks given, or else those of the rule file. Raises where the journal's folder cannot be used."""
    if given is not None:
        return list(given)
    specs = sink_specs(ruleset, settings)
    if any(spec.kind == "journal" for spec in specs):
        check_directory(settings.run_root(ruleset.sinks))
    return [make_sink(spec.kind, spec.options) for spec in specs]


class SessionSinks:
    """The sinks of one session, each behind its breaker, in `breakers`: what publishes Records looks at this list."""

    def __init__(self, breakers: list[Breaker], health: Health) -> None:
        self._breakers = breakers
        self._health = health
        self._open: list[Breaker] = []
        self._pid: int | None = None

    def __iter__(self) -> Iterator[Breaker]:
        return iter(self._breakers)

    def open(
        self, sinks: Sequence[Sink], run: RunInfo, strict: bool, say: Callable[[str, BaseException], None]
    ) -> None:
        """Open the sinks, before the boundary is hooked: a thread may step any time. `say` is given what is moved."""
        self._pid = run.pid
        self._breakers += [Breaker(sink, self._health, strict=strict) for sink in sinks]
        self._open = list(self._breakers)
        for breaker in self._breakers:
            run_is_recorded = getattr(breaker.sink, "run_is_recorded", None)
            if run_is_recorded is not None:
                run_is_recorded(self.recorded)
            breaker.open(run)
        for breaker in self._breakers:
            moved = getattr(breaker.sink, "moved", "")
            if moved:
                say(breaker.name, AttachError(moved))

    @property
    def recorded(self) -> bool:
        """True if a journal is written: without one there is nothing to report or to explain."""
        return any(breaker.name == "journal" for breaker in self._breakers)

    @property
    def missing(self) -> tuple[str, ...]:
        """The sinks that there are by default, and are not among these."""
        names = {breaker.name for breaker in self._breakers}
        return tuple(name for name in DEFAULT_SINKS if name not in names)

    @property
    def url(self) -> str | None:
        """URL of /metrics, None without an endpoint."""
        for breaker in self._breakers:
            address = getattr(breaker.sink, "url", None)
            if address:
                return str(address)
        return None

    def flush(self, timeout: float) -> bool:
        """Wait until everything seen so far is where it belongs; False if it is not."""
        deadline = time.monotonic() + timeout
        done = [breaker.flush(max(0.0, deadline - time.monotonic())) for breaker in self._breakers]
        return all(done)

    def judge_weights(self, health: CheckpointHealth) -> None:
        """Give each the health of the weights by a last look at them."""
        for breaker in self._breakers:
            breaker.judge_weights(health)

    def conclude(self, account: Account, quiet: bool) -> None:
        """Give each the account of the session; `quiet`: not the log."""
        for breaker in self._breakers:
            if not (quiet and breaker.name == "log"):
                breaker.conclude(account)

    def forked(self) -> None:
        """Write nothing in a forked child: what is open is the parent's."""
        self._breakers.clear()

    def close(self) -> None:
        """Close the sinks, once, at `close` or at exit; never in a forked child."""
        while self._open and os.getpid() == self._pid:
            self._open.pop(0).close()
