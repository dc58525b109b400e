"""Tests of what is reported of a transition."""
