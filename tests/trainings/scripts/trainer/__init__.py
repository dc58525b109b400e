"""A package that is a program: `python -m trainer --lr 0.05`."""
