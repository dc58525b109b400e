"""What is written as JSON is standard JSON, and numbers come back as they were."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from gradwatch.runtime.json_numbers import json_number, json_ready

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner) | st.tuples(inner),
    max_leaves=10,
)


@given(st.floats())
def test_every_float_comes_back(value: float) -> None:
    """NaN, the infinities, -0.0 and subnormals by way of strict JSON."""
    back = float(json.loads(json.dumps(json_number(value), allow_nan=False)))
    assert math.isnan(back) if math.isnan(value) else math.copysign(1, back) * back == abs(value)
    assert math.isnan(value) or math.copysign(1, back) == math.copysign(1, value)


@given(PLAIN)
def test_plain_data_becomes_strict_json(value: object) -> None:
    """No NaN that JSON lacks, no surrogate that UTF-8 lacks; doing it twice changes nothing."""
    ready = json_ready(value)
    assert json.loads(json.dumps(ready, allow_nan=False, ensure_ascii=False).encode()) == ready
    assert json_ready(ready) == ready
