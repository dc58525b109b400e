"""What is said of a rank that could not do what all ranks decided: from then on it may hold other weights than they."""

from __future__ import annotations

import numpy as np

from gradwatch.distributed.rank_facts import ReducedFacts
from gradwatch.errors import GradwatchError


class DivergedError(GradwatchError):
    """Ranks that should hold the same parameters no longer do; the message says which, since when, and what helps."""


def by(reduced: ReducedFacts) -> DivergedError:
    """The error every rank reports one step later, when it has learned of it."""
    ranks = ", ".join(map(str, np.flatnonzero(reduced.diverged)))
    step = int(reduced.by_rank("step").max()) - 2  # sent as 1 + the step that follows
    return DivergedError(
        f"rank {ranks} could not do what was decided of step {step}, and the others did: from there on ranks that"
        " should hold the same parameters do not; go back to a checkpoint, or broadcast those of another rank"
    )


def unsent(rank: int, step: int) -> DivergedError:
    """Said by the rank itself, where the ranks exchange nothing."""
    return DivergedError(
        f"rank {rank} could not do what was decided of step {step}, and the others, who did, cannot be told: no rule"
        " makes the ranks talk (rank_mismatch would); it may hold other parameters than they from there on: go back to"
        " a checkpoint"
    )
