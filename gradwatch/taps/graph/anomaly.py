"""torch's anomaly mode as a recording needs it: nodes remember their Python lines, and the script notices nothing.

The mode is the whole process's. A script that asks meanwhile is told what it would be told without: `detect_anomaly`
asks, and switches back to that in the end, when the recording may be over. Where a backward raises, torch also warns
with the lines of the forward, which it would not do without the mode. A filter of Python's ignores that warning, also
under `-W error`, where torch would print it in another way. It is put into the list of filters past `warnings`, which
would show again all that a script has been warned of once; where the script has put filters before it since, the
warning is dropped just before it is shown. At the end of its message about a tensor that was changed in place torch
gives another hint under the mode: `with_bare_hint` puts the one in its place that it gives without.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gradwatch.runtime import guard
from gradwatch.taps import dispatch_modes
from gradwatch.taps.patch import Layer, Patch

_WITH_LINES = re.compile(
    r"Error detected in [^\n]*\. (Traceback of forward call|No forward pass information)"
    r"|\n\nPrevious calculation was induced by "
)
"""Beginnings of the warnings in which torch shows what the mode has written down."""
_HINT = " Hint: the backtrace further above shows"
"""Beginning of the hint that torch gives under the mode about a tensor that was changed in place."""
_enabled: Callable[[], bool] = torch._C.is_anomaly_enabled
_checks: Callable[[], bool] = torch._C.is_anomaly_check_nan_enabled


class AnomalyMode:
    """The mode without its check, between `enter` and `leave`; both do nothing where the script has switched it on."""

    def __init__(self) -> None:
        self._found: bool | None = None  # whether NaN is checked for in the script's mode; None: not entered
        self._removes: list[Callable[[], None]] = []

    def enter(self) -> None:
        """Switch the mode on."""
        if not _enabled():
            _hint()  # while the mode is off
            self._found = found = _checks()
            torch.set_anomaly_enabled(True, False)
            for patch in (_is_enabled, _is_checked, _shown):
                self._removes.append(patch.listen(found))
            filters: list[Any] = warnings.filters  # type: ignore[assignment]
            self._removes.append(partial(_remove, filters))
            filters.insert(0, _FILTER)

    def leave(self) -> None:
        """Switch it off, unless the script has switched on its own meanwhile; also where entering was broken off."""
        if self._found is not None and not _checks():
            torch.set_anomaly_enabled(False, self._found)
        self._found = None
        while self._removes:
            self._removes[-1]()
            self._removes.pop()


def with_bare_hint(error: BaseException) -> None:
    """Give an error that torch has raised under a recording's mode the message that it has without."""
    text = error.args[0] if len(error.args) == 1 else None
    if type(error) is RuntimeError and type(text) is str and _is_enabled.listeners and not _checks():
        changed, hint, _ = text.partition(_HINT)
        if hint:
            error.args = (changed + _hint(),)


@functools.cache
def _hint() -> str:
    """The hint that this torch gives where the mode is off, found by changing a saved tensor in place."""
    return dispatch_modes.unseen(_hint_of_torch)


def _hint_of_torch() -> str:
    with torch.inference_mode(False), torch.enable_grad():
        result = torch.ones((), device="cpu", requires_grad=True).exp()
        result.detach().zero_()
        try:
            getattr(result.grad_fn, "_saved_result", None)  # as a backward reads it
        except RuntimeError as error:
            _, mark, hint = str(error).partition(" Hint: ")
            return mark + hint
    return ""


def _recording(layer: Layer[bool]) -> bool:
    """True if the mode is on for a recording only: the script's own, unless it wants none, checks for NaN."""
    return bool(layer.listeners) and not _checks()


def _make_enabled(layer: Layer[bool]) -> Callable[[], bool]:
    @functools.wraps(layer.original)
    def enabled() -> bool:
        return not _recording(layer) and bool(layer.original())

    return enabled


def _make_checked(layer: Layer[bool]) -> Callable[[], bool]:
    @functools.wraps(layer.original)
    def checked() -> bool:
        return layer.listeners[-1] if _recording(layer) else bool(layer.original())

    return checked


def _make_shown(layer: Layer[bool]) -> Callable[[Any], None]:
    @functools.wraps(layer.original)
    def shown(message: Any) -> None:
        if not (_recording(layer) and _of_the_mode(message.message)):
            layer.original(message)

    return shown


def _of_the_mode(warning: Any) -> bool:
    return type(warning) is UserWarning and _WITH_LINES.match(str(warning)) is not None


class _WithLines:
    """Stand-in for a pattern: matches these warnings where the mode is on for a recording only."""

    def match(self, text: str) -> bool:
        """True if the warning with this text is ignored."""
        try:
            return not _checks() and _WITH_LINES.match(text) is not None
        except Exception as error:
            guard.fault("localise", error)
            return False


def _remove(filters: list[Any]) -> None:
    """Take the filter out of the list that it was put into, once; a script may have put another in its place."""
    at = next((k for k, one in enumerate(filters) if one is _FILTER), None)
    if at is not None:
        del filters[at]


_FILTER = ("ignore", _WithLines(), UserWarning, None, 0)
_is_enabled: Patch[bool] = Patch(torch, "is_anomaly_enabled", _make_enabled)
_is_checked: Patch[bool] = Patch(torch, "is_anomaly_check_nan_enabled", _make_checked)
_shown: Patch[bool] = Patch(warnings, "_showwarnmsg", _make_shown)
