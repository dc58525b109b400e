"""Training in several threads at once: no thread looks at a gradient that another may be changing."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from gradwatch.reading.training_threads import TrainingThreads, several_at_work
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


def test_threads_that_have_ended_or_wait_for_work_are_not_at_work() -> None:
    """Not one whose number another thread has by now, nor one of a pool between two tasks; one in a task is."""
    threads, work, done = TrainingThreads(), threading.Event(), threading.Event()

    def train() -> None:
        threads.began(threading.get_ident())

    def train_and_wait() -> None:
        train()
        work.set()
        assert done.wait(60)

    train()
    ended = threading.Thread(target=train)
    ended.start()
    ended.join()
    assert not several_at_work()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train).result(60)
        assert not several_at_work()
        waiting = pool.submit(train_and_wait)
        assert work.wait(60)
        assert several_at_work()
        done.set()
        waiting.result(60)
        assert not several_at_work()


def test_a_number_that_another_thread_has_by_now_is_not_at_work() -> None:
    """Python gives the numbers of threads that have ended to the next ones."""
    threads, held = TrainingThreads(), threading.Event()
    threads.began(threading.get_ident())
    taken: set[int] = set()

    def train() -> None:
        taken.add(threading.get_ident())
        threads.began(threading.get_ident())

    for _ in range(20):
        one = threading.Thread(target=train)
        one.start()
        one.join()

    def hold() -> None:
        held.wait(60)

    others = [threading.Thread(target=hold) for _ in range(4)]
    for other in others:
        other.start()
    assert taken & {other.ident for other in others}
    try:
        assert not several_at_work()
    finally:
        held.set()
        for other in others:
            other.join()


def test_one_that_waits_for_the_end_of_this_thread_is_not_at_work() -> None:
    """As a main thread that has warmed up, and has another one train."""
    threads = TrainingThreads()
    found: list[bool] = []
    threads.began(threading.get_ident())
    main = threading.current_thread()

    def train() -> None:
        threads.began(threading.get_ident())
        while not _is_in_join(main):
            time.sleep(0.01)
        found.append(several_at_work())

    one = threading.Thread(target=train)
    one.start()
    one.join()
    assert found == [False]


def _is_in_join(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code is threading.Thread.join.__code__:
            return True
        frame = frame.f_back
    return False
