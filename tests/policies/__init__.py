"""Clip policies."""
