"""One test per situation and number: what is reported against an independent float64 computation.

`python -m tests.matrix` measures every row and writes README.md beside this file; a test holds the two together.
"""
