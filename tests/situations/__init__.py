"""Every situation of training that this package has met, and the laws that hold in each: one table.

`catalogue` names the situations, `laws` the laws; `python -m tests.situations` measures every pair and writes README.md
beside this file, and one test a situation asserts them all.
"""
