"""A closure that is watched raises, is called and is looked at as a bare one."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.rules.files import parse_rules
from gradwatch.taps import closure_calls
from tests.support.kept import Kept

RULES = "version: 1\nrules: {n: {detect: {kind: nonfinite}, do: [skip_step]}}\n"
X = torch.ones(4, 3)


class Own(torch.optim.Optimizer):
    """As people write one, without torch's decorators; passes on what its closure is to be called with."""

    given: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[..., Any]) -> Any:  # type: ignore[override]
        loss = closure(**self.given) if self.given else closure()
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad, alpha=self.param_groups[0]["lr"])
        return loss


class OwnSgd(torch.optim.SGD):
    """Passes its closure on."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnEnabling(Own):
    """Wraps its closure in torch's decorator."""

    @torch.no_grad()
    def step(self, closure: Callable[..., Any]) -> Any:  # type: ignore[override]
        return super().step(torch.enable_grad()(closure))


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "lbfgs": lambda params, lr: torch.optim.LBFGS(params, lr, max_iter=3),
    "own": Own,
    "own sgd": OwnSgd,
    "own enabling": OwnEnabling,
}


class Job:
    """A regression whose closure can be of several kinds, and may raise at one of its evaluations."""

    def __init__(self, make: str, error: type[Exception] | None = None, at: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = MAKERS[make](self.model.parameters(), lr=0.1)
        self.error, self.at = error, at
        self.stacks: list[list[str]] = []  # of every evaluation

    def evaluate(self) -> torch.Tensor:
        self.stacks.append(list(places(sys._getframe())))
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(X).square().mean()
        loss.backward()
        if self.error is not None and len(self.stacks) == self.at:
            try:
                {}["missing"]
            except KeyError:
                raise self.error("a") from None
        return loss

    def closure(self, kind: str) -> Callable[..., Any]:
        if kind == "function":
            return lambda: self.evaluate()
        if kind == "method":
            return self.evaluate
        if kind == "partial":
            return functools.partial(Job.evaluate, self)
        if kind == "default":
            return lambda job=self: job.evaluate()
        return Called(self)

    def run(self, kind: str) -> list[list[str]]:
        """Two steps: what is on the stack at every evaluation, and what the exception that arrives says."""
        told: list[list[str]] = []
        for _ in range(2):
            try:
                raise OSError  # handled meanwhile: a context
            except OSError:
                try:
                    self.optimizer.step(self.closure(kind))
                except Exception as error:
                    told += chain(error)
        return [*told, *self.stacks]


class Called:
    """An object that is called, with whatever it may be."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.job.evaluate()


def places(frame: FrameType | None) -> Iterator[str]:
    """The frames up to that of `Job.run`."""
    while frame is not None and frame.f_code is not Job.run.__code__:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back


def chain(error: BaseException | None) -> Iterator[list[str]]:
    """An exception and its contexts, with the entries of their tracebacks."""
    while error is not None:
        found, trace = [repr(error)], error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            found.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_name}")
            trace = trace.tb_next
        yield found
        error = error.__context__


def watch(job: Job, sink: Kept) -> Any:
    return gradwatch.watch(job.model, job.optimizer, rules=parse_rules(RULES), sinks=[sink], strict=True)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", ["function", "method", "partial", "default", "object"])
def test_what_a_closure_raises_arrives_as_bare(kind: str, make: str) -> None:
    """The same entries in its traceback and in its contexts', and the same frames around the closure while it runs."""
    if make == "own" and kind in ("default", "object"):
        pytest.skip("it could be called with arguments, and not torch calls it: see the next test")
    for error, at in ((None, 0), (ValueError, 1), (StopIteration, 2)):
        sink, job = Kept(), Job(make, error, at)
        expected = Job(make, error, at).run(kind)
        with watch(job, sink):
            assert job.run(kind) == expected
        assert len(expected[0]) > 1
        assert error is None or error.__name__ in expected[0][0]
        assert len(sink.records) == (1 if error is not None and (at == 1 or make != "lbfgs") else 2)


@pytest.mark.parametrize("make", ["own", "own enabling"])
def test_arguments_reach_the_closure(make: str) -> None:
    """An optimizer of the script's calls its closure with arguments: they arrive, and the step is judged."""
    job, sink, seen = Job(make), Kept(), []

    def closure(backward: bool = False, **more: int) -> torch.Tensor:
        seen.append((backward, more))
        return job.evaluate()

    with watch(job, sink):
        job.optimizer.given = {"backward": True, "more": 3}  # type: ignore[attr-defined]
        job.optimizer.step(closure)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            job.optimizer.step(lambda: job.evaluate())
        del job.optimizer.given  # type: ignore[attr-defined]
        job.optimizer.step(closure)  # type: ignore[arg-type]
    assert seen == [(True, {"more": 3}), (False, {})]
    assert len(sink.records) == 2


class Looks(torch.optim.SGD):
    """Looks at its closure, and leaves something on it."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [
            closure.__name__,
            closure.__doc__,
            str(inspect.signature(closure)),
            repr(closure),
            inspect.isfunction(closure),
            bool(closure),
            sorted(vars(closure)),
            hasattr(closure, "missing"),
            weakref.ref(closure)() is closure,
        ]
        closure.calls += 1
        closure.left = "behind"
        del closure.old
        return super().step(closure)


def test_attributes_are_those_of_the_closure() -> None:
    """Read, set and deleted by the optimizer, and looked at with `inspect`."""
    seen = []
    for watched in (False, True):
        model, sink = nn.Linear(3, 1), Kept()
        optimizer = Looks(model.parameters(), 0.1)

        def closure(scale: float = 1.0, model: nn.Module = model) -> Any:
            """A loss."""
            loss = model(X).square().mean() * scale
            loss.backward()
            return loss

        closure.calls, closure.old = 0, True  # type: ignore[attr-defined]
        gw = gradwatch.watch(model, optimizer, sinks=[sink], strict=True) if watched else None
        optimizer.step(closure)
        if gw is not None:
            gw.close()
            assert len(sink.records) == 1
        shown = [
            str(each).replace(hex(id(closure)), "").replace(hex(id(model)), "") for each in optimizer.seen
        ]
        seen.append((shown, closure.calls, closure.left, hasattr(closure, "old")))  # type: ignore[attr-defined]
    assert seen[0][0][:2] == ["closure", "A loss."]
    assert seen[0] == seen[1]


def test_a_closure_that_returns_nothing_and_one_that_calls_itself() -> None:
    """What it returns is what the step returns; nested calls of the closure count as one evaluation."""
    job, sink = Job("own"), Kept()

    def nothing() -> None:
        job.evaluate()

    def twice(again: bool = True) -> torch.Tensor:
        return twice(False) if again else job.evaluate()

    with watch(job, sink):
        assert job.optimizer.step(nothing) is None  # type: ignore[arg-type, func-returns-value]
        assert job.optimizer.step(twice).requires_grad  # type: ignore[arg-type, func-returns-value]
    assert len(sink.records) == 2


def test_nothing_of_a_step_is_kept_by_its_closure() -> None:
    """Neither the closure nor what it holds outlives the step, without help of the garbage collector."""
    job, sink = Job("lbfgs"), Kept()
    with watch(job, sink):
        gc.collect()
        gc.disable()
        try:
            closure = job.closure("default")
            gone = weakref.ref(closure)
            job.optimizer.step(closure)
            del closure
            assert gone() is None
        finally:
            gc.enable()


@pytest.mark.parametrize(
    "wraps", [lambda run: lambda: run() * 2, torch.enable_grad()], ids=["own", "torch's"]
)
def test_a_closure_wrapped_for_the_step_of_the_class_above_is_evaluated_once(wraps: Any) -> None:
    """Each hook of torch's fires twice for such a step: one Snapshot of each of three steps all the same."""

    class Wraps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(wraps(closure))

    model, sink = nn.Linear(3, 1), Kept()
    optimizer = Wraps(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, rules=parse_rules(RULES), sinks=[sink], strict=True):
        for _ in range(3):
            optimizer.step(functools.partial(lossy, model, optimizer))
    assert [record.snapshot.step for record in sink.records] == [0, 1, 2]


def lossy(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """A closure, but for its arguments."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(X).square().mean()
    loss.backward()
    return loss


@pytest.mark.filterwarnings("ignore")  # torch compiles the closure, and warns while it does
def test_a_compiled_step_with_a_closure_runs_as_bare() -> None:
    """`torch.compile` breaks its graph at the closure as often as without a watch; the same weights."""
    weights, graphs = [], []
    for watched in (False, True):
        torch._dynamo.reset()
        job, sink, seen = Job("sgd"), Kept(), []
        closure = functools.partial(lossy, job.model, job.optimizer)

        def backend(graph: Any, inputs: Any, seen: list[int] = seen) -> Any:
            seen.append(len(inputs))
            return graph

        step = torch.compile(job.optimizer.step, backend=backend)
        gw = watch(job, sink) if watched else None
        for _ in range(3):
            step(closure)
        if gw is not None:
            gw.close()
            assert len(sink.records) == 3
        weights.append(job.model.weight.detach().clone())
        graphs.append(len(seen))
    assert torch.equal(*weights)
    assert graphs[0] == graphs[1]


def test_what_was_looked_up_once_can_be_called_again() -> None:
    """An optimizer that keeps `closure.__call__` calls it as often as it likes, also after it has raised."""
    seen: list[str] = []

    def closure() -> int:
        seen.append("closure")
        if len(seen) == 3:
            raise ValueError("the closure's own")
        return len(seen)

    call = closure_calls.notice(closure, lambda: None, lambda: None).__call__
    assert (call(), call()) == (1, 2)
    with pytest.raises(ValueError, match="own"):
        call()
    assert call() == 4
