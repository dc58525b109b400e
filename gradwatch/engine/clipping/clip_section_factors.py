"""Several policies of `clip:` joined: at each site and step one factor, the smallest; and what the policies learn.

The clips of rules are joined with it, and with each other, by `Decision.__or__`; inside the backward by
`policies.norm_bound.factor_of`. There too the smallest factor holds.

A clip of the total norm is not among the policies here: it needs one scalar, which the boundary (or a device) makes of
the gradients it finds, bit for bit as torch does. Every other policy gives a factor per site; where several cover one
site, the smallest is applied, once.

Norms are those of the gradients as found at the boundary, after the user's own clipping; the policies learn from these,
before any factor of gradwatch. A jump of the learning rate makes detectors begin anew but leaves these states alone: a
reset would leave the steps after each such jump unclipped. Use `rebaseline` for changes made on purpose.

Axes: S sites, K series of one policy (a site each, or a group of them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.engine.clipping.bound_policy import BoundPolicy, emptied, filled, named_arrays
from gradwatch.errors import GradwatchError
from gradwatch.policies import ElementwisePolicy, State
from gradwatch.records.snapshot import BoolArray, Snapshot
from gradwatch.rules.rule_set import ClipAt
from gradwatch.runtime.interruption import not_ours

Failed = Callable[[Exception], None]
"""Called with the error of a policy (another's, most likely) that raised, or gave factors that no gradient can bear."""


@dataclass(frozen=True, slots=True, eq=False)
class Clipping:
    """All policies of a rule file bound to S sites; false if there are none.

    `max_norm` is the bound on the total norm (None = none), `policies` are those that give factors, `elementwise` those
    on elements, which torch carries out, each with the bool[S] of its parameters. `at` "backward": hooks carry them out
    (`gradwatch.engine.actions.backward_clips`), and here they only learn, from the norms before that. Before the step
    `from_step` they only learn too.
    """

    max_norm: float | None = None
    policies: tuple[BoundPolicy, ...] = ()
    elementwise: tuple[tuple[ElementwisePolicy, BoolArray], ...] = ()
    at: ClipAt = "step"
    from_step: int = 0

    def __bool__(self) -> bool:
        return self.max_norm is not None or bool(self.policies) or bool(self.elementwise)

    def init(self) -> tuple[State, ...]:
        """The states of policies that have learned nothing."""
        return tuple(one.policy.init(len(one.names)) for one in self.policies)

    def coefficients(
        self, states: tuple[State, ...], snapshot: Snapshot, failed: Failed
    ) -> NDArray[np.float32] | None:
        """float32[S]: at each site the smallest factor of all policies; None if every factor is 1.

        `failed` is called with the error of a policy, and for factors that are not finite or negative: these are 1
        then.
        """
        # Infinite where no policy says anything, so that a factor above 1 is not lowered by those that are silent.
        factors = np.full(len(snapshot.norm), np.inf, np.float32)
        for one, state, (norms, present) in self._measured(states, snapshot):
            one.spread(_sound(one, state, norms, present, failed), factors)
        factors[factors == np.inf] = 1
        return None if (factors == 1).all() else factors

    def learn(self, states: tuple[State, ...], snapshot: Snapshot, failed: Failed) -> tuple[State, ...]:
        """The states after a step that the optimizer takes; not to be called for any other step.

        `failed` is called with the error of a policy, whose state then stays as it was.
        """
        return tuple(
            _learned(one, state, norms, present, failed)
            for one, state, (norms, present) in self._measured(states, snapshot)
        )

    def _measured(
        self, states: tuple[State, ...], snapshot: Snapshot
    ) -> Iterator[tuple[BoundPolicy, State, tuple[NDArray[np.float64], BoolArray]]]:
        with np.errstate(invalid="ignore"):  # Inf that the user's own code made 0
            clipped = 1 if self.at == "backward" else snapshot.coef
            norms = snapshot.wide_norm() * clipped
        for name in ("nonfinite", "norm_overflow"):
            if name in snapshot.columns:  # finite at the end of backward, perhaps, and not any longer
                marked = snapshot.columns[name].values > 0
                norms[marked & (np.isfinite(snapshot.norm) | ~np.isfinite(norms))] = np.nan
        calls = snapshot.calls > 0
        for one, state in zip(self.policies, states, strict=True):
            yield one, state, one.measured(norms, calls)

    def reset(self, states: tuple[State, ...], mask_S: BoolArray) -> tuple[State, ...]:
        """The states in which every series is empty that contains a site of `mask_S` bool[S]."""
        return tuple(emptied(one, state, mask_S) for one, state in zip(self.policies, states, strict=True))

    def to_dict(self, states: tuple[State, ...]) -> dict[str, Any]:
        """Plain lists and numbers (no NaN), by policy and name of the series; only policies that learn are in it."""
        return {
            one.key: {"names": list(one.names), "fields": {n: a.tolist() for n, a in named_arrays(state)}}
            for one, state in zip(self.policies, states, strict=True)
            if state
        }

    def restored(self, saved: Mapping[str, Any]) -> tuple[State, ...]:
        """The states from a `to_dict`, for policies and series that still exist; all others are empty."""
        return tuple(filled(one, saved.get(one.key)) for one in self.policies)


def _sound(
    one: BoundPolicy, state: State, norms: NDArray[np.float64], present: BoolArray, failed: Failed
) -> NDArray[np.float32]:
    """float32[K] the factors of one policy; 1 where they are not finite or negative, and where it fails."""
    try:
        factors = np.asarray(_again(lambda: one.policy.coefficients(state, norms, present)), np.float32)
        if factors.shape != norms.shape:
            raise GradwatchError(f"{factors.shape} factors for {norms.shape} series")
    except Exception as error:
        failed(error)
        return np.ones(len(norms), np.float32)
    sound = np.isfinite(factors) & (factors >= 0)
    if sound.all():
        return factors
    k = int(np.argmin(sound))
    series = f" of {one.names[k]!r}" if one.names[k] else ""
    failed(
        GradwatchError(
            f"clip.{one.place}: method {one.policy.method!r} returned the factor {factors[k]}{series}; for"
            f" {np.count_nonzero(~sound)} of {len(sound)} series it is not finite or below 0, and 1 is used instead"
        )
    )
    return np.where(sound, factors, np.float32(1))


def _again(ask: Callable[[], Any]) -> Any:
    """Ask twice if need be: a passing fault on one rank must not make the replicas diverge."""
    try:
        return ask()
    except Exception as error:
        if not_ours(error):
            raise
        return ask()


def _learned(
    one: BoundPolicy, state: State, norms: NDArray[np.float64], present: BoolArray, failed: Failed
) -> State:
    try:
        return cast(State, _again(lambda: one.policy.learn(state, norms, present)))
    except Exception as error:
        failed(error)
        return state


NO_CLIPPING = Clipping()
"""A rule file without `clip:`."""
