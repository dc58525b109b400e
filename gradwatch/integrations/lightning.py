"""gradwatch as a callback of `lightning.pytorch.Trainer` (for `pytorch_lightning`, see the module of that name)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradwatch.integrations.lightning_hooks import LightningHooks
from gradwatch.integrations.missing_framework import requires

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gradwatch.integrations.callback_session import Options

with requires("lightning", "lightning"):
    from lightning.pytorch import Callback


class GradwatchCallback(LightningHooks, Callback):
    """Watches every fit: `Trainer(callbacks=[GradwatchCallback(rules="default")])`.

    Options are those of `gradwatch.watch`. `norm` is read before Lightning clips, over all accumulated batches;
    the rules see the loss of every step, which its backwards began with. The state travels in the trainer's
    checkpoints, and a second fit of the same model continues it. A rule that says stop ends the fit with
    `TrainingStopped`. Sinks given as objects serve one fit; those of the rule file are made anew for each.

    Raises at the start of a fit what `gradwatch.watch` raises.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        LightningHooks.__init__(self, options)
