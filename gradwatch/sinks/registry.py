"""The interface of sinks, which receive Records, and a registry that builds one by its name in a rule file.

Nothing is imported before it is asked for: a registered sink is a factory or the import path of one, so a run
without a Prometheus endpoint never loads the server.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from gradwatch.errors import AttachError, MissingDependencyError
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.rules.sink_kinds import SINKS, SinkKind
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.spelling import did_you_mean
from gradwatch.runtime.warning_filters import filters_kept


@runtime_checkable
class Sink(Protocol):
    """A receiver of the Record of every step; wrapped in a `Breaker`, its faults stay out of training.

    `open` and `write` run on the training thread and must not wait for anything: `write` has microseconds,
    may keep the Record (it is immutable) and must leave slow work to a thread of its own. `close` may be
    called twice, and without `open`. `name` is the `component` label of its errors. A sink may also have
    `conclude(account)`, which is called just before `close` with the `Account` of the process, before it
    `judge_weights(health)` with the `CheckpointHealth` by a last look at the weights, and
    `write_all(records)`, called instead of `write` for several steps of one optimizer on which no rule changed:
    no event, no order but of `clip:`, and findings, of what was found by then, with the last of them alone. Not so
    where `write` is newer than `write_all`, as in a class derived from a shipped sink.

    A sink whose output names the process, so that two of the same run and rank would write the same one, has
    `needs_place` True: then `RunInfo.place` is the number of this one among them, else it is 0.

    Before a stop ends training every sink is flushed, within 2 s in all; a sink with `stop_seconds` has that long.
    """

    name: str

    def open(self, run: RunInfo, health: Health) -> None:
        """Get ready for the Records of one run; raises OSError when that is impossible."""

    def write(self, record: Record) -> None:
        """Take one step."""

    def flush(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until everything taken is where it belongs; False if it is not."""

    def close(self) -> None:
        """Release threads, sockets and files."""


SinkFactory = Callable[..., Sink]


def register_sink(kind: str, factory: SinkFactory | str) -> None:
    """Make `kind` usable under `sinks:` in a rule file.

    `factory` is called with the options as keywords, or names such a callable as "package.module:attribute"
    and is then imported at first use. Raises ValueError when the kind is taken.
    """
    if kind in SINKS:
        raise ValueError(f"sink {kind!r} is registered already")
    SINKS[kind] = SinkKind(factory)


def sink_names() -> tuple[str, ...]:
    """Every kind that `make_sink` knows, including `gradwatch.sinks` entry points of installed plug-ins."""
    plugins = (entry.name for entry in entry_points(group="gradwatch.sinks"))
    return tuple(sorted({*SINKS, *plugins}))


def find_sink(kind: str) -> SinkFactory:
    """The factory behind `kind`; raises AttachError when there is none or it cannot be imported."""
    known = SINKS.get(kind)
    if known is not None and not isinstance(known.factory, str):
        return known.factory
    try:
        return _plugin(kind) if known is None else _imported(str(known.factory))
    except (ImportError, AttributeError) as error:
        raise AttachError(f"sink {kind!r} cannot be loaded: {error}") from error


def make_sink(kind: str, options: Mapping[str, Any] | None = None) -> Sink:
    """Build a sink by name.

    Raises:
        AttachError: the kind or an option is unknown, a value is wrong, or a library is not installed.
    """
    factory, chosen = find_sink(kind), dict(options or {})
    parameters = inspect.signature(factory).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for option in chosen:
            if option not in parameters:
                hint = did_you_mean(option, tuple(parameters))
                raise AttachError(f"sink {kind!r} has no option {option!r}{hint}")
    try:
        return factory(**chosen)
    except (TypeError, ValueError, MissingDependencyError) as error:
        raise AttachError(f"sink {kind!r}: {error}") from error


def _imported(path: str) -> SinkFactory:
    module, _, attribute = path.partition(":")
    with state_restored():
        factory: SinkFactory = getattr(import_module(module, __package__), attribute)
    return factory


def _plugin(kind: str) -> SinkFactory:
    for entry in entry_points(group="gradwatch.sinks", name=kind):
        with state_restored():
            factory: SinkFactory = entry.load()
        return factory
    names = sink_names()
    raise AttachError(
        f"no sink is called {kind!r}{did_you_mean(kind, names)} (there are: {', '.join(names)})"
    )


@contextmanager
def state_restored() -> Iterator[None]:
    """Import in here: imports may draw from Python's generator (structlog imports rich, which does), and some add
    warning filters; the job's stay as they are.
    """
    state = random.getstate()
    try:
        with filters_kept():
            yield
    finally:
        random.setstate(state)
