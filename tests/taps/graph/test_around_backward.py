"""Functions called around the backwards of their own thread, for the length of a block."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gradwatch.runtime import guard
from gradwatch.taps.graph import around_backward


def backward() -> Tensor:
    """The gradient of a small graph."""
    x = torch.ones(2, requires_grad=True)
    (x * 3).sum().backward()
    assert x.grad is not None
    return x.grad


def counting(seen: list[int]) -> Callable[[Sequence[Tensor]], None]:
    """Notes how many roots a backward has."""
    return lambda roots: seen.append(len(roots))


def test_each_thread_is_given_its_own_backwards() -> None:
    """Two threads that record at once, and leave in the order in which they came, see one backward each."""
    found = torch.autograd._engine_run_backward
    mine: list[int] = []
    theirs: list[int] = []
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with around_backward.watched(counting(theirs)):
            entered.set()
            left.wait()
            backward()

    thread = threading.Thread(target=other)
    with around_backward.watched(counting(mine)):
        thread.start()
        entered.wait()
        assert backward().tolist() == [3.0, 3.0]
    left.set()
    thread.join()
    backward()
    assert (mine, theirs) == ([1], [1])
    assert torch.autograd._engine_run_backward is found


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fault_around_a_backward_does_not_reach_it(when: str) -> None:
    """It is counted, and the backward has run."""

    def fail() -> None:
        raise ValueError("ours")

    def watch(roots: Sequence[Tensor]) -> Callable[[], None]:
        if when == "before":
            fail()
        return fail

    faults: list[str] = []
    remove = guard.listen(lambda component, error: faults.append(f"{component}: {error}"))
    try:
        with around_backward.watched(watch):
            assert backward().tolist() == [3.0, 3.0]
    finally:
        remove()
    assert faults == ["localise: ours"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python adds the frame again")
def test_a_backward_that_raises_has_the_traceback_that_it_has_bare() -> None:
    """Frame by frame, and what is called at its end is called."""

    def fail(grad: Tensor) -> None:
        raise ValueError("the script's")

    def raised() -> list[str]:
        x = torch.ones(2, requires_grad=True)
        x.register_hook(fail)
        with pytest.raises(ValueError, match="the script's") as caught:
            x.sum().backward()
        return [f"{each.filename}:{each.lineno}" for each in traceback.extract_tb(caught.tb)]

    bare, ended = raised(), []
    with around_backward.watched(lambda roots: lambda: ended.append(len(roots))):
        assert raised() == bare
    assert ended == [1]
