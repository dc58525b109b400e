"""P2: no exception of ours reaches training; each is counted under its component, and training is unchanged."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.account.session_counts import SessionCounts
from gradwatch.actions.skip import skip
from gradwatch.capture import optimizer_capture as captured
from gradwatch.capture import read_after_backward
from gradwatch.capture.columns import column_reader, module_taps, norm_local
from gradwatch.capture.window import hook_pruning
from gradwatch.checkpoint.health_tracker import CheckpointHealthTracker
from gradwatch.engine import BoundEngine
from gradwatch.errors import TrainingStopped
from gradwatch.reading import cpu_norms
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime import overhead_timer
from gradwatch.runtime.internal_errors import Health
from gradwatch.session import active_or_paused
from gradwatch.session.boundary import changed_param_groups
from gradwatch.session.pipeline import many_deferred_steps
from gradwatch.session.pipeline import step_pipeline as judging
from gradwatch.session.pipeline.record_publishing import Publishing
from gradwatch.session.watch import session_of
from gradwatch.sinks.journal import JournalSink
from gradwatch.sinks.log import LogSink
from gradwatch.sinks.prometheus.sink import PrometheusSink
from gradwatch.taps import grad_scaler
from tests.support.kept import Kept

RULES = """
version: 1
modules: {tap: output, names: ["*"]}
rules:
  non-finite: {detect: {kind: nonfinite}, do: [{skip_step: {max_consecutive: 10}}]}
  spike: {detect: {kind: spike, above: 10}}
  local: {detect: {kind: above, of: norm_local, threshold: 1e6}}
  tap: {detect: {kind: above, of: grad_output_norm, threshold: 1e6}}
  dead: {detect: {kind: dead}}
  stuck: {detect: {kind: stuck}}
"""


@cache
def ruleset() -> RuleSet:
    """RULES, read once for hundreds of trainings."""
    return parse_rules(RULES)


ERRORS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError("broken"),
    "ENOSPC": lambda: OSError(errno.ENOSPC, "no space left on device"),
    "EMFILE": lambda: OSError(errno.EMFILE, "too many open files"),
    "EIO": lambda: OSError(errno.EIO, "input/output error"),
    "MemoryError": MemoryError,
    "RecursionError": lambda: RecursionError("too deep"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
    "StopIteration": StopIteration,
}
# (owner, attribute, the component that must count it)
SITES: dict[str, tuple[Any, str, str]] = {
    "hear": (captured.OptimizerCapture, "add_arrivals", "capture"),
    "due": (captured.OptimizerCapture, "due", "capture"),
    "read": (captured.OptimizerCapture, "read", "capture"),
    "clock": (overhead_timer, "perf_counter", "capture"),
    "settle": (captured.OptimizerCapture, "close_window", "boundary"),
    "changed": (changed_param_groups.CurrentContexts, "changed", "boundary"),
    "maintain_hooks": (read_after_backward.Capture, "maintain_hooks", "boundary"),
    "adopt": (changed_param_groups.CurrentContexts, "renewed", "boundary"),
    "measure": (judging.StepPipeline, "measure", "boundary"),
    "sample": (column_reader.ColumnReader, "collect", "columns"),
    "local_collect": (norm_local.LocalNorms, "collect", "boundary"),
    "taps_collect": (module_taps.ModuleTaps, "collect", "boundary"),
    "assemble": (judging, "assemble", "boundary"),
    "at_step_scale": (grad_scaler, "at_step", "boundary"),
    "evaluate": (BoundEngine, "evaluate", "engine"),
    "decide": (BoundEngine, "decide", "engine"),
    "skip": (skip.StepSkipper, "begin", "action"),
    "advance": (captured.OptimizerCapture, "advance", "boundary"),
    "prunable": (hook_pruning.HookPruning, "due", "boundary"),
    "norm_local": (norm_local, "exact_norm", "norm_local"),
    "tap": (module_taps, "elements", "modules"),
    "inspect": (cpu_norms, "inspect", "capture"),
    "prometheus": (PrometheusSink, "write", "prometheus"),
    "journal": (JournalSink, "write", "journal"),
    "log": (LogSink, "write", "log"),
}


def data() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    for step in range(6):
        batch = torch.randn(4, 3, generator=generator)
        if step == 4:
            batch[0, 0] = float("nan")
        yield batch


def train(model: nn.Module, optimizer: torch.optim.Optimizer, skip_nan: bool) -> list[torch.Tensor]:
    for batch in data():
        optimizer.zero_grad()
        model(batch).pow(2).sum().backward()
        if not (skip_nan and batch.isnan().any()):
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


@cache
def trained_bare(skip_nan: bool) -> list[torch.Tensor]:
    """The weights that the training ends with, unwatched."""
    return train(*build(), skip_nan)


def faults() -> list[Any]:
    """Every call site × every kind of error; without a soak each site with two kinds, a sink's with all."""
    found = []
    for place, site in enumerate(SITES):
        few = [(place + more) % len(ERRORS) for more in (0, 3)]
        for number, error in enumerate(ERRORS):
            short = number in few or site in ("prometheus", "journal", "log")
            found.append(pytest.param(site, error, marks=[] if short else pytest.mark.soak))
    return found


@pytest.mark.parametrize(("site", "error"), faults())
def test_a_fault_of_ours_is_counted_and_harmless(
    site: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails, wherever: training ends with the weights it has without us."""
    owner, attribute, component = SITES[site]
    model, optimizer = build()
    if site == "prunable":
        monkeypatch.setattr(hook_pruning, "PRUNE_FROM", 1)  # of so few parameters it is not asked
    gw = gradwatch.watch(model, optimizer, rules=ruleset(), run_dir=tmp_path, listen="127.0.0.1:0")

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ERRORS[error]()

    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, broken)
        got = train(model, optimizer, skip_nan=False)
    errors = gw.health.errors()
    gw.close()
    assert errors.get(component, 0) >= 1, errors
    # A broken sink changes nothing at all; a broken watch is an absent one.
    acted = component in ("prometheus", "journal", "log", "norm_local", "modules", "columns")
    want = trained_bare(acted or site in ("advance", "prunable"))
    if site not in ("inspect", "read", "hear", "due", "clock"):
        assert all(
            torch.equal(a, b) or (a.isnan().any() and b.isnan().any()) for a, b in zip(got, want, strict=True)
        )


@pytest.mark.parametrize("error", ERRORS)
def test_a_fault_while_counting_what_a_raised_backward_left_is_harmless(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that steps after a backward that raised gets the step it gets without us, whatever fails of ours."""

    def train_on() -> list[torch.Tensor]:
        for batch in data():
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="the user's own"):
                model(batch).pow(2).sum().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ERRORS[error]()

    def raises(grad: torch.Tensor) -> None:
        raise RuntimeError("the user's own")

    model, optimizer = build()
    next(model.parameters()).register_hook(raises)
    want = train_on()
    model, optimizer = build()
    next(model.parameters()).register_hook(raises)
    with gradwatch.watch(
        model, optimizer, rules="observe-only", run_dir=tmp_path, listen="127.0.0.1:0"
    ) as gw:
        monkeypatch.setattr(read_after_backward.Capture, "drain", broken)
        got = train_on()
        errors = gw.health.errors()
    assert errors.get("boundary", 0) >= 1, errors
    for a, b in zip(got, want, strict=True):  # the batch with a NaN is not skipped here
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("passing", [KeyboardInterrupt, SystemExit, TrainingStopped])
def test_what_must_pass_passes(
    passing: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, sys.exit and a rule's stop are never swallowed."""
    model, optimizer = build()
    with gradwatch.watch(model, optimizer, rules=ruleset(), run_dir=tmp_path, listen="127.0.0.1:0"):

        def raises(*args: Any, **kwargs: Any) -> Any:
            raise passing

        monkeypatch.setattr(captured.OptimizerCapture, "close_window", raises)
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(passing):
            optimizer.step()


def test_three_faults_in_a_row_pause_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three consecutive faults the step path is left alone for a minute, then tried again."""
    model, optimizer = build()
    with gradwatch.watch(model, optimizer, rules=ruleset(), run_dir=tmp_path, listen="127.0.0.1:0") as gw:
        calls = []

        def broken(*args: Any) -> Any:
            calls.append(1)
            raise ValueError

        with monkeypatch.context() as patch:
            patch.setattr(captured.OptimizerCapture, "close_window", broken)
            train(model, optimizer, skip_nan=False)
        assert len(calls) == active_or_paused.FAILURES
        assert gw.health.up()["boundary"] is False
        monkeypatch.setattr(active_or_paused, "PAUSE_SECONDS", 0.0)
        session_of(gw)._activity.paused_until = 0.0
        train(model, optimizer, skip_nan=False)
        assert gw.status()["steps"] > 0


def test_strict_lets_our_faults_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`strict=True` is for CI: a fault of ours fails the step."""
    model, optimizer = build()
    with gradwatch.watch(
        model, optimizer, rules=ruleset(), run_dir=tmp_path, listen="127.0.0.1:0", strict=True
    ):

        def broken(*args: Any) -> Any:
            raise ValueError("broken on purpose")

        monkeypatch.setattr(captured.OptimizerCapture, "close_window", broken)
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ValueError, match="broken on purpose"):
            optimizer.step()


def test_health_that_cannot_speak_still_counts() -> None:
    """A logger that raises is itself counted, not raised."""

    def speak(component: str, error: BaseException) -> None:
        raise OSError("stderr is gone")

    health = Health(on_first=speak)
    for _ in range(3):
        health.report("capture", ValueError())
    assert health.errors() == {"capture": 3, "log": 1}


def test_sink_that_cannot_open_leaves_training_alone(tmp_path: Path) -> None:
    """A sink of the user's that raises everywhere is counted and switched off."""

    class Broken:
        name = "broken"

        def open(self, run: RunInfo, health: Health) -> None:
            raise OSError(errno.EROFS, "read-only file system")

        def write(self, record: Record) -> None:
            raise AssertionError("must not be reached")

        def flush(self, timeout: float) -> bool:
            raise OSError

        def close(self) -> None:
            raise OSError

    model, optimizer = build()
    with gradwatch.watch(model, optimizer, rules=ruleset(), sinks=[Broken()], run_dir=tmp_path) as gw:
        train(model, optimizer, skip_nan=False)
        assert gw.health.errors() == {"broken": 1}
        assert gw.health.up()["broken"] is False
        assert gw.status()["steps"] == 6


# As SITES, of steps judged together; whether they are judged one by one instead, or are without a Record.
SITES_OF_MANY: dict[str, tuple[Any, str, str, bool]] = {
    "assemble": (many_deferred_steps, "assemble_many", "boundary", True),
    "evaluate": (BoundEngine, "evaluate_many", "boundary", True),
    "clip": (many_deferred_steps, "_clipped", "boundary", True),
    "health": (CheckpointHealthTracker, "after_all", "boundary", False),
    "totals": (SessionCounts, "observe_all", "boundary", False),
    "publish": (Publishing, "give_all", "boundary", False),
    "prometheus": (PrometheusSink, "write_all", "prometheus", True),
    "journal": (JournalSink, "write_all", "journal", True),
    "log": (LogSink, "write_all", "log", True),
}
MANY = 150


def train_calmly(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """So long that steps are judged together; a `flush` ends it within a block."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(MANY):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).pow(2).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("site", SITES_OF_MANY)
def test_a_fault_with_many_steps_costs_none_in_silence(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are as bare, and each step has its Record, or is counted as unjudged and not called healthy."""
    expected = train_calmly(*build())
    owner, attribute, component, kept = SITES_OF_MANY[site]
    calls: list[None] = []

    def broken(*_: Any, **__: Any) -> Any:
        calls.append(None)
        raise ValueError("broken")

    monkeypatch.setattr(owner, attribute, broken)
    monkeypatch.setattr(active_or_paused, "FAILURES", 10**6)
    model, optimizer = build()
    sink = Kept()
    sinks = [sink, PrometheusSink(listen=None), JournalSink(), LogSink()]
    rules = parse_rules("version: 1\nrules: {spike: {detect: {kind: spike, above: 100}}}\n")
    with gradwatch.watch(model, optimizer, rules=rules, sinks=sinks, run_dir=tmp_path) as gw:
        found = train_calmly(model, optimizer)
        account = gw.status()["account"]["watched"]
        healthy, errors = gw.healthy, gw.health.errors()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert calls, "no steps were judged together"
    assert errors.keys() == {component}
    steps = [record.snapshot.step for record in sink.records]
    assert steps == sorted(set(steps))
    assert len(steps) + account["unjudged"] == MANY
    assert (account["unjudged"] == 0) == kept
    assert healthy == kept
