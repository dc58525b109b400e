"""gradwatch's own health: its internal errors, counted and kept out of training, and the rules that judge nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradwatch.errors import GradwatchError
from gradwatch.runtime.fork_safe_locks import ForkSafeLock
from gradwatch.runtime.interruption import not_ours

MOST_NOTICES = 64


class Health:
    """Counts of internal errors and which components are up; safe to use from any thread.

    `report` raises nothing but what is no internal error: an exception that the script's signal handler raised, or one
    of its threads sent, while this code ran, goes on to the script. `on_first` (if set) is called with (component,
    error) the first time a component fails, so that each failure is logged once and counted ever after.
    """

    def __init__(self, on_first: Callable[[str, BaseException], None] | None = None) -> None:
        self.on_first = on_first
        self._lock = ForkSafeLock()
        self._errors: dict[str, int] = {}
        self._up: dict[str, bool] = {}
        self._inactive: dict[str, str] = {}
        self._noticed: set[tuple[str, str]] = set()
        self._process: Callable[[], Mapping[str, int]] = dict
        self._without_data: Callable[[], Mapping[str, str]] = dict
        self.last_reload_successful = True  # of the rule file: False while a changed one is not taken up

    def report(self, component: str, error: BaseException) -> None:
        """Count one internal error of `component`; raise it again if it is the script's own."""
        if not_ours(error):
            raise error
        with self._lock.held:
            count = self._errors.get(component, 0) + 1
            self._errors[component] = count
        if count == 1 and self.on_first is not None:
            try:
                self.on_first(component, error)
            except Exception:
                with self._lock.held:
                    self._errors["log"] = self._errors.get("log", 0) + 1

    def notice(self, component: str, text: str) -> None:
        """Have something said that is no internal error, and is not counted: once per component and text.

        After `MOST_NOTICES` different ones no more are said.
        """
        with self._lock.held:
            if (component, text) in self._noticed or len(self._noticed) >= MOST_NOTICES:
                return
            self._noticed.add((component, text))
        if self.on_first is not None:
            try:
                self.on_first(component, GradwatchError(text))
            except Exception as error:
                self.report("log", error)

    def mark(self, component: str, up: bool) -> None:
        """Say whether a component works at present."""
        with self._lock.held:
            self._up[component] = up

    def reloaded(self, successful: bool) -> None:
        """Say whether the last attempt to load the rule file succeeded."""
        self.last_reload_successful = successful

    def errors(self) -> dict[str, int]:
        """Internal errors so far by component; a copy."""
        with self._lock.held:
            return dict(self._errors)

    def up(self) -> dict[str, bool]:
        """State of each component (True = up); a copy."""
        with self._lock.held:
            return dict(self._up)

    def set_inactive(self, reasons: Mapping[str, str]) -> None:
        """Replace what `inactive` returns."""
        with self._lock.held:
            self._inactive = dict(reasons)

    def counts(
        self, process: Callable[[], Mapping[str, int]], without_data: Callable[[], Mapping[str, str]]
    ) -> None:
        """Say how `process` and `without_data` are found out; both are called from any thread."""
        self._process, self._without_data = process, without_data

    def process(self) -> Mapping[str, int]:
        """Totals of this process, watched or not, by the names of `account.Taken`; empty where not counted."""
        return self._process()

    def without_data(self) -> Mapping[str, str]:
        """The reason why a rule, by id, has had no data so far; empty before the first step."""
        return self._without_data()

    def inactive(self) -> dict[str, str]:
        """The reason why a rule (by id) or a group (`group:NAME`) judges nothing at present; a copy.

        Rules and groups with `optional: true` are not listed.
        """
        with self._lock.held:
            return dict(self._inactive)
