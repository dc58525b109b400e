"""Threads in which module hooks are muted, over a fork."""

from __future__ import annotations

import os
import threading

from gradwatch.taps.muted_forwards import is_muted, muted, muted_threads


def test_a_fork_keeps_only_the_thread_that_forked() -> None:
    """A thread of the child with the number of one that was muted in the parent would record no forward."""
    entered, leave = threading.Event(), threading.Event()

    def mute() -> None:
        with muted():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=mute)
    thread.start()
    entered.wait(60)
    with muted():
        child = os.fork()
        if child == 0:
            own = [threading.get_ident()]
            os._exit(0 if muted_threads == own and is_muted() else 1)
        _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert status == 0
    assert not muted_threads
