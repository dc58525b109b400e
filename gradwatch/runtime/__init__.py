"""Services of Python and the machine that every part of gradwatch uses: files, JSON, threads, processes.

`guard` and `internal_errors` keep faults of gradwatch out of training, `overhead_timer` measures what it takes.
"""
