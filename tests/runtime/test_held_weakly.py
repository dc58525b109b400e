"""Objects counted once each and their deaths noted, none kept alive."""

from __future__ import annotations

import gc
import sys
import weakref

from hypothesis import given
from hypothesis import strategies as st

from gradwatch.runtime import held_weakly
from gradwatch.runtime.held_weakly import Distinct, noted


class Thing:
    """An object that can be held weakly, and that owns its address only while it lives."""


@given(st.lists(st.integers(0, 9), max_size=200))
def test_each_is_counted_once(order: list[int]) -> None:
    """In whatever order living objects come by, the count is of the different ones."""
    things, found = [Thing() for _ in range(10)], Distinct()
    for index in order:
        found.add(things[index])
    assert found.count == len(set(order))


def test_those_that_are_gone_stay_counted_and_are_not_held() -> None:
    """A thousand in a row, most at the address of the one before: a thousand, none alive, few remembered."""
    found, last = Distinct(), None
    for _ in range(1000):
        thing = Thing()
        found.add(thing)
        found.add(thing)
        last = weakref.ref(thing)
    del thing
    gc.collect()
    assert found.count == 1000
    assert last is not None
    assert last() is None
    assert len(found._seen) <= 65


def test_a_death_is_noted_without_python() -> None:
    """The reference lies in a plain list, and no Python has run to put it there; that of a living object does not."""
    calls: list[str] = []
    dies, lives = Thing(), Thing()
    refs = [noted(dies), noted(lives)]
    gc.collect()
    held_weakly.died.clear()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    del dies
    sys.setprofile(None)
    assert type(held_weakly.died) is list
    assert [one is refs[0] for one in held_weakly.died] == [True]
    assert calls == []
    held_weakly.died.clear()
