"""Ctrl-C while a step is run again: it reaches the script, and the model is as it was."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
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
