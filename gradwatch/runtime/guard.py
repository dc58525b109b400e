"""Handling of an exception in code that torch calls: one function for every entry, `fault`.

Each function that torch calls begins with `try:` and ends with `except Exception as error: fault(component, error)`.
A plain `try` costs nothing where nothing is raised, and it stands in the function that torch calls, so that no line of
it but the `try:` itself is outside. A fault of gradwatch's is counted by every watch and goes no further; what did not
begin in gradwatch goes on (see `gradwatch.runtime.interruption`), and so does a rule's order to stop.

A few entries run what torch was about to run. Once that has begun, what is raised is its own, and goes on with a
traceback that shows no frame of gradwatch; what is raised at that line before is a fault, and the call is still made.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

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


def came_out_of(function: Any, error: BaseException) -> bool:
    """True if an exception came out of a function that the frame which catches it has called.

    True as well where that cannot be told: the function has no Python code of its own.
    """
    trace = error.__traceback__
    if trace is None or not isinstance(function, FunctionType):
        return True
    return trace.tb_next is not None and trace.tb_next.tb_frame.f_code is function.__code__


def without_frames(error: BaseException, function: Any = None) -> None:
    """Drop the frame that catches an exception from its traceback, and that of the `function` it calls, if any.

    A bare `raise` must follow: from Python 3.11 on it adds no entry for its own frame.
    """
    trace = None if error.__traceback__ is None else error.__traceback__.tb_next
    if (
        trace is not None
        and isinstance(function, FunctionType)
        and trace.tb_frame.f_code is function.__code__
    ):
        trace = trace.tb_next
    error.__traceback__ = trace
