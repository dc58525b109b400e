"""Tests of the fast paths of the engine."""
