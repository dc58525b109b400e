"""`clip:` bound to the sites of one optimizer: what multiplies each gradient at this step, and what is learned of it.

A clip of the total norm is not among the policies here: it needs one scalar, which the boundary (or a device) makes
of the gradients it finds, bit-equal to torch. All else is a factor per site; where several policies cover a site,
the smallest is applied, once.

Norms are those of the gradients as found at the boundary, after the user's own clipping; what is learned is learned
of them, before any factor of gradwatch. A jump of the learning rate, at which detectors start afresh, leaves the states
alone: a clip that went blind at every such jump would be none. `rebaseline` is there for changes made on purpose.

Axes: S sites, I sites of one policy, K its series (a site each, or a group of them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.engine.series import group_masks
from gradwatch.errors import GradwatchError
from gradwatch.policies import AnyPolicy, ElementwisePolicy, Policy, State, find_policy
from gradwatch.records.snapshot import BoolArray, Sites, Snapshot
from gradwatch.rules.rule_set import Clip, ClipAt, ClipPolicy, RuleSet
from gradwatch.runtime.interruption import not_ours

Index = NDArray[np.intp]
Failed = Callable[[Exception], None]
"""Told of a policy (another's, most likely) that raised, or gave factors that no gradient can bear."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundPolicy:
    """One policy and the sites it covers.

    `key` names its state in checkpoints; `index[I]` the sites it covers; `owners[I]` the series of each (None: one
    site, one series); `names[K]` of the series; `roots[K]` sqrt of their numbers of elements. `place` says where in
    the file it stands.
    """

    place: str
    key: str
    policy: Policy
    names: tuple[str, ...]
    index: Index
    owners: Index | None
    roots: NDArray[np.float64]

    def measured(self, norms: NDArray[np.float64], calls: BoolArray) -> tuple[NDArray[np.float64], BoolArray]:
        """`(norms[K], present[K])` in the policy's own quantity, from those of all S sites."""
        values, present = norms[self.index], calls[self.index]
        if self.owners is not None:
            count = len(self.names)
            # A gradient that no backward renewed counts, as it does for torch's clip: the optimizer will use it.
            values = np.sqrt(np.bincount(self.owners, weights=np.square(values), minlength=count))
            present = np.bincount(self.owners, weights=present, minlength=count) > 0
        return (values / self.roots if self.policy.of == "rms" else values), present

    def members(self) -> list[list[int]]:
        """The sites of each of its K series."""
        if self.owners is None:
            return [[int(k)] for k in self.index]
        return [self.index[self.owners == k].tolist() for k in range(len(self.names))]

    def spread(self, factors: NDArray[np.float32], onto: NDArray[np.float32]) -> None:
        """Lower the factors of the S sites to those of its K series."""
        own = factors if self.owners is None else factors[self.owners]
        onto[self.index] = np.minimum(onto[self.index], own)


@dataclass(frozen=True, slots=True, eq=False)
class Clipping:
    """All policies of a rule file bound to S sites; without any, falsy.

    `max_norm` the bound on the total norm (None = none); `policies` those that make factors; `elementwise` those
    that torch carries out, each with `bool[S]`, the parameters it covers. `at` "backward": hooks carry them out
    (`gradwatch.engine.actions.backward_clips`), and here they only learn, from the norms before that.
    """

    max_norm: float | None = None
    policies: tuple[BoundPolicy, ...] = ()
    elementwise: tuple[tuple[ElementwisePolicy, BoolArray], ...] = ()
    at: ClipAt = "step"

    def __bool__(self) -> bool:
        return self.max_norm is not None or bool(self.policies) or bool(self.elementwise)

    def init(self) -> tuple[State, ...]:
        """The states of policies that have seen nothing."""
        return tuple(one.policy.init(len(one.names)) for one in self.policies)

    def coefficients(
        self, states: tuple[State, ...], snapshot: Snapshot, failed: Failed
    ) -> NDArray[np.float32] | None:
        """float32[S], of all policies the smallest; None where every factor is 1.

        A policy that fails, or whose factors no gradient can bear, is reported to `failed`: its factors are 1 there.
        """
        # Infinite where no policy says anything, so that a factor above 1 is not lowered by those that are silent.
        factors = np.full(len(snapshot.norm), np.inf, np.float32)
        for one, state, (norms, present) in self._measured(states, snapshot):
            one.spread(_sound(one, state, norms, present, failed), factors)
        factors[factors == np.inf] = 1
        return None if (factors == 1).all() else factors

    def learn(self, states: tuple[State, ...], snapshot: Snapshot, failed: Failed) -> tuple[State, ...]:
        """The states after a step that the optimizer takes, not to be asked of any other; as it was where it fails."""
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
        """The states with every series empty that some site of the mask is part of."""
        return tuple(_forgotten(one, state, mask_S) for one, state in zip(self.policies, states, strict=True))

    def to_dict(self, states: tuple[State, ...]) -> dict[str, Any]:
        """Plain lists and numbers (no NaN) by policy and series name; of policies with memory only."""
        return {
            one.key: {"names": list(one.names), "fields": {n: a.tolist() for n, a in _named(state)}}
            for one, state in zip(self.policies, states, strict=True)
            if state
        }

    def restored(self, saved: Mapping[str, Any]) -> tuple[State, ...]:
        """The states from `to_dict`, as far as policies and series are still there; all else is empty."""
        return tuple(_filled(one, saved.get(one.key)) for one in self.policies)


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
    """Ask twice if need be: a passing fault on one rank must not part it from the others, who have none."""
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


def bind_clipping(ruleset: RuleSet, sites: Sites) -> Clipping:
    """The policies of a rule file over these sites; those that cover none of them are left out."""
    clip = ruleset.clip
    if clip is None:
        return NO_CLIPPING
    max_norm = None
    found: list[BoundPolicy] = []
    elementwise: list[tuple[ElementwisePolicy, BoolArray]] = []
    for place, said, mask in _covered(clip, ruleset, sites):
        if find_policy(said.method) is None:
            continue  # said by `rules_fit`, before anything is trained
        policy = make_policy(said)
        if place == TOTAL and said.method == "norm" and said.params.get("scope", "total") == "total":
            max_norm = float(said.params["max_norm"])
        elif isinstance(policy, ElementwisePolicy):
            mask = policy.covered(mask, sites)
            if mask.any():
                elementwise.append((policy, mask))
        elif isinstance(policy, Policy) and (mask := policy.covered(mask, sites)).any():
            found.append(_bound(place, policy, _scope(policy, said, place), mask, sites))
    return Clipping(max_norm, tuple(found), tuple(elementwise), clip.at)


TOTAL = "total"


def needs_host(clip: Clip | None) -> bool:
    """True if a policy needs its norms on the host before the step; clips by norm and elementwise ones do not."""
    if clip is None or clip.at == "backward":
        return False
    said = (*clip.groups.values(), *(() if clip.total is None else (clip.total,)))
    classes = [find_policy(one.method) for one in said]
    return any(cls is not None and issubclass(cls, Policy) and not cls.works_on_device() for cls in classes)


def clips_only_total(clip: Clip | None) -> bool:
    """True if a file clips nothing, or nothing but the total norm at the step: a bound that no state moves."""
    if clip is None:
        return True
    total = clip.total
    bounded = total is None or (total.method == "norm" and total.params.get("scope", "total") == "total")
    return bounded and not clip.groups and clip.at == "step"


def make_policy(said: ClipPolicy) -> AnyPolicy:
    """The policy that a rule file names; raises `GradwatchError` when there is no such method."""
    cls = find_policy(said.method)
    if cls is None:
        raise GradwatchError(f"no clip method {said.method!r} is registered")
    return cls(**{name: value for name, value in said.params.items() if name != "scope"})


def misfits(ruleset: RuleSet, sites: Sites) -> Iterator[tuple[str, str, str]]:
    """(place, reason, advice) of what of `clip:` does not fit these parameters; `sites` must carry their labels."""
    for place, said, mask in _covered(ruleset.clip or Clip(), ruleset, sites):
        if find_policy(said.method) is None:
            continue
        policy = make_policy(said)
        if not mask.any():
            continue
        covered = policy.covered(mask, sites)
        series = int(covered.sum())
        if isinstance(policy, Policy):
            series = len(_bound(place, policy, _scope(policy, said, place), covered, sites).names)
        misfit = policy.misfit(int(covered.sum()), series)
        if misfit is not None:
            yield place, *misfit


def _covered(clip: Clip, ruleset: RuleSet, sites: Sites) -> Iterator[tuple[str, ClipPolicy, BoolArray]]:
    """(place, what the file says there, bool[S] the parameters it covers); a parameter may be in several groups."""
    params = np.array([kind == "param" for kind in sites.kinds], np.bool_)
    if clip.total is not None:
        yield TOTAL, clip.total, params
    if clip.groups:
        masks = group_masks(ruleset.groups, sites)
        for name, said in clip.groups.items():
            yield f"groups.{name}", said, masks[name] & params


def _scope(policy: Policy, said: ClipPolicy, place: str) -> str:
    if not policy.scoped:
        return "param"
    return str(said.params.get("scope") or ("total" if place == TOTAL else "group"))


def _bound(place: str, policy: Policy, scope: str, mask: BoolArray, sites: Sites) -> BoundPolicy:
    index = np.flatnonzero(mask)
    names: tuple[str, ...]
    owners: Index | None = None
    numels = sites.numels[index].astype(np.float64)
    if scope == "param":
        names = tuple(sites.names[k] for k in index)
    else:
        # Under `total`, scope group means each label group by itself.
        labels = [sites.groups[k] if place == TOTAL and scope == "group" else "" for k in index]
        names = tuple(dict.fromkeys(labels))
        place_of = {name: k for k, name in enumerate(names)}
        owners = np.array([place_of[label] for label in labels], np.intp)
        numels = np.bincount(owners, weights=numels, minlength=len(names)).astype(np.float64, copy=False)
    key = f"{place}|{scope}|" + ",".join(map(str, policy.state_key()))
    return BoundPolicy(place, key, policy, names, index, owners, np.sqrt(np.maximum(numels, 1.0)))


def _named(state: State) -> Iterator[tuple[str, NDArray[Any]]]:
    return zip(state._fields, state, strict=True) if state else iter(())  # type: ignore[attr-defined]


def _forgotten(one: BoundPolicy, state: State, mask_S: BoolArray) -> State:
    chosen = mask_S[one.index]
    if one.owners is not None:
        chosen = np.bincount(one.owners, weights=chosen, minlength=len(one.names)) > 0
    if not state or not chosen.any():
        return state
    fresh = one.policy.init(len(one.names))
    arrays = []
    for array, empty in zip(state, fresh, strict=True):
        after = _with_rows(array, empty)
        after[..., chosen] = _with_rows(empty, array)[..., chosen]
        arrays.append(after)
    return type(state)(*arrays)


def _with_rows(array: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """A copy with at least as many rows as the other: a ring grows and is dropped in its life."""
    if array.ndim == 1 or len(array) >= len(other):
        return array.copy()
    larger = np.zeros((len(other), array.shape[1]), array.dtype)
    larger[: len(array)] = array
    return larger


def _filled(one: BoundPolicy, rows: Mapping[str, Any] | None) -> State:
    """The state with what was saved of the series that are still there."""
    state = one.policy.init(len(one.names))
    place = {} if rows is None else {name: k for k, name in enumerate(rows["names"])}
    here = [k for k, name in enumerate(one.names) if name in place]
    if rows is None or not state or not here:
        return state
    there = [place[one.names[k]] for k in here]
    arrays = []
    for name, empty in _named(state):
        values = np.asarray(rows["fields"][name], empty.dtype)
        if empty.ndim > 1:
            values = values.reshape(-1, len(place))  # a ring without rows is told as []
            empty = _with_rows(empty, values)
            empty[: len(values), here] = values[:, there]
        else:
            empty[here] = values[there]
        arrays.append(empty)
    return type(state)(*arrays)
