"""Locks in a process that forks while another of its threads holds them."""

from __future__ import annotations

import os
import threading

from gradwatch.runtime.locks import ForkSafeLock


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
