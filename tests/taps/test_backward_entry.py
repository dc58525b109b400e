"""The entry of a backward, noticed: what is told of it, and that nothing of it is left in a traceback."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from gradwatch.taps import backward_entry
from gradwatch.taps.backward_entry import BackwardCall
from gradwatch.taps.process_totals import TOTALS


def test_each_entry_is_told_with_its_roots() -> None:
    """`backward`, `autograd.grad`, several roots and `inputs=` are told apart."""
    calls: list[BackwardCall] = []
    x = torch.ones(3, requires_grad=True)
    remove = backward_entry.listen(calls.append)
    loss, other = (x * 2).sum(), (x * 3).sum()
    loss.backward()
    torch.autograd.grad((x * 2).sum(), x)
    torch.autograd.backward([other, x * 1], [None, torch.ones(3)], inputs=[x])
    remove()
    assert [call.accumulates for call in calls] == [True, False, True]
    assert calls[0].roots[0] is loss
    assert len(calls[2].roots) == 2
    assert calls[2].inputs[0] is x
    assert not any(call.nested for call in calls)


def test_a_backward_inside_a_backward_is_nested() -> None:
    """Reentrant checkpointing runs an engine of its own inside the outer one."""
    calls: list[BackwardCall] = []
    x = torch.ones(3, requires_grad=True)
    remove = backward_entry.listen(calls.append)
    checkpoint(lambda x: (x * x).sum(), x, use_reentrant=True).backward()
    remove()
    assert [call.nested for call in calls] == [False, True]


def test_torch_gets_its_engine_back_from_the_last_listener() -> None:
    """Two listeners share one engine; it stays until both have left."""
    before = Variable._execution_engine
    first = backward_entry.listen(lambda call: None)
    second = backward_entry.listen(lambda call: None)
    assert Variable._execution_engine is not before
    first()
    assert Variable._execution_engine is not before
    second()
    second()
    assert Variable._execution_engine is before


def test_a_backward_that_raises_shows_no_frame_of_gradwatch() -> None:
    """The traceback of a script's own error is the same with and without a listener."""

    def said() -> str:
        x = torch.ones(3, requires_grad=True)
        loss = x.exp().sum()
        loss.backward()
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        return "".join(traceback.format_tb(caught.value.__traceback__))

    bare = said()
    remove = backward_entry.listen(lambda call: None)
    watched = said()
    remove()
    assert watched == bare


def test_a_listener_is_called_only_where_what_it_waits_for_is_there() -> None:
    """One of its containers suffices."""
    x, calls = torch.ones(3, requires_grad=True), list[BackwardCall]()
    one, other = list[int](), set[int]()
    remove = backward_entry.listen(calls.append, one, other)
    x.sum().backward()
    assert not calls
    other.add(1)
    x.sum().backward()
    assert len(calls) == 1
    remove()


def test_each_backward_is_counted_once_however_many_listen() -> None:
    """Backwards and calls of `autograd.grad` apart; what runs inside another one is a part of that."""
    x = torch.ones(3, requires_grad=True)
    removes = [backward_entry.count_backwards(), backward_entry.count_backwards()]
    removes.append(backward_entry.listen(lambda call: None))
    before = TOTALS.backwards, TOTALS.grad_calls
    checkpoint(lambda x: (x * x).sum(), x, use_reentrant=True).backward()
    torch.autograd.grad(x.sum(), x)
    assert (TOTALS.backwards - before[0], TOTALS.grad_calls - before[1]) == (1, 1)
    for remove in removes:
        remove()
    x.sum().backward()
    assert TOTALS.backwards - before[0] == 1
