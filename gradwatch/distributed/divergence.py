"""Errors for a rank that failed to carry out a decision of all ranks: its weights may differ from then on."""

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
        f"rank {ranks} failed to carry out the action of step {step}, while the other ranks did: the replicas "
        "diverge from this step on; restore a checkpoint on all ranks, or broadcast another rank's parameters"
    )


def unsent(rank: int, step: int) -> DivergedError:
    """Said by the rank itself, where the ranks exchange nothing."""
    return DivergedError(
        f"rank {rank} failed to carry out the action of step {step}, and the other ranks cannot be notified, "
        "because no rule exchanges data between ranks (`rank_mismatch` would); its parameters may differ from "
        "the other ranks' from this step on: restore a checkpoint on all ranks"
    )
