"""Totals of this process, counted whether it is watched or not: backwards, optimizer steps, clips.

Beside these totals stands what was watched (`gradwatch.account`): where the two differ, something was not seen. Each
number is written by the one tap that notices it, while that tap is installed: backwards and calls of
`torch.autograd.grad` by `gradwatch.taps.backward_entry`, the others by `gradwatch.taps.step_hooks` and
`gradwatch.taps.clip_functions`.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from gradwatch.account import Taken
from gradwatch.runtime.weak_references import Distinct


@dataclass(slots=True)
class ProcessTotals:
    """Counts since the first tap was installed, or since the fork in a forked child.

    `backwards` calls that add to `.grad`; `grad_calls` calls of `torch.autograd.grad`; `steps` calls of an optimizer's
    `step`, and `nested` those that are part of another one (`super().step()`, an optimizer that wraps an optimizer);
    `clips` calls of torch's `clip_grad_*`; `rejected` steps that a GradScaler kept from the optimizer; `optimizers` how
    many were made, and `stepped` of how many a step began or was rejected; `raised` those of the `steps` that an
    exception ended, noticed when the thread steps again or exits.
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

    def count_clip(self) -> None:
        """Count a call of one of torch's `clip_grad_*`."""
        self.clips += 1

    def count_optimizer(self, optimizer: object | None) -> None:
        """Count an optimizer that is made; None, of which it is not known which one, is not counted."""
        self.optimizers += optimizer is not None

    def taken(self) -> Taken:
        """The counts as of now."""
        return Taken(**{each.name: getattr(self, each.name) for each in fields(self)})

    def reset(self) -> None:
        """Start at 0 again."""
        for each in fields(self):
            setattr(self, each.name, 0)


TOTALS = ProcessTotals()
_optimizers = Distinct()  # those that were stepped, each counted once
open_steps: dict[int, list[tuple[int, int]]] = {}
"""By thread, of each call of `step` under way: the number of the step it is part of, and the optimizer by `id`."""
_last: dict[int, int] = {}  # by thread, the number of the step that began last
_numbers = itertools.count(1)


def step_begins(optimizer: object, part_of: Callable[[], list[bool]]) -> None:
    """Count a step of this optimizer unless it is part of the one around it on this thread.

    `part_of()` says of each call of `step` that the thread's stack shows around this one, the innermost first, whether
    this one is part of it; it is asked only where a step seems to be open, which one that raised leaves behind too.
    """
    thread = threading.get_ident()
    calls = open_steps.get(thread)
    if calls is None:
        calls = open_steps[thread] = []
    if calls:
        around = part_of()
        _raised(calls, len(around))
        if calls and around[0]:
            calls.append((calls[-1][0], id(optimizer)))
            TOTALS.nested += 1
            return
    _last[thread] = number = next(_numbers)
    calls.append((number, id(optimizer)))
    TOTALS.steps += 1
    if _optimizers.last() is not optimizer:
        _optimizers.add(optimizer)
        TOTALS.stepped = _optimizers.count


def step_rejected(optimizer: object) -> None:
    """Count a step that a GradScaler has not called."""
    TOTALS.rejected += 1
    _optimizers.add(optimizer)
    TOTALS.stepped = _optimizers.count


def _raised(calls: list[tuple[int, int]], left: int) -> None:
    """End all calls but the first `left`: they have not returned and are not under way, so an exception ended them."""
    ended = {number for number, _ in calls[left:]}
    del calls[left:]
    TOTALS.raised += len(ended.difference(number for number, _ in calls))


def present_step(optimizer: object) -> int:
    """A number for the step of this optimizer that is under way, else for the last step of this thread; 0 before any.

    Never used twice; the parts of a step have its number. A step may run its closure in another thread than its own.
    """
    thread = threading.get_ident()
    own = open_steps.get(thread, [])
    for calls in (own, *list(open_steps.values())):
        for number, one in reversed(calls):
            if one == id(optimizer):
                return number
    return _last.get(thread, 0)


def steps_under_way() -> int:
    """Number of threads that are in a step now, or whose last one was ended by an exception."""
    return sum(map(bool, list(open_steps.values())))


def ended_by_exceptions(under_way: int = 0) -> None:
    """Count calls of `step` on this thread as ended by an exception, but for so many that are under way."""
    _raised(open_steps.get(threading.get_ident(), []), under_way)


def step_ends(optimizer: object) -> None:
    """End a step of this optimizer, the last that began on this thread."""
    calls = open_steps.get(threading.get_ident(), [])
    while calls:
        number, ended = calls.pop()
        if ended == id(optimizer):
            break
        TOTALS.raised += number not in {number for number, _ in calls}


@contextmanager
def uncounted() -> Iterator[None]:
    """Leave backwards out of the counts that gradwatch itself runs in here."""
    before = TOTALS.backwards, TOTALS.grad_calls
    try:
        yield
    finally:
        TOTALS.backwards, TOTALS.grad_calls = before


def _start_again() -> None:
    """Start again from zero in a forked child: what the parent did is counted there."""
    TOTALS.reset()
    _optimizers.reset()
    open_steps.clear()
    _last.clear()


os.register_at_fork(after_in_child=_start_again)
