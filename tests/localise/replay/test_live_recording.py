"""Steps recorded as they run: what a replay could not tell, without a bit of the training changed."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import gradwatch
from gradwatch.localise.replay import live_recording, step_replay
from gradwatch.localise.replay.first_nonfinite_in_backward import BackwardTracer
from gradwatch.sinks.log import LogSink
from gradwatch.taps import module_calls
from tests.localise.models import Faulty, SqrtAtZero
from tests.localise.test_in_the_loop import Loop, broken, rules
from tests.support import warm
from tests.support.kept import Kept
from tests.support.launch_cases import ROOT

_AS_IT_IS: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def test_a_step_that_was_not_held_is_recorded_when_it_comes_again() -> None:
    """Attached between backward and step, a watch knows nothing of the forward: the next steps are recorded."""
    torch.manual_seed(0)
    model = SqrtAtZero()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(broken(torch.randn(5, 4))).sum().backward()
    kept = Kept()
    with gradwatch.watch(model, optimizer, rules=rules(), sinks=[kept], strict=True):
        optimizer.step()
        for _ in range(3):
            optimizer.zero_grad()
            model(broken(torch.randn(5, 4))).sum().backward()
            optimizer.step()
        assert not _get_current_dispatch_mode_stack()
    first, second = (finding for record in kept.records for finding in record.findings)
    assert first.phase == "unknown"
    assert "no call of the model" in first.note
    assert "the next 2 steps are recorded" in first.note
    assert (second.phase, second.op, second.by) == ("backward", "sqrt", "record")
    assert second.frame is not None
    assert second.frame.source.endswith("# fault")


def trap(out: Tensor) -> Tensor:
    """A loss function with a logarithm of 0 in the branch that is not taken; it reads a clock, so it runs only once."""
    time.perf_counter()
    safe = torch.where(out > 1e9, torch.log(out - out), out)  # loss
    return safe.sum()


def test_the_loss_side_is_found_by_recording() -> None:
    """A replay can only say that it is the loss; recorded, the line of the loss function is told."""
    loop = Loop(nn.Linear(4, 3), bad=(), loss=trap, steps=5)
    first, second = loop.findings
    assert first.phase == "loss"
    assert second.phase == "backward"
    assert (second.op, second.module, second.by) == ("log", "", "record")
    assert second.frame is not None
    assert second.frame.source.endswith("# loss")


def test_an_exact_cause_is_logged_after_a_vague_one_and_with_its_own_step() -> None:
    """The loss side is said at once, the line a step later: both in the log, each with the step that it is of."""
    lines = io.StringIO()
    loop = Loop(nn.Linear(4, 3), bad=(), loss=trap, steps=5, sinks=[LogSink("json", lines)])
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    causes = [line for line in said if line["event"] == "gradwatch cause"]
    assert [line["step"] for line in causes] == [0, 1]
    assert [finding.step for finding in loop.findings] == [0, 1]
    assert causes[0]["cause"].startswith("the loss side")
    assert causes[1]["cause"].startswith("the backward of log")


def test_by_record_holds_nothing_and_finds_it_in_the_next_steps() -> None:
    """`by: record` never replays."""
    loop = Loop(SqrtAtZero(), bad=(2, 3), localise="by: record, else_record_steps: 3", steps=8)
    first, second = loop.findings
    assert first.phase == "unknown"
    assert not first.note.startswith("no replay")
    assert (second.op, second.by) == ("sqrt", "record")


@pytest.mark.parametrize("case", ["plain", "modes"])
def test_recording_changes_no_bit(case: str) -> None:
    """Steps that are recorded compute what they would have computed, under the script's own modes too."""

    class Mine(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Modal(SqrtAtZero):
        def forward(self, x: Tensor) -> Any:
            with Mine():
                return super().forward(x) + nn.functional.dropout(x[:, :3])

    kind = SqrtAtZero if case == "plain" else Modal
    torch.manual_seed(0)
    recorded = Loop(kind(), bad=(1,), localise="by: record, else_record_steps: 4", steps=8)
    torch.manual_seed(0)
    bare = Loop(kind(), bad=(1,), watched=False, steps=8)
    for one, other in zip(recorded.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.is_anomaly_enabled()
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("inside", [True, False], ids=["vmap", "grad"])
def test_recording_stays_out_of_a_transform(inside: bool) -> None:
    """The steps after the NaN are recorded, and `torch.func` runs backwards in them whose numbers cannot be read."""

    def train(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, kept = nn.Linear(4, 1), Kept()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(model, params, (x,))
            return out.square().mean()

        def step(at: int) -> None:
            params = {name: param.detach() for name, param in model.named_parameters()}
            grads: Any = torch.func.grad(loss)
            if inside:
                found = torch.func.vmap(grads, in_dims=(None, 0))(params, torch.randn(5, 4))
                found = {name: each.mean(0) for name, each in found.items()}
            else:
                found = grads(params, torch.randn(5, 4))
            for name, param in model.named_parameters():
                param.grad = found[name] * (float("nan") if at == 1 else 1.0)
            if watched or at != 1:  # what the rule skips
                optimizer.step()

        with (
            gradwatch.watch(model, optimizer, rules=rules(), sinks=[kept], strict=True)
            if watched
            else _AS_IT_IS
        ):
            for at in range(5):
                step(at)
        assert [record.decision.skip for record in kept.records] == [at == 1 for at in range(5) if watched]
        return [param.detach() for param in model.parameters()]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("at", ["blame_outputs", "blame_nodes", "attach"])
def test_a_fault_of_the_recording_never_reaches_the_backward(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at a backward of the script fails: it is counted, and the backward has run."""

    def fail(*args: object) -> None:
        raise ValueError("ours")

    monkeypatch.setattr(BackwardTracer if at == "attach" else step_replay, at, fail)
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, rules=rules(), sinks=[kept]) as gw:
        for step in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4)).square().mean() * (float("nan") if step == 1 else 1.0)
            loss.backward()
            optimizer.step()
        assert gw.status()["internal_errors"]
    assert [record.decision.skip for record in kept.records] == [step == 1 for step in range(5)]


def test_a_recording_that_cannot_begin_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had entered is left again: no dispatch mode, no anomaly mode; the training goes on."""

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            raise ValueError("ours")

    monkeypatch.setattr(live_recording, "time", Clock)
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, rules=rules("by: record"), sinks=[kept]) as gw:
        for step in range(4):
            optimizer.zero_grad()
            (model(torch.randn(5, 4)).square().mean() * (float("nan") if step == 1 else 1.0)).backward()
            optimizer.step()
            assert not torch.is_anomaly_enabled()
            assert not _get_current_dispatch_mode_stack()
        assert gw.status()["internal_errors"]
    assert len(kept.records) == 4


class Raises(torch.autograd.Function):
    """A function of the script's whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("the script's")


@pytest.mark.parametrize("own", [False, True], ids=["bare", "own anomaly mode"])
def test_a_backward_that_raises_in_a_recorded_step_warns_of_nothing(own: bool) -> None:
    """torch shows the lines of the forward under anomaly mode: only where the script has switched that on."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    shown = warnings._showwarnmsg  # type: ignore[attr-defined]
    with (
        warnings.catch_warnings(record=True) as told,
        gradwatch.watch(model, optimizer, rules=rules("by: record"), sinks=[Kept()]),
    ):
        warnings.simplefilter("always")
        (model(torch.randn(5, 4)).square().mean() * float("nan")).backward()
        optimizer.step()
        assert torch._C.is_anomaly_enabled()
        assert not torch.is_anomaly_enabled()
        with (
            torch.autograd.set_detect_anomaly(True) if own else _AS_IT_IS,
            pytest.raises(ValueError, match="the script's"),
        ):
            Raises.apply(model(torch.randn(5, 4))).sum().backward()
    assert ["Error detected in RaisesBackward" in str(one.message) for one in told] == [True] * own
    assert warnings._showwarnmsg is shown  # type: ignore[attr-defined]


RAISES = """
import sys, warnings
import torch
torch.manual_seed(0)
class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, grad): raise ValueError("the script's")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def told(name, number=2):
    for _ in range(number): warnings.warn_explicit(name, UserWarning, "x.py", 1, registry=registry)
registry = {}
if sys.argv[1:] == ["watched"]:
    import gradwatch
    from gradwatch.rules.files import parse_rules
    rules = "version: 1\\nrules: {n: {detect: {kind: nonfinite}, do: [{localise: {by: record}}]}}"
    gradwatch.watch(model, optimizer, rules=parse_rules(rules), sinks=[])
if not sys.warnoptions: told("once")
(model(torch.ones(5, 4)).square().mean() * float("nan")).backward()
optimizer.step()
try:
    Raises.apply(model(torch.ones(5, 4))).sum().backward()
except ValueError as error:
    print(error)
if not sys.warnoptions: told("once")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        Raises.apply(model(torch.ones(5, 4))).sum().backward()
    except ValueError as error:
        print(error, len(caught))
try:
    warnings.warn("Error detected in it", UserWarning)
except UserWarning as error:
    print("raised", error)
optimizer.step()
optimizer.step()
print(len(warnings.filters))
"""


AS_UNDER_ERROR = """
import sys, warnings
sys.warnoptions.append("error")
warnings.simplefilter("error")
"""


@pytest.mark.parametrize(
    ("option", "first"),
    [
        pytest.param(["-W", "error"], "", marks=pytest.mark.soak, id="error"),  # cold Pythons
        pytest.param([], AS_UNDER_ERROR, id="as under error"),
        pytest.param([], "", id="default"),
    ],
)
def test_python_warns_in_a_recorded_step_as_bare(option: list[str], first: str, tmp_path: Path) -> None:
    """Nothing is printed for the mode under `-W error` either, and what was shown once is not shown again."""
    (tmp_path / "x.py").write_text(first + RAISES)
    environ = {**os.environ, "PYTHONPATH": ROOT}
    cold = functools.partial(subprocess.run, capture_output=True, text=True)
    start: Callable[..., subprocess.CompletedProcess[str]] = cold if option else warm.run
    bare, watched = (
        start([sys.executable, *option, "x.py", *watching], cwd=tmp_path, env=environ, check=True)
        for watching in ([], ["watched"])
    )
    assert watched.stdout == bare.stdout
    assert watched.stderr == bare.stderr


class RaisesInOperation(torch.autograd.Function):
    """A function of the script's of whose backward an operation raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] @ torch.ones(7, 7)


def changed_in_place(x: Tensor) -> Tensor:
    """A loss whose backward needs what has been changed in place: torch's message ends in a hint at anomaly mode."""
    y = x.exp()
    z = y.square()
    y.add_(1)
    return z.sum()


def elsewhere(call: Callable[[], Any]) -> None:
    """Run it in another thread."""
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call)
    called.result()  # once it has ended: it raises in the same line whichever thread was faster


@torch.library.custom_op("gradwatch_tests::raises", mutates_args=())
def raises(x: Tensor) -> Tensor:
    """An operation of the script's, in Python, that raises."""
    raise ValueError("the script's")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x @ torch.ones(7, 7),
        lambda x: nn.functional.linear(x, torch.ones(7, 7)),
        lambda x: x.sum().unknown,
        lambda x: RaisesInOperation.apply(x).sum().backward(),
        lambda x: raises(x.detach()),
        lambda x: x.add_(torch.ones(3, 3, 3)),
        lambda x: x.detach().view(-1, 17),
        lambda x: changed_in_place(x).backward(),
        lambda x: torch.autograd.grad(changed_in_place(x), x, create_graph=True),
        lambda x: elsewhere(changed_in_place(x).backward),
    ],
    ids=[
        "matmul",
        "linear",
        "attribute",
        "custom backward",
        "custom operation",
        "in place",
        "view",
        "changed",
        "changed, by grad",
        "changed, in another thread",
    ],
)
def test_an_operation_that_raises_in_a_recorded_step_has_the_traceback_that_it_has_bare(
    call: Callable[[Tensor], Any],
) -> None:
    """Frame by frame, and the message, as without a recording."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def raised() -> list[str]:
        x = model(torch.ones(5, 4))
        try:
            call(x)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            return [f"{each.filename}:{each.lineno}" for each in frames] + [str(error)]
        return []

    bare = raised()
    assert bare
    with gradwatch.watch(model, optimizer, rules=rules("by: record"), sinks=[Kept()], strict=True):
        (model(torch.randn(5, 4)).square().mean() * float("nan")).backward()
        optimizer.step()
        assert len(_get_current_dispatch_mode_stack()) == 1
        assert raised() == bare


def test_the_scripts_own_anomaly_check_raises_in_recorded_steps_too() -> None:
    """A recording leaves a mode that it finds switched on as it is, with its check."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    (model(torch.randn(5, 4)).sum() * float("nan")).backward()
    with gradwatch.watch(model, optimizer, rules=rules("by: record"), sinks=[Kept()]):
        with torch.autograd.set_detect_anomaly(True):
            optimizer.step()
            assert len(_get_current_dispatch_mode_stack()) == 1
            with pytest.raises(RuntimeError, match="returned nan values"):
                (model(torch.zeros(5, 4)) * 0).sqrt().sum().backward()
            assert torch.is_anomaly_check_nan_enabled()
        assert not torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()


def test_a_mode_of_the_scripts_that_outlasts_the_recording_is_not_ours_in_the_end() -> None:
    """`detect_anomaly` around a recorded step puts back what it found, when the recording is over: no mode is on."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    (model(torch.randn(5, 4)).sum() * float("nan")).backward()
    with gradwatch.watch(model, optimizer, rules=rules("by: record, else_record_steps: 1"), sinks=[Kept()]):
        optimizer.step()  # the next one is recorded
        optimizer.zero_grad()
        with torch.autograd.set_detect_anomaly(True):
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
        assert not torch._C.is_anomaly_enabled()
        assert torch._C.is_anomaly_check_nan_enabled()


def test_recording_stays_out_of_a_mode_of_the_script() -> None:
    """Inside a dispatch mode of the user's nothing is recorded, and it is said."""

    class Mine(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mine() as mine:
        loop = Loop(SqrtAtZero(), bad=(1, 2, 3), localise="by: record", steps=5)
        assert _get_current_dispatch_mode_stack() == [mine]
    assert any("TorchDispatchMode active" in finding.note for finding in loop.findings)


def test_a_mode_that_is_entered_while_recording_and_kept() -> None:
    """The recording lies beneath the script's mode: it looks at nothing any more, and leaves when it can."""

    class Mine(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    mine = Mine()

    def meanwhile(step: int) -> None:
        if step == 2:
            mine.__enter__()
        if step == 4:
            mine.__exit__(None, None, None)

    loop = Loop(
        SqrtAtZero(), bad=(1,), localise="by: record, else_record_steps: 1", steps=8, meanwhile=meanwhile
    )
    assert not _get_current_dispatch_mode_stack()
    assert not torch.is_anomaly_enabled()
    assert [finding.phase for finding in loop.findings] == ["unknown"]


def test_detect_anomaly_stops_the_training_and_only_for_its_steps() -> None:
    """torch's own check raises at the next NaN; where none comes it is switched off again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says which line it was
        with pytest.raises(RuntimeError, match="returned nan values"):
            Loop(Both(), bad=(1, 2), localise="by: detect_anomaly", steps=5)
    torch.set_anomaly_enabled(False)
    Loop(SqrtAtZero(), bad=(1,), localise="by: detect_anomaly, else_record_steps: 2", steps=6)
    assert not torch.is_anomaly_enabled()


class Both(Faulty):
    """NaN, not only Inf, at the sqrt itself."""

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        return h + torch.sqrt(h - h) * 0


def test_close_gives_everything_back() -> None:
    """In the midst of a recording too."""
    torch.manual_seed(0)
    model = SqrtAtZero()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    gw = gradwatch.watch(model, optimizer, rules=rules("by: record"), sinks=[], strict=True)
    model(broken(torch.randn(5, 4))).sum().backward()
    optimizer.step()
    assert torch._C.is_anomaly_enabled()
    gw.close()
    assert not torch.is_anomaly_enabled()
    assert not _get_current_dispatch_mode_stack()
    assert not module_calls.noticed(model)
    assert "watched" not in torch.autograd._engine_run_backward.__name__
