"""The state of optimizers taken by the script, as for a checkpoint: when that was, and if the weights were healthy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class TakenState(NamedTuple):
    """The script has taken the state of an optimizer, or of the watch; `number` counts from 0 those of one watch.

    `steps` holds (optimizer, last step that it had taken) of the first optimizers; `wall_time` is in Unix seconds.
    """

    number: int
    steps: tuple[tuple[int, int], ...]
    wall_time: float


@dataclass(frozen=True, slots=True)
class SavedState:
    """A `TakenState` with the health of the weights as they were then, as far as it is known by now.

    `looked`: a look at the weights themselves, begun at these steps or later, has found them fit. Until then `healthy`
    is by the gradients alone since the last look, which was after step `weights_step` (None: there was none).
    `reasons` say why they were not healthy.
    """

    number: int
    steps: tuple[tuple[int, int], ...]
    wall_time: float
    healthy: bool = True
    looked: bool = False
    weights_step: int | None = None
    reasons: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step after which it was taken: of several optimizers the least, -1 = not known."""
        return min((step for _, step in self.steps), default=-1)
