"""Laws of pruning: where the few hooks stand that are left."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.capture.window.hook_pruning import HookPruning


@given(versions=st.lists(st.integers(-1, 3), max_size=300), count=st.integers(2, 9))
def test_the_hooks_left_stand_at_both_ends_and_evenly_between(versions: list[int], count: int) -> None:
    """Only where a gradient arrived, `count` of them if there are so many, the gaps equal but for one."""
    pruning = HookPruning(len(versions))
    pruning.note(versions, np.array([version >= 0 for version in versions], np.int32), backwards=1)
    present = [k for k, version in enumerate(versions) if version >= 0]
    places = [present.index(k) for k in pruning.prune(count)]
    assert len(places) == len(set(places)) == min(count, len(present))
    assert places == sorted(places)
    if places:
        assert (places[0], places[-1]) == (0, len(present) - 1)
        gaps = [after - before for before, after in itertools.pairwise(places)]
        assert max(gaps, default=0) - min(gaps, default=0) <= 1
