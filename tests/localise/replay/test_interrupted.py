"""Ctrl-C or a signal while a step is run again: what it raises reaches the script, and the model is as it was."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from tests.localise.test_in_the_loop import rules
from tests.support.kept import Kept


class Interrupting:
    """Raises KeyboardInterrupt at the n-th line that is run of torch's exchange of parameters."""

    def __init__(self, line: int) -> None:
        self._left = line

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Follow only that file."""
        return self._line if frame.f_code.co_filename.endswith("_named_member_accessor.py") else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("line", range(5, 330, 36))
def test_the_parameters_are_in_their_places(line: int) -> None:
    """The same tensors, with their gradients: else the optimizer would step others than the model is run with."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with gradwatch.watch(net, optimizer, rules=rules(), sinks=[Kept()], strict=True):
        x = torch.randn(6, 4)
        x[2, 1] = float("nan")
        net(x).sum().backward()
        before = [*net.parameters(), *net.buffers()]
        grads = [param.grad for param in net.parameters()]
        tracing = sys.gettrace()
        sys.settrace(Interrupting(line))
        try:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        finally:
            sys.settrace(tracing)
        after = [*net.parameters(), *net.buffers()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(param.grad is grad for param, grad in zip(net.parameters(), grads, strict=True))


class PreemptedError(Exception):
    """What a handler of SIGTERM raises, to save and leave."""


class Preempted(nn.Module):
    """A model in whose n-th call a signal arrives."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.calls = iter(range(1, 100))  # nothing puts it back
        self.nth = nth

    def forward(self, x: Tensor) -> Tensor:
        """One row a sample."""
        if next(self.calls) == self.nth:
            signal.raise_signal(signal.SIGUSR1)
        return self.layer(x)


LARGE = """
version: 1
rules:
  large: {detect: {kind: above, of: total_norm, threshold: 1e3}, do: [localise: {by: replay}]}
"""


def preempted(nth: int, bad: float, given: RuleSet) -> bool:
    """True if what the handler raises in one step that is looked at reaches the script."""
    torch.manual_seed(0)
    net = Preempted(nth)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def handler(number: int, frame: FrameType | None) -> None:
        raise PreemptedError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with gradwatch.watch(net, optimizer, rules=given, sinks=[Kept()]):
            y = torch.randn(16, 1)
            y[3] *= bad
            (net(torch.randn(16, 4)) - y).square().mean().backward()
            optimizer.step()
    except PreemptedError:
        return True
    finally:
        signal.signal(signal.SIGUSR1, before)
    return False


@pytest.mark.parametrize("nth", [2, 3])
@pytest.mark.parametrize("bad", [float("nan"), 1e6])
def test_what_a_signal_handler_raises_reaches_the_script(nth: int, bad: float) -> None:
    """In the replay, and in the run after it: of loss code that made a NaN, or for the rows of a large gradient."""
    given = parse_rules(LARGE) if bad == 1e6 else rules()
    assert preempted(nth, bad, given)
