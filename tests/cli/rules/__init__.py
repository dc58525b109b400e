"""Tests of the commands on rule files."""
