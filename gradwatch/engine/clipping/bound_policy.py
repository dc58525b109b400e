"""One policy of `clip:` bound to the sites it covers, and its state: saved, restored, emptied.

Axes: S sites, I sites of one policy, K its series (a site each, or a group of them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.policies import Policy, State
from gradwatch.records.snapshot import BoolArray

Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class BoundPolicy:
    """One policy and the sites it covers.

    `key` names its state in checkpoints. `index[I]` are the sites it covers, `owners[I]` the series of each (None =
    every site is its own series), `names[K]` the names of the series, `roots[K]` the square roots of their numbers of
    elements. `place` is the key path in the rule file.
    """

    place: str
    key: str
    policy: Policy
    names: tuple[str, ...]
    index: Index
    owners: Index | None
    roots: NDArray[np.float64]

    def measured(self, norms: NDArray[np.float64], calls: BoolArray) -> tuple[NDArray[np.float64], BoolArray]:
        """`(norms[K], present[K])` in the quantity the policy clips by (norm or rms), from those of all S sites."""
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


def named_arrays(state: State) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of a state, each with its name."""
    return zip(state._fields, state, strict=True) if state else iter(())  # type: ignore[attr-defined]


def emptied(one: BoundPolicy, state: State, mask_S: BoolArray) -> State:
    """The state in which every series is empty that contains a site of `mask_S` bool[S]."""
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


def filled(one: BoundPolicy, rows: Mapping[str, Any] | None) -> State:
    """The state with what was saved of the series that still exist; the others are empty."""
    state = one.policy.init(len(one.names))
    place = {} if rows is None else {name: k for k, name in enumerate(rows["names"])}
    here = [k for k, name in enumerate(one.names) if name in place]
    if rows is None or not state or not here:
        return state
    there = [place[one.names[k]] for k in here]
    arrays = []
    for name, empty in named_arrays(state):
        values = np.asarray(rows["fields"][name], empty.dtype)
        if empty.ndim > 1:
            values = values.reshape(-1, len(place))  # a ring without rows is saved as []
            empty = _with_rows(empty, values)
            empty[: len(values), here] = values[:, there]
        else:
            empty[here] = values[there]
        arrays.append(empty)
    return type(state)(*arrays)
