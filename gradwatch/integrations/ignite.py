"""gradwatch on an `ignite.engine.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

import gradwatch.session.watch_function
from gradwatch.integrations.callback_session import observe_number
from gradwatch.integrations.missing_framework import requires
from gradwatch.session.watch import Watch, session_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gradwatch.integrations.callback_session import Options

with requires("ignite", "ignite"):
    from ignite.engine import Engine, Events


def watch(
    engine: Engine,
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    loss: Callable[[Any], Any] | None = None,
    **options: Unpack[Options],
) -> Watch:
    """Watch the model that an engine trains.

        with gradwatch.integrations.ignite.watch(trainer, model, optimizer) as gw:
            trainer.run(loader, max_epochs=3)

    As `gradwatch.watch`, with the same options and errors. The loss of a step is what its backwards began with.
    `loss` takes `engine.state.output` to another number that rules are to take for it: known when an iteration has
    ended, they see it with the next step; what is not one number is passed over. To keep the state in Ignite's
    checkpoints, save the watch like anything else:
    `Checkpoint({"model": model, "optimizer": optimizer, "gradwatch": gw}, ...)`.
    """
    gw = gradwatch.session.watch_function.watch(model, optimizer, **options)
    if loss is None or not session_of(gw).models():  # GRADWATCH=0
        return gw

    def observe(engine: Engine) -> None:
        try:
            observe_number(gw, loss(engine.state.output))
        except Exception as error:
            session_of(gw).failed("observe", error)

    # No EXCEPTION_RAISED handler: where there is one, Ignite no longer raises the exception itself.
    engine.add_event_handler(Events.ITERATION_COMPLETED, observe)
    return gw
