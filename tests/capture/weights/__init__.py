"""Tests of the looks at weights."""
