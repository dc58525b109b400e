"""Bounds on loss code run again: expressions, seconds, bytes."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.loss.interpreter import effort_limits
from gradwatch.localise.loss.interpreter.effort_limits import Effort, TooMuchError
from gradwatch.localise.loss.interpreter.interpreter import Interpreter
from gradwatch.localise.loss.interpreter.scope import Scope


def run(code: str, bounds: Effort, **values: Any) -> None:
    """Interpret code within bounds."""
    scope = Scope("train.py", "<module>", values, {})
    Interpreter(InterpretedLines(), lambda *_: NotImplemented, bounds).run(ast.parse(code).body, scope)


def test_a_long_loop_ends() -> None:
    """A loop without an end is left after so many expressions."""
    with pytest.raises(TooMuchError, match="operations"):
        run("k = 0\nwhile True:\n    k += 1", Effort())


def test_few_slow_operations_end() -> None:
    """Between two expressions the clock is looked at; a second try gets no more seconds."""
    now = [0.0]
    bounds = Effort(lambda: now[0])
    run("y = a + a", bounds, a=1)
    now[0] = effort_limits.SECONDS + 1
    with pytest.raises(TooMuchError, match="longer than"):
        run("y = a + a", bounds, a=1)
    bounds.begin_try()
    with pytest.raises(TooMuchError, match="longer than"):
        run("y = a + a", bounds, a=1)


def test_large_tensors_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it makes is kept until the end: only so much is made, and a second try may make as much again."""
    monkeypatch.setattr(effort_limits, "BYTES", 1 << 24)
    bounds = Effort()
    a = torch.zeros(effort_limits.BYTES // 16)  # of 4 bytes each: a quarter of what is allowed
    run("for k in range(3):\n    y = a + k", bounds, a=a)
    with pytest.raises(TooMuchError, match="MiB"):
        run("for k in range(3):\n    y = a + k", bounds, a=a)
    bounds.begin_try()
    run("y = a.view(2, -1)[0] + 0", bounds, a=a)
