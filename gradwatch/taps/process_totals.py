"""What this process did, counted whether it is watched or not: backwards, optimizer steps, clips.

Beside these totals stands what was watched (`gradwatch.account`): where the two differ, something was not seen. Each
number is written by the one tap that notices it, while that tap is installed: backwards and calls of
`torch.autograd.grad` by `gradwatch.taps.backward_entry` (`count_backwards`), the others by `gradwatch.hooks`.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from gradwatch.account import Taken
from gradwatch.taps import backward_entry
from gradwatch.taps.distinct import Distinct


@dataclass(slots=True)
class ProcessTotals:
    """Counts since the first tap was installed, or since the fork in a forked child.

    `backwards` calls that add to `.grad`; `grad_calls` calls of `torch.autograd.grad`; `steps` calls of an optimizer's
    `step`, and `nested` those inside another one (`super().step()`, an optimizer that wraps an optimizer); `clips`
    calls of torch's `clip_grad_*`; `rejected` steps that a GradScaler kept from the optimizer; `optimizers` how many
    were made, and `stepped` of how many a step began or was rejected; `raised` those of the `steps` that an exception
    ended, noticed when the thread steps again or exits.
    """

    backwards: int = 0
    grad_calls: int = 0
    steps: int = 0
    nested: int = 0
    clips: int = 0
    rejected: int = 0
    optimizers: int = 0
    stepped: int = 0
    raised: int = 0

    def taken(self) -> Taken:
        """The counts as of now."""
        return Taken(**{each.name: getattr(self, each.name) for each in fields(self)})

    def reset(self) -> None:
        """Start at 0 again."""
        for each in fields(self):
            setattr(self, each.name, 0)


TOTALS = ProcessTotals()
_optimizers = Distinct()  # those that were stepped, each counted once
_counting: dict[object, Callable[[], None]] = {}  # who wants backwards counted, and under None the tap
_stepping: dict[int, int] = {}  # optimizer steps under way, by thread
_outermost: dict[int, int] = {}  # the number of the last step that was part of no other one, by thread
_numbers = itertools.count(1)


def count_backwards() -> Callable[[], None]:
    """Count every call of the autograd engine that is not inside another one, once; the returned call ends that."""
    user = object()
    if not _counting:
        _counting[None] = backward_entry.listen(_about_to_run)
    _counting[user] = _nothing

    def remove() -> None:
        _counting.pop(user, None)
        if len(_counting) == 1:
            _counting.pop(None)()

    return remove


def _nothing() -> None:
    """What one of several users of the count has to undo."""


def step_begins(optimizer: object, under_way: Callable[[], int]) -> None:
    """Count a step of this optimizer unless it is part of another one on this thread.

    `under_way()` reads the number of steps from the thread's stack, this one included; it is asked only where a step
    seems to be open, which one that raised leaves behind too.
    """
    thread = threading.get_ident()
    if _stepping.get(thread) and under_way() > 1:
        _stepping[thread] += 1
        TOTALS.nested += 1
        return
    if _stepping.get(thread):  # it has not ended: an exception ended it
        TOTALS.raised += 1
    _stepping[thread] = 1
    _outermost[thread] = next(_numbers)
    TOTALS.steps += 1
    _optimizers.add(optimizer)
    TOTALS.stepped = _optimizers.count


def step_rejected(optimizer: object) -> None:
    """A GradScaler has not called this optimizer's step."""
    TOTALS.rejected += 1
    _optimizers.add(optimizer)
    TOTALS.stepped = _optimizers.count


def present_step() -> int:
    """A number for the outermost step that this thread has begun last; 0 before the first. Never used twice."""
    return _outermost.get(threading.get_ident(), 0)


def settle() -> None:
    """No step is under way on this thread: one that has not ended was ended by an exception."""
    if _stepping.pop(threading.get_ident(), 0):
        TOTALS.raised += 1


def step_ends() -> None:
    """The step that began last on this thread has returned."""
    thread = threading.get_ident()
    _stepping[thread] = max(0, _stepping.get(thread, 0) - 1)


@contextmanager
def uncounted() -> Iterator[None]:
    """Backwards run in here are gradwatch's own, and no doing of the process."""
    before = TOTALS.backwards, TOTALS.grad_calls
    try:
        yield
    finally:
        TOTALS.backwards, TOTALS.grad_calls = before


def _about_to_run(call: backward_entry.BackwardCall) -> None:
    if call.nested:
        return
    if call.accumulates:
        TOTALS.backwards += 1
    else:
        TOTALS.grad_calls += 1


def _start_again() -> None:
    """In a forked child: what the parent did is counted there."""
    TOTALS.reset()
    _optimizers.reset()
    _stepping.clear()
    _outermost.clear()


os.register_at_fork(after_in_child=_start_again)
