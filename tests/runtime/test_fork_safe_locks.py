"""Locks in a process that forks while another of its threads holds them."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.weights.weight_health import Weights
from gradwatch.runtime.fork_safe_locks import ForkSafeLock
from gradwatch.runtime.internal_errors import Health


def test_what_another_thread_held_is_free_in_a_forked_child() -> None:
    """The child takes the lock at once; the parent's thread holds it as before, and others wait for it."""
    lock, taken, done = ForkSafeLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock.held:
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    child = os.fork()
    if not child:
        os._exit(0 if lock.held.acquire(timeout=120) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not lock.held.acquire(blocking=False)
    done.set()
    thread.join()
    assert lock.held.acquire(blocking=False)


def test_whoever_holds_it_may_take_it_again() -> None:
    """A signal handler, or code that binds rules while it makes captures, does not wait for itself."""
    lock = ForkSafeLock()
    with lock.held:
        assert lock.held.acquire(blocking=False)
        lock.held.release()


@pytest.mark.parametrize(
    ("kind", "lock"), [(OptimizerCapture, "_reading"), (Weights, "_lock"), (Health, "_lock")]
)
def test_a_forked_child_never_waits_for_a_watch_of_the_parent(
    kind: type[Any], lock: str, tmp_path: Path
) -> None:
    """Whatever another thread did with the watch at the fork, the child trains, asks and closes."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def train() -> None:
        model(torch.ones(2, 3)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with gradwatch.watch(model, optimizer, run_dir=tmp_path, listen="127.0.0.1:0") as gw:
        train()
        owner = next(one for one in gc.get_objects() if type(one) is kind)
        found = getattr(owner, lock)
        taken, done = threading.Event(), threading.Event()

        def hold() -> None:
            with getattr(found, "held", found):
                taken.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait()
        child = os.fork()
        if not child:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)  # what hangs is ended
                train()
                with getattr(getattr(owner, lock), "held", found):
                    gw.status()
                assert gw.healthy in (True, False)
                gw.close()
                os._exit(0)
            finally:
                os._exit(1)
        ended = os.waitpid(child, 0)[1]
        done.set()
        thread.join()
    assert os.waitstatus_to_exitcode(ended) == 0
