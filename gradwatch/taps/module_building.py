"""Parameters being put into modules, noticed: a model is being built or loaded, and memory is wanted for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gradwatch.runtime import guard
from gradwatch.taps.dynamo import untraced

Listener = Callable[[], None]


def listen(built: Listener) -> Callable[[], None]:
    """Call `built` whenever a parameter is put into any module; the returned call ends that.

    `built` must neither raise nor add or remove a registration hook of torch's: torch is walking through them.
    """

    @untraced
    def noticed(module: nn.Module, name: str, param: Any) -> None:
        try:
            built()
        except Exception as error:
            guard.fault("capture", error)

    return register_module_parameter_registration_hook(noticed).remove
