"""Objects counted once each and their deaths noted, none kept alive."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import FrameType

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwatch
from gradwatch.runtime import weak_references
from gradwatch.runtime.weak_references import Distinct, HeldByOwner, Refs, noted


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
    weak_references.died.clear()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    del dies
    sys.setprofile(None)
    assert type(weak_references.died) is list
    assert [one is refs[0] for one in weak_references.died] == [True]
    assert calls == []
    weak_references.died.clear()


def test_a_list_is_emptied_where_its_owner_dies_and_no_python_runs_for_it() -> None:
    """What it held is gone in the next line, and neither a call nor a line of Python was executed in between."""
    seen: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        seen.append(f"{event} {frame.f_code.co_name}")

    owner, held = Thing(), [Thing(), Thing()]
    refs, kept = [weakref.ref(one) for one in held], weak_references.emptied_with(owner, held)
    sys.setprofile(trace)
    del owner
    sys.setprofile(None)
    assert kept() is None
    assert held == []
    assert [ref() for ref in refs] == [None, None]
    assert [event for event in seen if event.startswith("call")] == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["hold", "drop", "die"]), st.integers(0, 5), st.integers(0, 2)), max_size=60
    )
)
def test_each_is_held_as_long_as_its_owner_lives(moves: list[tuple[str, int, int]]) -> None:
    """By whatever moves: under a number is what a mapping of living owners says, and nothing else lives."""
    gone, owners = Thing(), {k: Thing() for k in range(3)}
    table, model = HeldByOwner(gone), dict[int, tuple[int, weakref.ref[Thing]]]()
    for _ in range(6):
        table.reserve()
    for move, number, owner in moves:
        if move == "hold":
            one = Thing()
            table.hold([number], [one], owners[owner])
            model[number] = owner, weakref.ref(one)
            del one
        elif move == "drop":
            table.drop(number)
            model.pop(number, None)
        else:
            lost = {k for k, (of, _) in model.items() if of == owner}
            owners[owner] = Thing()  # the one before it dies
            assert lost <= set(table.lost())
            for k in lost:
                ref = model.pop(k)[1]
                assert ref() is None
                table.drop(k)
    for k in range(6):
        assert table[k] is (model[k][1]() if k in model else gone)


def test_a_reference_in_a_set_dies_with_its_object_and_no_python_runs_for_it() -> None:
    """What is gone is none of those alive, and another object at its address is another one."""
    refs: Refs[Thing] = Refs()
    dies, lives = Thing(), Thing()
    refs.update(map(weakref.ref, (dies, lives)))
    calls: list[str] = []
    gc.collect()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    known = weakref.ref(dies) in refs
    del dies
    sys.setprofile(None)
    assert (known, calls) == (True, [])
    assert refs.alive() == [lives]
    for _ in range(1000):
        one = Thing()  # the one before it dies
        refs.add(weakref.ref(one))
        if len(refs) > refs.most:
            refs.drop_dead()
    other = Thing()
    assert (weakref.ref(lives) in refs, weakref.ref(other) in refs) == (True, False)
    assert len(refs) <= 65


def test_optimizers_are_held_without_callbacks(tmp_path: Path) -> None:
    """None of the references to an optimizer that a watch holds runs Python where it dies: a Ctrl-C would be lost."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stranger = torch.optim.SGD(nn.Linear(4, 1).parameters(), 0.1)
    calls: list[str] = []
    with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[], run_dir=tmp_path):
        for one in (optimizer, stranger):
            model(torch.randn(2, 4)).sum().backward()
            one.step()
        del one
        gc.collect()
        sys.setprofile(
            lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None
        )
        del optimizer, stranger
        sys.setprofile(None)
    assert [name for name in calls if name != "__hash__"] == []
