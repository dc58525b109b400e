"""A mode of the script's sees what it would see without gradwatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradwatch
from gradwatch.rules.files import parse_rules
from gradwatch.taps import dispatch_modes
from tests.support.kept import Kept

RULES = """version: 1
rules:
  n: {detect: {kind: nonfinite}, do: [skip_step]}
  high: {detect: {kind: above, of: total_norm, threshold: 1.0e+6}}
"""
LOCAL = "version: 1\nrules: {a: {detect: {kind: above, of: norm_local, threshold: 1e9}}}\n"
MODULES = """version: 1
modules: {tap: TAP, names: ["1", "2"]}
rules:
  after: {detect: {kind: above, of: grad_output_norm, threshold: 1e9}}
  spread: {detect: {kind: above, of: activation_std, threshold: 1e9}}
"""
BOUNDED = """
  explosion:
    detect: {kind: above, of: grad_input_norm, threshold: 1e-9}
    scope: module
    do: [clip: {to: 1e-9, at: backward}]
"""
BACKWARD = "version: 1\nrules: {}\nclip: {total: {method: %s}, at: backward}\n"
OPT_IN = {
    "local": LOCAL,
    "output": MODULES.replace("TAP", "output"),
    "full backward": MODULES.replace("TAP", "full_backward"),
    "module bound": MODULES.replace("TAP", "full_backward") + BOUNDED,
    "norm": BACKWARD % "norm, max_norm: 1.0e-3, scope: param",
    "value": BACKWARD % "value, clip_value: 1.0e-4",
    "agc": BACKWARD % "agc, ratio: 1.0e-4",
    "micro": "version: 1\nrules: {n: {detect: {kind: nonfinite}, do: [drop_micro]}}\n",
}
CLIP = RULES + "clip: {total: {method: norm, max_norm: 1.0e-3}}\n"


class Dispatched(TorchDispatchMode):
    """Notes every operator that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Notes every function of torch's that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__qualname__", str(func)))
        return func(*args, **(kwargs or {}))


def step(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, scaler: Any) -> None:
    """One step of a loop of this kind."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    if kind == "closure":
        optimizer.step(closure)
    elif kind == "scaler":
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    else:
        closure()
        optimizer.step()


def seen(
    kind: str, mode: type[Dispatched] | type[Called], rules: str | None, folder: Path, large: bool = False
) -> list[str]:
    """What a mode notes that is active in the last two of four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if large:  # more than is read at a glance
        model[0] = nn.Linear(3, 40_000)
        model[2] = nn.Linear(40_000, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    gw = None
    if rules is not None:
        gw = gradwatch.watch(
            model, optimizer, rules=parse_rules(rules), sinks=[Kept()], run_dir=folder, strict=True
        )
    x = torch.ones(2, 3)
    for _ in range(2):
        step(kind, model, optimizer, x, scaler)
    with mode() as noted:
        for _ in range(2):
            step(kind, model, optimizer, x, scaler)
    if gw is not None:
        assert gw.status()["steps"] == 4
        gw.close()
    return noted.seen


@pytest.mark.parametrize("mode", [Dispatched, Called])
@pytest.mark.parametrize("kind", ["plain", "closure", "scaler"])
def test_a_mode_sees_the_same_with_and_without_a_watch(
    kind: str, mode: type[Dispatched] | type[Called], tmp_path: Path
) -> None:
    """Operators and functions, in order, of forward, backward and step; also where the watch clips."""
    bare = seen(kind, mode, None, tmp_path)
    assert bare
    assert seen(kind, mode, RULES, tmp_path) == bare
    assert seen(kind, mode, CLIP, tmp_path) == bare


@pytest.mark.parametrize("mode", [Dispatched, Called])
@pytest.mark.parametrize("tap", OPT_IN)
def test_a_mode_sees_the_same_with_and_without_a_tap(
    tap: str, mode: type[Dispatched] | type[Called], tmp_path: Path
) -> None:
    """With every tap that is asked for: hooks inside the backward read, and clip, in the script's thread."""
    for large in (False, True):
        bare = seen("plain", mode, None, tmp_path, large)
        assert seen("plain", mode, OPT_IN[tap], tmp_path, large) == bare


def test_modes_are_put_back_whatever_is_raised() -> None:
    """The stacks are those found, in order; the default device stays in force meanwhile."""

    def fails() -> None:
        assert (dispatch_modes.dispatching(), dispatch_modes.functions()) == (0, 1)
        assert torch.empty(1).is_meta
        raise KeyboardInterrupt

    with Dispatched(), Called(), torch.device("meta"), Dispatched():
        found = stacks()
        with pytest.raises(KeyboardInterrupt):
            dispatch_modes.unseen(fails)
        assert stacks() == found
        assert list(map(len, found)) == [2, 2]


def stacks() -> tuple[list[Any], list[Any]]:
    """The dispatch and the function modes of this thread."""
    return (
        [torch._C._get_dispatch_stack_at(k) for k in range(dispatch_modes.dispatching())],
        [torch._C._get_function_stack_at(k) for k in range(dispatch_modes.functions())],
    )
