"""The pause between attempts, on a clock that the test moves."""

from __future__ import annotations

from gradwatch.runtime.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    """One failure after the other."""
    pauses = Backoff(0.25, 10.0)
    assert [pauses.failed() for _ in range(8)] == [0.25, 0.5, 1, 2, 4, 8, 10, 10]


def test_it_is_ready_when_the_pause_is_over() -> None:
    """Not before; and at once after a success, when pauses are short again too."""
    now = 100.0
    pauses = Backoff(1.0, 60.0, lambda: now)
    assert (pauses.ready, pauses.failing, pauses.until) == (True, False, 0.0)
    pauses.failed()
    pauses.failed()
    assert (pauses.ready, pauses.failing, pauses.until) == (False, True, 102.0)
    now = 102.0
    assert pauses.ready
    now = 101.0
    pauses.succeeded()
    assert (pauses.ready, pauses.failing, pauses.failed()) == (True, False, 1.0)
