"""Loss code run again asks no object of the user's whose answer is code, and writes into nothing of theirs."""

from __future__ import annotations

import ast
import collections
import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import gradwatch
from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter import purity
from gradwatch.localise.loss.interpreter.interpreter import Interpreter
from gradwatch.localise.loss.interpreter.scope import Scope
from tests.localise.test_in_the_loop import rules

said: list[str] = []


class Speaks:
    """Every operator that Python may ask leaves a word."""

    def __eq__(self, other: object) -> bool:
        said.append("eq")
        return True

    def __hash__(self) -> int:
        said.append("hash")
        return 1

    def __lt__(self, other: object) -> bool:
        said.append("lt")
        return True

    def __repr__(self) -> str:
        said.append("repr")
        return ""

    def __radd__(self, other: object) -> float:
        said.append("radd")
        return 1.0

    def __bool__(self) -> bool:
        said.append("bool")
        return True


class Asked:
    """A callable that notes who looks it up in a set, or asks it for what it has not."""

    def __hash__(self) -> int:
        said.append("hash")
        return 1

    def __eq__(self, other: object) -> bool:
        said.append("eq")
        return True

    def __getattr__(self, name: str) -> None:
        said.append(name)
        raise AttributeError(name)

    def __call__(self, x: Tensor) -> Tensor:
        return x.sum()


class Kind(type):
    """A metaclass that answers `isinstance`."""

    def __instancecheck__(cls, instance: object) -> bool:
        said.append("instancecheck")
        return True


class OfKind(metaclass=Kind):
    """Its class."""


class Missing(dict[Any, Any]):
    """A dict that computes what it lacks."""

    def __missing__(self, key: object) -> float:
        said.append("missing")
        return 1.0


class Modules(nn.ModuleList):
    """A list of modules that notes what is taken."""

    def __getitem__(self, index: Any) -> Any:
        said.append("getitem")
        return super().__getitem__(index)


class Rows(Dataset[Tensor]):
    """A data set that notes what is read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        said.append("row")
        return torch.ones(2)


class Told(Tensor):
    """A tensor that notes what is computed with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it."""
        said.append("torch function")
        return super().__torch_function__(func, types, args, kwargs or {})


def scope_of(values: dict[str, Any]) -> Scope:
    """A function's names over those of this file."""
    return Scope(__file__, "<module>", values, globals())


def run(code: str, values: dict[str, Any]) -> dict[str, Any]:
    """Interpret code; torch's modules are called."""

    def call(module: nn.Module, arguments: Any) -> Any:
        purity.check_module(module, stands_in=False)
        return module(*arguments()[0])

    scope = scope_of(values)
    Interpreter(InterpretedLines(), call).run(ast.parse(code).body, scope)
    return scope.values


def made() -> dict[str, Any]:
    """Names that the cases use."""
    return {
        "a": torch.randn(4, 3),
        "o": Speaks(),
        "told": torch.ones(2, dtype=torch.long).as_subclass(Told),
        "made_on_demand": collections.defaultdict(lambda: said.append("factory")),
        "missing": Missing(),
        "modules": Modules([nn.Identity()]),
        "rows": Subset(Rows(), [0]),
        "loader": DataLoader(Rows()),
        "generator": torch.Generator(),
        "mean": torch.zeros(3),
        "std": torch.ones(3),
        "norm": nn.BatchNorm1d(3),
        "rectify": nn.ReLU(inplace=True),
        "array": numpy.ones(2),
        "lists": [[1], [2, 3]],
        "append": said.append,
    }


@pytest.mark.parametrize(
    "code",
    [
        "[o] == [1]",
        "1 in [o]",
        "o in [1]",
        "sorted([o, o])",
        "sum([o])",
        "any([o])",
        "str([o])",
        "'%s' % (o,)",
        "{o: 1}",
        "{o}",
        "{k: 1 for k in [o]}",
        "{k for k in [o]}",
        "{1: 1}[o]",
        "sorted([1, 2], key=append)",
        "isinstance(a, OfKind)",
        "made_on_demand['new']",
        "missing['new']",
        "modules[0]",
        "rows[0]",
        "[x for x in loader]",
        "torch.stack([told])",
        "a[0, told]",
        "torch.randn(3, generator=generator)",
        "nn.functional.relu(a, True)",
        "nn.functional.dropout(a, 0.5, True, True)",
        "nn.functional.batch_norm(a, mean, std, training=True)",
        "nn.functional.embedding(torch.tensor([0]), a, max_norm=0.1)",
        "torch._foreach_mul_([a], 2.0)",
        "torch.use_deterministic_algorithms(False)",
        "norm(a)",
        "rectify(a)",
    ],
)
def test_refused(code: str) -> None:
    """Refused before a word is said, a number is drawn or a tensor is written."""
    values = made()
    said.clear()
    before = {name: value.clone() for name, value in values.items() if type(value) is Tensor}
    drawn, statistics = values["generator"].get_state(), values["norm"].running_mean.clone()

    def inside(statement: Callable[[], Any]) -> Any:
        return statement()

    with pytest.raises(Refused):
        run(
            f"y = inside(lambda: {code})" if "_foreach" in code else f"y = {code}",
            values | {"inside": inside},
        )
    assert said == []
    assert all(torch.equal(values[name], value) for name, value in before.items())
    assert torch.equal(values["generator"].get_state(), drawn)
    assert torch.equal(values["norm"].running_mean, statistics)


@pytest.mark.parametrize(
    "code",
    [
        "t = torch.as_tensor(array)\nt.mul_(0)",
        "t = torch.from_numpy(array)\nt[0] = 0",
        "t = same(a)\nt.mul_(0)",
        "t = max(lists, key=len)\nt.append(4)",
    ],
)
def test_what_shares_memory_is_not_written(code: str) -> None:
    """A result that may be an argument itself, or share its memory, keeps its numbers."""
    values = made() | {"same": nn.Identity()}
    before = values["a"].clone()
    run(code, values)
    assert torch.equal(values["a"], before)
    assert values["array"].tolist() == [1.0, 1.0]
    assert values["lists"] == [[1], [2, 3]]


def test_a_long_range_left_early() -> None:
    """Only what is iterated over is made: as a list this range would not fit into memory."""
    values = run("for k in range(10**15):\n    if k > 3:\n        break", {})
    assert values["k"] == 4


def test_a_callable_is_interpreted_and_not_asked() -> None:
    """An object that is called is neither compared, nor hashed, nor asked for attributes."""
    said.clear()
    a = torch.randn(3)
    assert torch.equal(run("y = asked(a)", {"a": a, "asked": Asked()})["y"], a.sum())
    assert said == []


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator with the name of what it wraps."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return 2 * function(*args, **kwargs)

    return wrapper


@doubled
def total(x: Tensor, factor: float = 1.0) -> Tensor:
    """A loss under a decorator."""
    return (x * factor).sum()


def test_a_decorator_is_followed() -> None:
    """The wrapper runs with the arguments that it takes itself."""
    a = torch.randn(3)
    assert torch.equal(run("y = total(a, factor=3.0)", {"a": a})["y"], total(a, factor=3.0))


class Counted(torch.autograd.Function):
    """A function whose backward is counted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """As it is."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Noted."""
        said.append("backward")
        return grads[0]


def test_a_graph_of_the_scripts_is_left_alone() -> None:
    """A term kept with its graph can be differentiated by the script after the step that was looked at."""
    torch.manual_seed(0)
    said.clear()
    model, weight, kept = nn.Linear(4, 3), torch.ones(3, requires_grad=True), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gw = gradwatch.watch(model, optimizer, rules=rules(), sinks=[], strict=True)
    kept["penalty"] = Counted.apply(weight * 2).exp().sum()
    out = model(torch.randn(6, 4))
    loss = (out * 0).sum(1).sqrt().mean() + kept["penalty"]
    loss.backward(retain_graph=True)
    optimizer.step()
    assert said == ["backward"]
    kept["penalty"].backward()
    gw.close()
