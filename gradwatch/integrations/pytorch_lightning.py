"""gradwatch as a callback of `pytorch_lightning.Trainer` (for `lightning`, see the module of that name)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradwatch.integrations.lightning_hooks import LightningHooks
from gradwatch.integrations.missing_framework import requires

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gradwatch.integrations.callback_session import Options

with requires("pytorch_lightning", "lightning"):
    from pytorch_lightning import Callback


class GradwatchCallback(LightningHooks, Callback):
    """Watches every fit; all that `gradwatch.integrations.lightning.GradwatchCallback` says holds here."""

    def __init__(self, **options: Unpack[Options]) -> None:
        LightningHooks.__init__(self, options)
