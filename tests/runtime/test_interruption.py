"""Exceptions that a script's own signal handler raises while code of ours runs: they belong to the script."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.interruption import by_signal_handler, not_ours
from tests.support.kept import Kept


class PreemptedError(Exception):
    """What a script raises from its handler to leave its loop."""


def leave(number: int, frame: FrameType | None) -> None:
    raise PreemptedError


class Leaver:
    def leave(self, number: int, frame: FrameType | None) -> None:
        raise PreemptedError

    __call__ = leave


def chained(number: int, frame: FrameType | None) -> None:
    try:
        leave(number, frame)
    except PreemptedError as error:
        raise RuntimeError("leaving") from error


@pytest.fixture
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    "handler",
    [leave, Leaver().leave, Leaver(), functools.partial(leave), chained],
    ids=["function", "method", "object", "partial", "chained"],
)
def test_a_handlers_exception_is_told_from_a_fault(handler: Callable[[int, FrameType | None], None]) -> None:
    """Functions, methods, callable objects and partials are recognised, and only while they are installed."""
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(Exception) as caught:
        signal.raise_signal(signal.SIGUSR1)
    assert by_signal_handler(caught.value)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert not by_signal_handler(caught.value)


@pytest.mark.usefixtures("restored")
def test_a_fault_is_counted_although_a_handler_is_installed() -> None:
    """Only what passed through the handler is raised again."""
    signal.signal(signal.SIGUSR1, leave)
    health = Health()
    health.report("capture", ValueError("ours"))
    assert health.errors() == {"capture": 1}
    with pytest.raises(PreemptedError) as caught:
        signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(PreemptedError):
        health.report("capture", caught.value)
    assert health.errors() == {"capture": 1}


class Interrupts(Kept):
    """A sink during whose work the signal arrives."""

    def write(self, record: object) -> None:
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.usefixtures("restored")
def test_a_signal_that_arrives_in_a_sink_reaches_the_loop() -> None:
    """The breaker of a sink neither counts nor keeps what the script's handler raised."""
    signal.signal(signal.SIGUSR1, leave)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[Interrupts()]) as gw:
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(PreemptedError):
            optimizer.step()
        assert gw.health.errors() == {}


class Signals(torch.autograd.Function):
    """Has the signal arrive while the engine works its way to the parameters."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        return grad


@pytest.mark.usefixtures("restored")
def test_a_signal_during_backward_reaches_the_loop_each_time() -> None:
    """The handler runs at the next bytecode, which during a backward is a mark of ours."""
    before = signal.signal(signal.SIGALRM, leave)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        left = 0
        with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[Kept()]) as gw:
            for _ in range(20):
                with_signal = Signals.apply(model(torch.randn(64, 256))).square().mean()  # type: ignore[no-untyped-call]
                try:
                    with_signal.backward()
                    optimizer.step()
                    while signal.getitimer(signal.ITIMER_REAL)[0]:
                        pass
                except PreemptedError:
                    left += 1
            errors = gw.health.errors()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (left, errors) == (20, {})


def test_what_an_enum_raises_is_no_signal_handlers() -> None:
    """SIG_DFL is a member of an enum, whose members are made by a call: a ValueError from there is a fault like any."""
    with pytest.raises(ValueError, match="12345") as raised:
        signal.Handlers(12345)
    assert not by_signal_handler(raised.value)


class SentError(Exception):
    """What a thread of the script sends."""


def send(kind: type[Exception] = SentError) -> None:
    """As a timeout does from its thread; it arrives within some instructions."""
    ident = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(kind))
    for _ in range(100):
        pass


def test_a_sent_exception_is_told_from_a_fault() -> None:
    """By its class and by where it was raised: one that a `raise` raised began there."""
    with pytest.raises(SentError) as caught:
        send()
    assert not_ours(caught.value)
    with pytest.raises(SentError) as caught:
        raise SentError
    assert not not_ours(caught.value)
    with pytest.raises(RuntimeError) as fault:
        send(RuntimeError)
    assert not not_ours(fault.value)  # cannot be told apart, and is counted


class Sends(Kept):
    """A sink during whose work the exception arrives."""

    def write(self, record: object) -> None:
        send()


def test_an_exception_sent_during_a_step_reaches_the_loop() -> None:
    """Wherever of ours it arrives, neither the breaker of a sink nor the guard of a hook keeps it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[Sends()]) as gw:
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
            with pytest.raises(SentError):
                optimizer.step()
        assert gw.health.errors() == {}


PACKAGE = os.path.dirname(gradwatch.__file__)


class Deadline:
    """A trace function that raises an error at the `limit`th line of gradwatch, and uninstalls itself before."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, frame: FrameType, event: str, value: object) -> Deadline:
        if event == "line" and frame.f_code.co_filename.startswith(PACKAGE):
            self.limit -= 1
            if not self.limit:
                sys.settrace(None)
                raise ValueError("time is up")
        return self


@pytest.mark.parametrize("limit", [1, 10, 40, 100, 200])
def test_what_a_trace_function_raises_arrives(limit: int) -> None:
    """A deadline, or a debugger that is left: of any class, and nothing of it is counted as a fault."""
    model, before = nn.Linear(2, 1), sys.gettrace()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, sinks=[Kept()]) as gw:
        train(model, optimizer, 3)
        sys.settrace(Deadline(limit))
        try:
            with pytest.raises(ValueError, match="time is up"):
                train(model, optimizer, 20)
        finally:
            sys.settrace(before)
        assert gw.health.errors() == {}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
