"""An exception at every line of gradwatch that a step executes: its own never reach training, the script's do."""

from __future__ import annotations

import ast
import ctypes
import linecache
import os
import sys
import threading
import warnings
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from gradwatch.taps.graph import anomaly
from tests.support import warm
from tests.support.kept import Kept

ROOT = Path(__file__).parents[2]
PACKAGE = os.path.dirname(gradwatch.__file__)
SKIP = "version: 1\nrules: {n: {detect: {kind: nonfinite}, do: [skip_step]}}\n"
TAPS = """version: 1
modules: {tap: full_backward, names: ["1", "2"]}
rules:
  local: {detect: {kind: above, of: norm_local, threshold: 1e9}}
  after: {detect: {kind: above, of: grad_output_norm, threshold: 1e9}}
  before: {detect: {kind: above, of: grad_input_norm, threshold: 1e9}}
  spread: {detect: {kind: above, of: activation_std, threshold: 1e9}}
  given: {detect: {kind: above, of: input_std, threshold: 1e9}}
histograms: {of: [activations], every: 1}
clip: {total: {method: norm, max_norm: 1.0e-3, scope: param}, at: backward}
"""
RULES = {
    "observe": "version: 1\nrules: {n: {detect: {kind: nonfinite}}}\n",
    "skip": SKIP,
    "closure": SKIP,
    "taps": TAPS,
    "outputs": TAPS.replace("full_backward", "output").replace(", of: grad_input_norm", ", of: norm"),
    "record": SKIP.replace("skip_step", "skip_step, localise: {by: record}"),
    "micro": SKIP.replace("skip_step", "drop_micro"),
    "clip": SKIP + "clip: {total: {method: norm, max_norm: 0.5}}\n",
}
RUN_BACKWARD = torch.autograd._engine_run_backward
SHOW_WARNING = warnings._showwarnmsg  # type: ignore[attr-defined]
AT = 2  # the step into which the exception goes
LINES = 8  # of each kind in the short version


class SentError(RuntimeError):
    """What another thread of the script sends: of a class that torch raises, too, where a tensor is not to be had."""


class Injected:
    """Traces the lines of gradwatch; raises `kind` at line number `at`, each counted when it is first executed."""

    def __init__(self, at: int, kind: type[BaseException]) -> None:
        self.at = at
        self.kind = kind
        self.lines: dict[tuple[str, int], int] = {}
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event != "line" or place in self.lines:
            return self.line
        self.lines[place] = len(self.lines)
        if self.lines[place] == self.at:
            sys.settrace(None)
            self.where = linecache.getline(*place).strip()
            if self.kind is not SentError:
                raise self.kind("injected")
            sent = ctypes.py_object(self.kind)  # it arrives as this call returns
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), sent)
        return self.line


# As in a file of gradwatch's: what a trace function of the script's raises is the script's, and let through.
Injected.line.__code__ = Injected.line.__code__.replace(co_filename=os.path.join(PACKAGE, "injected.py"))


@cache
def ruleset(rules: str) -> RuleSet:
    """Some of RULES, read once for hundreds of trainings."""
    return parse_rules(RULES[rules])


def job(
    rules: str | None, injected: Injected, folder: Path
) -> tuple[BaseException | None, list[torch.Tensor]]:
    """What reached the loop of four steps, and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    gw = None
    if rules is not None:
        gw = gradwatch.watch(model, optimizer, rules=ruleset(rules), sinks=[Kept()], run_dir=folder)
    reached: BaseException | None = None
    x = torch.ones(2, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    before = sys.gettrace()
    for step in range(4):
        x = torch.ones(2, 3)
        # What is recorded is the step after the one at fault.
        if step == AT - (rules == "record") and rules in ("skip", "closure", "record"):
            x[0, 0] = float("nan")
        sys.settrace(injected if step == AT else before)
        try:
            if rules == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        except BaseException as error:
            reached = error
        finally:
            sys.settrace(before)
    if gw is not None:
        gw.close()
    return reached, [param.detach().clone() for param in model.parameters()]


_undisturbed: dict[str, tuple[dict[tuple[str, int], int], list[torch.Tensor]]] = {}


def undisturbed(rules: str, folder: Path) -> tuple[dict[tuple[str, int], int], list[torch.Tensor]]:
    """The lines of gradwatch that a run executes into which nothing is injected, and the weights of a bare one."""
    if rules not in _undisturbed:
        seen = Injected(-1, RuntimeError)
        assert job(rules, seen, folder)[0] is None
        _undisturbed[rules] = seen.lines, job(None, Injected(-1, RuntimeError), folder)[1]
    return _undisturbed[rules]


def left_behind() -> list[str]:
    """What a recording switches on in torch, and is on; it is switched off, so that it is told once."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    hooks = nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks
    found = {
        "anomaly mode": torch._C.is_anomaly_enabled(),
        "a dispatch mode": bool(modes),
        "a hook on every module": any(hooks),
        "a function around the backward": torch.autograd._engine_run_backward is not RUN_BACKWARD,
        "a function that tells the mode": torch.is_anomaly_enabled is not torch._C.is_anomaly_enabled,
        "a function that shows warnings": warnings._showwarnmsg is not SHOW_WARNING,  # type: ignore[attr-defined]
        "a filter of warnings": anomaly._FILTER in warnings.filters,  # type: ignore[attr-defined]
    }
    torch.set_anomaly_enabled(False)
    anomaly._remove(warnings.filters)  # type: ignore[attr-defined]
    for _ in modes:
        torch._C._pop_torch_dispatch_stack(None)
    for each in hooks:
        each.clear()
    return [what for what, on in found.items() if on]


def escaped(
    rules: str,
    kind: type[BaseException],
    every: int,
    folder: Path,
    files: tuple[str, ...] = ("",),
    first: int = 0,
) -> list[str]:
    """The lines at which it went wrong, of every so-many-th from the `first` on in files that end so."""
    executed, bare = undisturbed(rules, folder)
    wrong = []
    lines = [at for (file, _), at in executed.items() if file.endswith(files)]
    for at in lines[first :: every or max(1, len(lines) // LINES)]:
        injected = Injected(at, kind)
        reached, weights = job(rules, injected, folder)
        left = left_behind()
        file, line = next(reversed(injected.lines))
        place = f"{Path(file).name}:{line} {injected.where}"
        if injected.where == "try:":  # the guard itself
            continue
        wrong += [f"{place}: {one} left" for one in left]
        if not injected.where:  # a line of a busier step
            continue
        if kind is RuntimeError:
            if reached is not None:
                wrong.append(f"{place}: {reached!r}")
            elif rules == "observe" and not all(
                torch.equal(a, b) for a, b in zip(weights, bare, strict=True)
            ):
                wrong.append(f"{place}: other weights")
        elif not isinstance(reached, kind):
            wrong.append(f"{place}: kept {kind.__name__}")
    return wrong


KINDS = [RuntimeError, KeyboardInterrupt, SentError]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rules", RULES)
def test_a_sample_of_lines(rules: str, kind: type[BaseException], tmp_path: Path) -> None:
    """Eight lines of each kind, spread over the step."""
    assert escaped(rules, kind, 0, tmp_path / "run") == []


@pytest.mark.parametrize("kind", KINDS)
def test_lines_that_begin_or_end_a_recording(kind: type[BaseException], tmp_path: Path) -> None:
    """None leaves on in torch what a recording switches on; the exceptions take turns, and a soak all of the lines."""
    files = ("operation_recorder.py", "live_recording.py", "anomaly.py", "dispatch_modes.py", "patch.py")
    every, first = {RuntimeError: (3, 0), KeyboardInterrupt: (6, 1), SentError: (6, 4)}[kind]
    assert escaped("record", kind, every, tmp_path / "run", files, first) == []


@pytest.mark.parametrize(("first", "rules"), [(0, "observe"), (1, "taps")])
def test_lines_that_may_meet_any_tensor(first: int, rules: str, tmp_path: Path) -> None:
    """Code that is ready for a RuntimeError of torch's lets through one that is the script's.

    The rule sets take turns at the lines; a soak has all of both.
    """
    files = (
        "row_sums.py",
        "row_sums_by_blas.py",
        "batched_norms.py",
        "read_plan.py",
        "chunked_statistics.py",
        "layouts.py",
    )
    files = (*files, "manual_gradients.py", "norm_local.py", "taps/backward_end.py", "clipper.py")
    assert escaped(rules, SentError, 2, tmp_path / "run", files, first) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)  # hundreds of trainings; minutes on an idle machine
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rules", RULES)
def test_every_line(rules: str, kind: type[BaseException], tmp_path: Path) -> None:
    """All of them."""
    assert escaped(rules, kind, 1, tmp_path / "run") == []


def escaped_at_attach(kinds: list[type[BaseException]], every: int, folder: Path) -> list[str]:
    """The lines of an attach under `gradwatch run` at which it went wrong, of every so-many-th, for each kind."""
    run = [sys.executable, "-m", "tests.promises.injection_at_attach", str(every)]
    own = {"GRADWATCH_DIR": str(folder), "GRADWATCH_RULES": "observe-only", "GRADWATCH_LISTEN": "127.0.0.1:0"}
    done = warm.run(
        [*run, *(kind.__name__ for kind in kinds)], ROOT, {**os.environ, **own}, timeout=7200, check=True
    )
    found = done.stdout.splitlines()
    assert [int(line) > 2000 for line in found if line.isdigit()] == [True] * len(kinds)
    return [line for line in found if not line.isdigit()]


def test_a_sample_of_the_lines_of_an_attach(tmp_path: Path) -> None:
    """Half a dozen of each kind."""
    assert escaped_at_attach(KINDS, 800, tmp_path) == []


@pytest.mark.soak
@pytest.mark.timeout(7200)  # thousands of sessions
@pytest.mark.parametrize("kind", KINDS)
def test_every_line_of_an_attach(kind: type[BaseException], tmp_path: Path) -> None:
    """All of them: the optimizer is made, the rules are read, the journal and the endpoint are opened, two steps."""
    assert escaped_at_attach([kind], 1, tmp_path) == []


# (file, function) of everything that torch calls for its own ends; the rest is called by these.
ENTRIES = [
    ("taps/grad_ready.py", "arrived"),
    ("taps/backward_end.py", "_end"),
    ("taps/step_hooks.py", "_before"),
    ("taps/step_hooks.py", "_after"),
    ("taps/patch.py", "__get__"),
    ("taps/module_registry.py", "_parameter"),
    ("taps/module_registry.py", "_module"),
    ("capture/coverage.py", "noticed"),
    ("actions/backward/clipper.py", "limit"),
    ("capture/columns/norm_local.py", "observe"),
    ("actions/drop_micro.py", "first"),
    ("capture/columns/module_taps.py", "observe"),
    ("capture/columns/module_taps.py", "given"),
    ("capture/columns/module_taps.py", "add"),
    ("taps/graph/full_backward.py", "before"),
    ("taps/graph/full_backward.py", "after"),
    ("taps/clip_functions.py", "noticed"),
    ("actions/skip/skip.py", "last"),
    ("actions/skip/skip.py", "first"),
    ("actions/drop_micro.py", "guarded"),
    ("taps/pipeline_stages.py", "_notify"),
    ("taps/grad_scaler.py", "wrapped"),
    ("taps/grad_scaler.py", "_notify"),
    ("localise/held_calls/calls_before_attach.py", "called"),
    ("capture/fsdp_backward_end.py", "_observe"),
    ("capture/fsdp_backward_end.py", "_begin"),
    ("localise/held_calls/model_recorder.py", "begins"),
    ("localise/held_calls/model_recorder.py", "_ends"),
    ("localise/held_calls/model_recorder.py", "_gradient"),
    ("taps/graph/anomaly.py", "match"),
    ("taps/backward_entry.py", "run_backward"),
    ("taps/graph/around_backward.py", "around"),
    ("localise/replay/first_nonfinite_in_forward.py", "__torch_dispatch__"),
    ("localise/replay/first_nonfinite_in_backward.py", "look"),
    ("localise/diagnosis/module_attribution.py", "_enters"),
    ("localise/diagnosis/module_attribution.py", "_ran"),
    ("localise/diagnosis/module_attribution.py", "_leaves"),
    ("taps/closure_calls.py", "__get__"),
    ("taps/closure_calls.py", "returned"),
    ("taps/module_calls.py", "__get__"),
    ("taps/module_calls.py", "_before"),
    ("taps/module_calls.py", "_after"),
]


@pytest.mark.parametrize(("file", "name"), ENTRIES)
def test_what_torch_calls_begins_with_its_guard(file: str, name: str) -> None:
    """The first statement is `try:` and what is caught is an Exception: no line but that one is outside."""
    tree = ast.parse(Path(PACKAGE, file).read_text(encoding="utf-8"))
    found = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == name]
    assert found
    for function in found:
        body = [
            one
            for one in function.body
            if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        ]
        assert isinstance(body[0], ast.Try)
        assert ast.unparse(body[0].handlers[0].type or ast.Constant(0)) == "Exception"
