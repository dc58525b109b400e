"""Tests of gradwatch.report."""
