"""Signals that end a command."""

from __future__ import annotations

import os
import signal

import pytest

from gradwatch.cli.processes.ending_signals import ended_by_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_exception_once(number: signal.Signals) -> None:
    """A second one does not end the tidying up; afterwards the handlers are as before."""
    before, tidied = signal.getsignal(number), list[str]()

    def command() -> None:
        with ended_by_signals():
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)
                tidied.append("up")

    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 128 + number
    assert tidied == ["up"]
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored() -> None:
    """As of `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
