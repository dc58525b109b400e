"""torch's anomaly mode as a recording needs it: nodes remember their Python lines, and the script notices nothing.

The mode is the whole process's. A script that asks meanwhile is told what it would be told without: `detect_anomaly`
asks, and switches back to that in the end, when the recording may be over. Where a backward raises, torch also warns
with the lines of the forward, which it would not do without the mode; so that warning is dropped just before it is
shown. A filter would not do: every change of Python's filters shows again what a script has been warned of once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gradwatch.taps.patch import Layer, Patch

_WITH_LINES = ("Error detected in ", "\n\nPrevious calculation was induced by ")
"""Beginnings of the warnings in which torch shows what the mode has written down."""
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
            self._found = found = _checks()
            torch.set_anomaly_enabled(True, False)
            for patch in (_is_enabled, _is_checked, _shown):
                self._removes.append(patch.listen(found))

    def leave(self) -> None:
        """Switch it off, unless the script has switched on its own meanwhile; also where entering was broken off."""
        if self._found is not None and not _checks():
            torch.set_anomaly_enabled(False, self._found)
        self._found = None
        while self._removes:
            self._removes[-1]()
            self._removes.pop()


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
    return type(warning) is UserWarning and str(warning).startswith(_WITH_LINES)


_is_enabled: Patch[bool] = Patch(torch, "is_anomaly_enabled", _make_enabled)
_is_checked: Patch[bool] = Patch(torch, "is_anomaly_check_nan_enabled", _make_checked)
_shown: Patch[bool] = Patch(warnings, "_showwarnmsg", _make_shown)
