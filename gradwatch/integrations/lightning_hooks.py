"""Hooks of the Lightning callback, whichever of Lightning's two package names it is built for."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from gradwatch.integrations.callback_session import Options, Session
from gradwatch.session.watch import Watch


class LightningHooks:
    """Callback methods, mixed into `Callback`; see `gradwatch.integrations.lightning.GradwatchCallback`."""

    def __init__(self, options: Options) -> None:
        self._session = Session(options)

    @property
    def gw(self) -> Watch | None:
        """The watch of the present fit, or of the last one; None before any."""
        return self._session.gw

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch: the model is on its device and wrapped, the optimizers exist."""
        model = pl_module if trainer.model is None else trainer.model
        self._session.open(model, trainer.optimizers)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Read gradients after unscaling, before clipping; in manual optimization the module has clipped already."""
        if pl_module.automatic_optimization:
            self._session.about_to_clip()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the watch of a fit that failed or was interrupted."""
        self._session.close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the watch of a fit that is over."""
        self._session.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the watch also where a tuner ends a fit early, without `on_fit_end`."""
        if stage == "fit":
            self._session.close()

    def state_dict(self) -> dict[str, Any]:
        """Saved in every checkpoint."""
        return self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called before `on_fit_start` when a fit resumes from a checkpoint."""
        self._session.load(state_dict)
