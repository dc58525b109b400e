"""Handling of an exception in code that torch calls: one decorator for every entry.

Each function that torch calls begins with `try:` and ends with `except Exception as error: fault(component, error)`.
A plain `try` costs nothing where nothing is raised, and it stands in the function that torch calls, so that no line of
it but the `try:` itself is outside. A fault of gradwatch's is counted by every watch and goes no further; what did not
begin in gradwatch goes on (see `gradwatch.runtime.interruption`), and so does a rule's order to stop.
"""

from __future__ import annotations

from collections.abc import Callable

from gradwatch.errors import TrainingStopped
from gradwatch.runtime.interruption import not_ours

Report = Callable[[str, BaseException], None]
_reports: list[Report] = []


def listen(report: Report) -> Callable[[], None]:
    """Call `report(component, error)` for every fault; the returned call ends that. What it raises goes on."""
    _reports.append(report)

    def remove() -> None:
        if report in _reports:
            _reports.remove(report)

    return remove


def fault(component: str, error: Exception) -> None:
    """Count a fault of gradwatch's; raise `error` again where it is the script's, or a rule's order to stop."""
    if isinstance(error, TrainingStopped) or not_ours(error):
        raise error
    for report in tuple(_reports):
        report(component, error)
