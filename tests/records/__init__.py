"""Tests of what flows through gradwatch."""
