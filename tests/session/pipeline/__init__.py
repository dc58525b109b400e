"""Tests of what `gradwatch.watch` returns, and of what is behind it."""
