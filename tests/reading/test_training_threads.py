"""Training in several threads at once: no thread looks at a gradient that another may be changing."""

from __future__ import annotations

import sys

from gradwatch.reading.training_threads import TrainingThreads
from tests.reading.training_in_threads import CHANGES
from tests.support import warm


def test_training_in_threads_goes_on_as_in_turn() -> None:
    """Under one watch, no loop of four threads ends the process, and each computes the weights that it does alone."""
    done = warm.run([sys.executable, "-m", "tests.reading.training_in_threads", *CHANGES], timeout=240)
    assert (done.stdout.splitlines(), done.returncode) == ([f"{loop}: " for loop in CHANGES], 0), done.stderr


def test_one_thread_may_look_at_everything() -> None:
    """Until a second thread has called `backward`, gradients are looked at whoever used them last."""
    threads = TrainingThreads()
    for _ in range(2):
        if threads.first != 7:
            threads.began(7)
        assert threads.may_look(0)
        assert threads.may_look(8)
    threads.began(8)
    assert not threads.may_look(0)
    assert not threads.may_look(8)
