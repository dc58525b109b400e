"""Tests of rules with a condition on others."""
