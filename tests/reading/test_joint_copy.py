"""Numbers of several columns in one copy: each comes back as it was, whatever travels beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwatch.reading import async_copy
from gradwatch.reading.joint_copy import JointCopy
from gradwatch.reading.pinned_buffers import POOL

DTYPES = {
    torch.float32: st.floats(width=32, allow_nan=False),
    torch.float64: st.floats(allow_nan=False),
    torch.int64: st.integers(0, 2**53),
}


@given(
    st.lists(
        st.sampled_from(list(DTYPES)).flatmap(
            lambda dtype: st.tuples(st.just(dtype), st.lists(DTYPES[dtype], min_size=1, max_size=5))
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_numbers_come_back(groups: list[tuple[torch.dtype, list[float]]], left: bool) -> None:
    """Of float32, float64 and counts beyond float32's exact ones, whether or not `leave` was called."""
    copy = JointCopy()
    places = [copy.add([torch.tensor(number, dtype=dtype) for number in found]) for dtype, found in groups]
    if left:
        copy.leave()
    for (dtype, found), place in zip(groups, places, strict=True):
        assert copy.ready(place)
        numbers = copy.numbers(place)
        assert numbers.tolist() == found
        assert numbers.dtype == (np.float32 if dtype is torch.float32 else np.float64)


def test_one_copy_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """From one device, of whatever types."""
    sent: list[Tensor] = []

    class Wire:
        def send(self, part: Tensor) -> object:
            sent.append(part)
            return POOL.send(part)

    monkeypatch.setattr(async_copy, "POOL", Wire())
    copy = JointCopy()
    for dtype in DTYPES:
        copy.add([torch.ones((), dtype=dtype)] * 3)
    copy.leave()
    assert [part.shape for part in sent] == [(9,)]
