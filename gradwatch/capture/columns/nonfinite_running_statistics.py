"""Running statistics of normalisation layers that a non-finite batch has entered: skipping the step does not undo that.

BatchNorm writes its running mean and variance in the forward. Training never reads them again, so gradients are
finite from the next batch on, while every evaluation and every checkpoint is lost: a NaN in a moving average stays.
A forward that no backward follows shows in no gradient, so the looks at the weights read them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradwatch.errors import GradwatchError
from gradwatch.taps.module_tree import WITH_RUNNING_STATISTICS

STATISTICS = ("running_mean", "running_var")
AGAIN = 50
"""Steps between two looks at statistics that were not finite: on a device each look waits."""


class NonfiniteStatisticsError(GradwatchError):
    """Running statistics are not finite; the message names them and says how to fix them."""


class RunningStatistics:
    """Looks at the running statistics of `models()` where gradients were not finite, a look found some, or it is asked.

    `say` reports a find, once.
    """

    def __init__(
        self, models: Callable[[], list[nn.Module]], say: Callable[[str, BaseException], None]
    ) -> None:
        self._models = models
        self._say = say
        self._nonfinite: tuple[str, ...] = ()
        self._looked = 0

    @property
    def ruined(self) -> bool:
        """True if some were not finite at the last look: every step asks anew until they are."""
        return bool(self._nonfinite)

    def nonfinite(self, suspected: bool) -> tuple[str, ...]:
        """Names of the statistics that hold NaN or Inf; asked at every step, `suspected` where gradients do.

        Looked at now where they are `suspected`, as before a checkpoint, or where some did at the last look.
        """
        if not (suspected or self._nonfinite):
            return ()
        self._looked = 0 if suspected else self._looked + 1
        if self._looked % AGAIN == 0:
            self._take(tuple(self._nonfinite_layers()))
        return self._nonfinite

    def found(self, nonfinite: tuple[str, ...]) -> None:
        """Take what a look at the weights has found; one that found nothing may be older than what is known here."""
        if nonfinite and not self._nonfinite:
            self._looked = 0
            self._take(nonfinite)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each of them as it is now, by name."""
        for model in self._models():
            for name, module in model.named_modules():
                if isinstance(module, WITH_RUNNING_STATISTICS):
                    for statistic in STATISTICS:
                        buffer = getattr(module, statistic, None)
                        if isinstance(buffer, Tensor) and not is_lazy(buffer) and buffer.is_floating_point():
                            yield f"{name}.{statistic}", buffer

    def _take(self, nonfinite: tuple[str, ...]) -> None:
        before, self._nonfinite = self._nonfinite, nonfinite
        if nonfinite and not before:
            self._say("running-statistics", NonfiniteStatisticsError(_said(nonfinite)))

    def _nonfinite_layers(self) -> list[str]:
        with torch.no_grad():
            return [
                name for name, buffer in dict(self.named()).items() if not bool(buffer.isfinite().all())
            ]  # sync: on suspicion


def _said(names: tuple[str, ...]) -> str:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"running statistics hold NaN or Inf: {listed}. They were loaded so, or what came to their layer was not "
        "finite, and skipping the step does not undo that: evaluation and checkpoints are wrong from here on; call "
        "`reset_running_stats()` on these layers or load them from the last good checkpoint, and keep batches that are "
        "not finite from the forward"
    )
