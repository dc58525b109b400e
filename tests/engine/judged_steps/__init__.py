"""Tests of the steps at which rules are judged."""
