"""What only a GPU can show: `pytest tests/gpu`; skipped where torch sees none, CI included.

What ran where, and when, stands in `gradwatch/docs/promises.md`.
"""
