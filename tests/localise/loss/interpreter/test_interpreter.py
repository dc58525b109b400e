"""Interpreted loss code: the same values as Python computes, and nothing called or written that could be seen."""

from __future__ import annotations

import ast
import math
import textwrap
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter.interpreter import Interpreter
from gradwatch.localise.loss.interpreter.scope import Scope

said: list[str] = []


def smooth(a: Tensor, b: Tensor, *, eps: float = 1e-3) -> Tensor:
    """A loss of the user's own."""
    total = torch.zeros(())
    for row in (a - b).abs():
        if row.numel() == 0:
            continue
        total += (row + eps).sqrt().mean()
    return total / len(a)


def speaks(a: Tensor) -> Tensor:
    """A loss that leaves something behind."""
    said.append("called")
    return a.sum()


def reads_a_clock(a: Tensor) -> Tensor:
    """A loss that is another one every time."""
    return a.sum() * time.time()


class Scaled:
    """A loss that is an object."""

    def __init__(self) -> None:
        self.factor = 3.0
        self.calls = self.offset = 0

    @property
    def half(self) -> float:
        """Half the factor."""
        return self.factor / 2

    def __call__(self, a: Tensor) -> Tensor:
        self.calls += 1
        self.offset = a.numel()
        return self.half * a.mean() + self.offset


def run(code: str, **values: Any) -> dict[str, Any]:
    """The names after the code was interpreted."""
    scope = Scope("train.py", "<module>", dict(values), globals())
    Interpreter(InterpretedLines(), lambda *_: NotImplemented).run(
        ast.parse(textwrap.dedent(code)).body, scope
    )
    return scope.values


@pytest.mark.parametrize(
    "code",
    [
        "y = smooth(a, b, eps=1e-2)",
        "y = sum(w * t.mean() for w, t in zip((1, 2), (a, b)) if w > 1)",
        "k, *rest = a[:, 1:].unbind(1)\ny = torch.stack([k, *rest], -1).logsumexp(-1)",
        "y = a.clone()\ny[0] = 1.0\ny.mul_(2)\ny += b",
        "d = {'x': a.sum()}\nd['z'] = b.sum()\ny = sum(d.values())",
        "f = lambda_ if False else math.sqrt\ny = f(2.0) * (a if a.numel() else b)",
        "with torch.no_grad():\n    m = a.mean()\ny = nn.functional.huber_loss(a, b) + m",
        "i = 0\nwhile True:\n    i += 1\n    if i > 3:\n        break\ny = a ** i",
        "y = -a if not (a > 0).all() and 0 < len(a) <= 4 else +a",
    ],
)
def test_the_same_values(code: str) -> None:
    """Python's own result, bit for bit."""
    torch.manual_seed(0)
    values = {"a": torch.randn(4, 3), "b": torch.randn(4, 3)}
    expected = dict(values)
    exec(code, dict(globals()), expected)
    assert torch.equal(run(code, **values)["y"], expected["y"])


@pytest.mark.parametrize(
    "code",
    [
        "y = speaks(a); z = said[0]",
        "y = reads_a_clock(a)",
        "y = open('/nonexistent')",
        "import os",
        "y = list(map(smooth, [a], [a]))",
        "y = a.backward()",
        "y = torch.add(a, a, out=a)",
        "y = torch.manual_seed(1)",
        "y = torch.utils.checkpoint.checkpoint(smooth, a, a)",
        "y = nn.functional.relu(a, inplace=True)",
        "y = iter_(a)",
        "y = sum(drawn)",
        "for x in drawn:\n    y = x",
        "x, *y = drawn",
        "y = 1 in drawn",
        "y = torch.autograd.grad(hooked.sum(), hooked)",
    ],
)
def test_what_is_refused(code: str) -> None:
    """What could be seen, or gives something else the next time, is refused before it is called."""
    said.clear()
    a = torch.randn(3)
    before, state, drawn = a.clone(), torch.get_rng_state(), iter([1, 2, 3])
    hooked = torch.ones(2, requires_grad=True)
    hooked.register_hook(lambda grad: said.append("hook"))
    with pytest.raises(Refused):
        run(code, a=a, drawn=drawn, hooked=hooked)
    assert len(list(drawn)) == 3
    assert said == []
    assert torch.equal(a, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_it_writes_into_a_list_of_the_script_is_left_out() -> None:
    """The list keeps what it held; the function's value is as it would be."""
    said.clear()
    a = torch.randn(3)
    assert torch.equal(run("y = speaks(a)", a=a)["y"], a.sum())
    assert said == []


def test_attributes_are_set_beside_their_objects() -> None:
    """What is set here is read here, and not by the script."""
    loss, a = Scaled(), torch.ones(2)
    values = run("y = loss(a)\nz = loss(a)", loss=loss, a=a)
    assert (float(values["y"]), float(values["z"]), loss.calls, loss.offset) == (3.5, 3.5, 0, 0)


@pytest.mark.parametrize(
    "code",
    ["loss.calls += 1\ny = loss.calls", "y = loss.calls\nloss.calls += 1", "y = loss.calls\nloss.calls = 3"],
)
def test_what_an_attribute_was_before_it_was_changed_is_not_known(code: str) -> None:
    """The first run has changed it already: by what it is now another branch might be taken."""
    with pytest.raises(Refused, match="what it was before is not known"):
        run(code, loss=Scaled())
    run("loss.calls += 1\ny = 2", loss=Scaled())


def test_each_operation_belongs_to_its_line() -> None:
    """The line of the innermost function first, then the lines that called it."""
    lines = InterpretedLines()
    made: list[tuple[int, ...]] = []

    def call(module: nn.Module, arguments: Any) -> Any:
        made.append(tuple(frame.line for frame in lines.now))
        return arguments()[0][0]

    scope = Scope("train.py", "<module>", {"net": nn.Identity(), "a": torch.ones(1)}, globals())
    Interpreter(lines, call).run(ast.parse("b = net(a)\n\nc = net(\n    b)").body, scope)
    assert made == [(1,), (3,)]


def test_nan_is_no_other_value() -> None:
    """A function that divides zero by zero gives NaN here too."""
    assert math.isnan(run("y = (a / a).sum()", a=torch.zeros(2))["y"])
