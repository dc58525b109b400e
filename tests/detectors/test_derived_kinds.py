"""Kinds derived from shipped ones: what they do otherwise holds for many steps as for one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors import Spike, State
from gradwatch.records.snapshot import FloatArray


@dataclass(frozen=True, slots=True)
class Strict(Spike):
    """A spike whose every step breaches."""

    def advance_logs(self, state: State, x: NDArray[np.float32]) -> tuple[FloatArray | None, State]:
        """As `Spike` learns, but with a score beyond any threshold."""
        return np.full(len(x), np.inf), Spike.advance_logs(self, state, x)[1]


def test_a_derived_kind_judges_many_steps_as_it_judges_one() -> None:
    """The shipped kind's way of judging many at once does not pass over an `advance_logs` of one's own."""
    detector, x = Strict(), np.zeros((40, 3), np.float32)
    state: State = detector.init(3)
    for each in x:
        _, state = Spike.advance_logs(detector, state, each)
    assert Spike().advance_many_logs(state, x)[0] == len(x)
    assert detector.advance_many_logs(state, x)[0] == 0
