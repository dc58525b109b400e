"""What `st.text()` draws from, without the seconds in which hypothesis finds it by encoding every character."""

from __future__ import annotations

from hypothesis import strategies as st

UNICODE = st.characters(exclude_categories=["Cs"])
"""Every character that UTF-8 can encode: all but surrogates."""
