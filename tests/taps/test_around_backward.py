"""Backwards handed to a function that runs them: those of its own thread, for the length of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwatch.taps.graph import around_backward


def backward() -> Tensor:
    """The gradient of a small graph."""
    x = torch.ones(2, requires_grad=True)
    (x * 3).sum().backward()
    assert x.grad is not None
    return x.grad


def counting(seen: list[int]) -> Callable[[Sequence[Tensor], Callable[[], Any]], Any]:
    """Runs the backward, and notes how many roots it had."""

    def watch(roots: Sequence[Tensor], run: Callable[[], Any]) -> Any:
        seen.append(len(roots))
        return run()

    return watch


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
