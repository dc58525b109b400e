"""torch's anomaly mode as a recording needs it: nodes remember their Python lines, nothing is raised, nothing is shown.

The mode is the whole process's. Where a backward raises, torch also warns with those lines, which a script that has not
asked for the mode would not show; so that warning is dropped just before it is shown. A filter would not do: every
change of Python's filters shows again what a script has been warned of once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from gradwatch.taps.patch import Layer, Patch

_WITH_LINES = ("Error detected in ", "\n\nPrevious calculation was induced by ")
"""Beginnings of the warnings in which torch shows what the mode has written down."""


class AnomalyMode:
    """The mode without its check, between `enter` and `leave`; both do nothing where the script has switched it on."""

    def __init__(self) -> None:
        self._checks: bool | None = None  # as found; None: not entered
        self._show_again: Callable[[], None] | None = None

    def enter(self) -> None:
        """Switch the mode on."""
        if not torch.is_anomaly_enabled():
            self._checks = torch.is_anomaly_check_nan_enabled()
            torch.set_anomaly_enabled(True, False)
            self._show_again = _shown.listen(self)

    def leave(self) -> None:
        """Switch it off, unless the script has switched on its own meanwhile; also where entering was broken off."""
        if self._checks is not None and not torch.is_anomaly_check_nan_enabled():
            torch.set_anomaly_enabled(False, self._checks)
        self._checks = None
        if self._show_again is not None:
            self._show_again()
            self._show_again = None


def _make(layer: Layer[AnomalyMode]) -> Callable[[Any], None]:
    original = layer.original

    def shown(message: Any) -> None:
        if layer.listeners and _of_the_mode(message.message) and not torch.is_anomaly_check_nan_enabled():
            return
        original(message)

    return shown


def _of_the_mode(warning: Any) -> bool:
    return type(warning) is UserWarning and str(warning).startswith(_WITH_LINES)


_shown = Patch(warnings, "_showwarnmsg", _make)
