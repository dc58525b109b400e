"""Tests of what is done about a step that was judged."""
