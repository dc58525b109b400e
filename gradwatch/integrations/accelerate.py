"""gradwatch in a loop of one's own built on `accelerate.Accelerator`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

import gradwatch.session.watch_function
from gradwatch.integrations import checkpoint_file
from gradwatch.integrations.missing_framework import requires
from gradwatch.session.watch import Watch, session_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gradwatch.integrations.callback_session import Options

with requires("accelerate", "accelerate"):
    from accelerate import Accelerator


def watch(
    accelerator: Accelerator,
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    **options: Unpack[Options],
) -> Watch:
    """Watch what `accelerator.prepare` returned, its state kept in the accelerator's checkpoints.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with gradwatch.integrations.accelerate.watch(accelerator, model, optimizer) as gw:
            ...

    As `gradwatch.watch`, with the same options and errors; `accelerator.save_state` also writes the watch's
    state, and `load_state` reads it where a checkpoint has one (call it after this function). Without this,
    `gradwatch.watch` on the prepared objects sees the same numbers.
    """
    gw = gradwatch.session.watch_function.watch(model, optimizer, **options)
    if not session_of(gw).models():  # GRADWATCH=0
        return gw

    def save(models: Any, weights: Any, folder: str) -> None:
        if accelerator.is_main_process:
            checkpoint_file.save(gw, folder)

    def load(models: Any, folder: str) -> None:
        checkpoint_file.load(gw, folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return gw
